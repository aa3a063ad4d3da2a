"""For every test: one thread. Plans without a process for each, and a store, where a module asks for them."""

import hashlib
import json
import os
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import mupscale
from harness.object_store import object_store
from harness.trainer import Trained
from mupscale.checkpoints import grow_directory
from mupscale.cli import check
from mupscale.families.record import FamilyPlan
from mupscale.storage import remote

torch.set_num_threads(1)  # pytest-xdist gives every worker one core


@cache
def _code() -> str:
    """A digest of the package and of the libraries that plans depend on: plans of other code are not used."""
    digest = hashlib.sha256(f"{torch.__version__} {version('transformers')}".encode())
    for file in sorted(Path(mupscale.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def planned_here(request):
    """Models are planned and loaded in this process; plans are kept in pytest's cache, where all workers and later runs of
    the same code find them.

    Starting a process with transformers takes most of the time of both. `test_a_plan_comes_from_a_process_of_its_own` and
    `test_losses_come_from_a_process_of_its_own` have the real ones.
    """
    from mupscale.families import loaded, loading
    from mupscale.families.plan import family_plan
    from mupscale.families.prove import prove

    folder = Path(request.config.cache.mkdir("plans"))

    def plan_here(config, multipliers, **options):
        asked = json.dumps([_code(), config, multipliers, options], sort_keys=True, default=repr)
        kept = folder / f"{hashlib.sha256(asked.encode()).hexdigest()}.json"
        if not kept.exists():
            # In the order of the model, as a process of its own answers; `to_json` sorts.
            found = json.dumps(prove(family_plan(config, multipliers, **options)).as_json())
            whole = kept.with_suffix(f".{os.getpid()}")
            whole.write_text(found, encoding="utf-8")
            whole.replace(kept)
        return FamilyPlan.from_json(kept.read_text(encoding="utf-8"))

    def loaded_here(task, request):
        try:
            return loading.answer(json.loads(json.dumps(request)))
        except mupscale.MupscaleError:
            raise
        except Exception as error:  # what ends the process
            raise mupscale.MupscaleError(str(error), code="model.loading_process_died") from error

    with pytest.MonkeyPatch.context() as patch:
        for module in (grow_directory, check):
            patch.setattr(module, "plan_in_process", plan_here)
        patch.setattr(loaded, "ask", loaded_here)
        yield


@pytest.fixture(scope="module")
def store():
    """One S3 server for the tests of a module, which finds it by its variables; that of another module is forgotten."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    with object_store(smallest=1024) as found, pytest.MonkeyPatch.context() as patch:
        for name, value in found.environment.items():
            patch.setenv(name, value)
        patch.setattr(remote, "_known", {})
        yield found


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The bases of `harness.trainer` at step 20, in a folder that the workers of pytest-xdist share for this session."""
    own = tmp_path_factory.getbasetemp()
    return Trained((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "trained")
