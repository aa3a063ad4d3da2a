"""`import mupscale` is light: it imports no torch, and every name comes when it is first used.

The command line is light too: help and refused arguments come before torch.
"""

import shlex
import subprocess
import sys

import pytest

from harness.imports import without_torch
from mupscale.cli.main import parser


@pytest.mark.parametrize(
    "code",
    [
        "import mupscale as mu; mu.MupscaleError, mu.__version__, mu.__all__",
        "import mupscale as mu; mu.rules, mu.plans, mu.trainers, mu.diagnostics",
        "from mupscale.rules import Axis, OptimizerRule, Scale, W; from mupscale.rules.optimizers import rule_for; rule_for('torch.optim.AdamW')",
    ],
)
def test_what_needs_no_tensor_imports_no_torch(code: str):
    done = without_torch(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_import_of_torch_is_seen():
    """Control."""
    assert "torch was imported" in without_torch("import mupscale as mu; mu.grow").stderr


def test_a_name_that_does_not_exist_is_refused_as_python_does():
    done = without_torch("import mupscale as mu; mu.groww")
    assert "AttributeError: module 'mupscale' has no attribute 'groww'" in done.stderr


HELP = [
    "",
    *(
        f"{verb} "
        for verb in [
            "plan",
            "grow",
            "upscale",
            "check",
            "same",
            "tune",
            "report",
            "cost",
            "demo",
            "doctor",
        ]
    ),
]


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


@pytest.mark.parametrize("words", ["plan base -k 2", "check wide --base base", "demo --steps 1", "doctor"])
def test_a_verb_that_works_imports_torch(words: str):
    """Control."""
    done = without_torch(command(words))
    assert (done.returncode, done.stdout) == (1, "")
    assert "was imported" in done.stderr


def test_lazy_names_are_listed_before_they_are_used():
    """For completion in editors and shells; control: a fresh module object lists nothing of the kind."""
    code = "import mupscale as mu; print('upscale' in dir(mu), 'studies' in dir(mu), 'State' in dir(mu.rules), 'State' in dir(mu))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True", "False"]
