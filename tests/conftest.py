"""For every test: one thread. Plans without a process for each, where a module asks for them."""

import json
import os

import pytest
import torch

from harness.trainer import Trained
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
            _KNOWN[key] = prove(family_plan(config, multipliers, **options)).to_json()
        return FamilyPlan.from_json(_KNOWN[key])

    with pytest.MonkeyPatch.context() as patch:
        for module in (plan, check):
            patch.setattr(module, "plan_in_process", plan_here)
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The bases of `harness.trainer` at step 20, in a folder that the workers of pytest-xdist share for this session."""
    own = tmp_path_factory.getbasetemp()
    return Trained((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "trained")
