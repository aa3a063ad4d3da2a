"""For every test: one thread. The fast subset; plans without a process for each, where a module asks for them."""

import json
from pathlib import Path

import pytest
import torch

from mupscale.cli import check, plan
from mupscale.families.record import FamilyPlan

ROOT = Path(__file__).parents[1]
# The subset of `./check fast`: one file per idea, each of them seconds of processor time. All others run in CI.
FAST = (
    "src/mupscale/rules",
    "tests/rules",
    "tests/tensors/test_kernel.py",
    "tests/files/test_headers.py",
    "tests/plans/test_plans.py",
    "tests/training/test_clip.py",
    "tests/training/test_runs.py",
    "tests/training/test_state_dicts.py",
    "tests/training/test_verify.py",
    "tests/project/test_architecture.py",
    "tests/project/test_habits.py",
    "tests/project/test_public_names.py",
    "tests/project/test_release.py",
)

torch.set_num_threads(1)  # pytest-xdist gives every worker one core

_KNOWN: dict[str, str] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the files of the fast subset, before `-m fast` selects."""
    chosen = tuple(ROOT / name for name in FAST)
    for item in items:
        if any(item.path.is_relative_to(path) for path in chosen):
            item.add_marker("fast")


@pytest.fixture(scope="module")
def planned_here():
    """Plans are made in this process and remembered, because starting one with transformers takes most of the time.

    `test_a_plan_comes_from_a_process_of_its_own` has the real one.
    """
    from mupscale.families.plan import family_plan
    from mupscale.families.prove import prove

    def plan_here(config, multipliers, **options):
        key = json.dumps([config, multipliers, options], sort_keys=True)
        if key not in _KNOWN:
            _KNOWN[key] = prove(family_plan(config, multipliers, **options)).to_json()
        return FamilyPlan.from_json(_KNOWN[key])

    with pytest.MonkeyPatch.context() as patch:
        for module in (plan, check):
            patch.setattr(module, "plan_in_process", plan_here)
        yield
