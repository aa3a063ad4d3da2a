"""For every test: one thread. Plans without a process for each, and a store, where a module asks for them."""

import json

import pytest
import torch

from harness.object_store import object_store
from mupscale.cli import check, plan
from mupscale.families.record import FamilyPlan

torch.set_num_threads(1)  # pytest-xdist gives every worker one core
_KNOWN: dict[str, str] = {}


@pytest.fixture(scope="module")
def planned_here():
    """Plans are made in this process and remembered, because starting one with transformers takes most of the time.

    `test_a_plan_comes_from_a_process_of_its_own` has the real one.
    """
    from mupscale.families.plan import family_plan
    from mupscale.families.prove import prove

    def plan_here(config, multipliers, **options):
        key = json.dumps([config, multipliers, options], sort_keys=True, default=repr)
        if key not in _KNOWN:
            # In the order of the model, as a process of its own answers; `to_json` sorts.
            _KNOWN[key] = json.dumps(prove(family_plan(config, multipliers, **options)).as_json())
        return FamilyPlan.from_json(_KNOWN[key])

    with pytest.MonkeyPatch.context() as patch:
        for module in (plan, check):
            patch.setattr(module, "plan_in_process", plan_here)
        yield


@pytest.fixture(scope="module")
def store():
    """One S3 server for the tests of a module, which finds it by its variables."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    with object_store(smallest=1024) as found, pytest.MonkeyPatch.context() as patch:
        for name, value in found.environment.items():
            patch.setenv(name, value)
        yield found
