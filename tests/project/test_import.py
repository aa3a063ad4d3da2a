"""`import mupscale` is light: it imports no torch, and every name comes when it is first used.

The command line is light too: help and refused arguments come before torch.
"""

import shlex
import subprocess
import sys

import pytest

from mupscale.cli.main import parser

FORBIDDEN = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "transformers", "optuna"):
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


HELP = [
    "",
    *(
        f"{verb} "
        for verb in [
            "plan",
            "widen",
            "upscale",
            "check",
            "tune",
            "report",
            "cost",
            "advise",
            "demo",
            "doctor",
        ]
    ),
]
REFUSED = {
    "plna base -k 2": "plna: did you mean plan?",
    "upscale base wide -k 2 --nosie t=0.1": "--nosie: did you mean --noise?",
    "plan base": "say what grows: -k 2 for every width, or --to layers=8",
    "plan base -k 1.5": "'1.5', expected a whole number from 1 to 9999",
    "plan base -k depth=2": "no such width or tower, expected one of hidden",
    "plan base -k 2 --json none/plan.json": "--json none/plan.json: expected the name of a file",
    "upscale base wide -k 2": "upscale needs a noise size",
    "upscale base wide -k 2 --noise t=1.5": "expected t up to 1, such as t=0.05",
    "upscale base wide -k 2 --noise big": "--noise big: expected auto, or t=…, sigma=…, paired=…",
    "upscale base wide -k 2 --noise t=0.1 --recipe r.json": "give --noise or --recipe, not both",
    "widen base wide -k 2 --dtype int8": "--dtype int8: expected float32",
    "widen base wide -k 2 --shard-size 5XB": "expected a size such as 5GB",
    "widen base wide -k 2 --worker 3/2": "--worker 3/2: expected I/N",
    "widen base wide -k 2 --workers 0": "--workers 0: expected a whole number",
    "tune proxy.py --width 8 -k 1 --steps 4": "it is 1, expected",
    "tune proxy.py --width 8 -k 2 --steps 4 --scheme u": "invalid choice: 'u'",
    "tune proxy.py --width 8 -k 2 --steps 4 --noises 0.1,2": "expected at most 1 with the scheme 't'",
    "cost base -k 2": "the cost cannot be computed",
    "advise base": "no advice can be given",
    "demo --steps 0": "--steps 0: expected a whole number",
    "doctor --disk none": "--disk none: expected a folder that exists",
}


def command(words: str) -> str:
    """Code that runs one command line."""
    return f"from mupscale.cli.main import main; sys.exit(main({shlex.split(words)!r}))"


@pytest.mark.parametrize("verb", HELP)
def test_help_imports_no_torch(verb: str):
    done = without_torch(command(f"{verb}--help"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: mupscale {verb}".rstrip())


def test_the_help_of_every_verb_is_tested():
    (verbs,) = [action.choices for action in parser()._actions if action.dest == "verb"]
    assert verbs
    assert {verb.strip() for verb in HELP} == {"", *verbs}


@pytest.mark.parametrize("words", REFUSED)
def test_arguments_are_refused_without_torch(words: str):
    done = without_torch(command(words))
    assert done.returncode == 2, done.stderr
    assert REFUSED[words] in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", ["plan base -k 2", "check base wide", "demo --steps 1", "doctor"])
def test_a_verb_that_works_imports_torch(words: str):
    """Control."""
    done = without_torch(command(words))
    assert (done.returncode, done.stdout) == (1, "")
    assert "was imported" in done.stderr


def test_lazy_names_are_listed_before_they_are_used():
    """For completion in editors and shells; control: a fresh module object lists nothing of the kind."""
    code = "import mupscale as mu; print('upscale' in dir(mu), 'tuning' in dir(mu), 'Axis' in dir(mu.rules), 'Axis' in dir(mu))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True", "False"]
