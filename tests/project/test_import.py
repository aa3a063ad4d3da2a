"""`import mupscale` is light: it imports no torch, and every name comes when it is first used."""

import subprocess
import sys

import pytest

FORBIDDEN = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise SystemExit(f"{name} was imported")
sys.meta_path.insert(0, Forbid())
"""


def without_torch(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", FORBIDDEN + code], capture_output=True, text=True)


@pytest.mark.parametrize(
    "code",
    [
        "import mupscale as mu; mu.MupscaleError, mu.__version__, mu.__all__",
        "import mupscale as mu; mu.rules, mu.plans, mu.trainers, mu.diagnostics",
        "from mupscale.rules import Axis, OptimizerRule, Scale, W; import mupscale as mu; mu.rules.rule_for('torch.optim.AdamW')",
    ],
)
def test_what_needs_no_tensor_imports_no_torch(code: str):
    done = without_torch(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_import_of_torch_is_seen():
    """Control."""
    assert "torch was imported" in without_torch("import mupscale as mu; mu.widen").stderr


def test_a_name_that_does_not_exist_is_refused_as_python_does():
    done = without_torch("import mupscale as mu; mu.widenn")
    assert "AttributeError: module 'mupscale' has no attribute 'widenn'" in done.stderr
