"""The harness below tests and benchmarks: who may import whom, how differences are measured, how cases are drawn."""

import argparse
import ast
import math
from pathlib import Path

import pytest
import torch

from harness import closeness, profiles
from harness.program import Outcome, UsageError, option, run

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "src": set(), "examples": set(), "harness": {"harness"}, "reproduce": {"reproduce"},
    "benchmarks": {"benchmarks", "harness"}, "tests": {"harness", "reproduce", "tests"},
}  # fmt: skip
"""Folder -> the folders of this repository, besides the package, that its files may import."""
FILES = [(folder, path) for folder in MAY_IMPORT for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(text: str) -> set[str]:
    """The folders of this repository that a file imports by name, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found & MAY_IMPORT.keys()


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folders_import_in_one_direction(folder):
    texts = {path: path.read_text(encoding="utf-8") for kind, path in FILES if kind == folder}
    assert texts
    wrong = {
        str(path): names for path, text in texts.items() if (names := imported(text) - MAY_IMPORT[folder])
    }
    assert not wrong


@pytest.mark.parametrize(
    "planted",
    ["from tests.conftest import x", "import tests.conftest", "def f():\n    from tests import conftest"],
)
def test_the_direction_test_sees_imports(planted):
    """Controls: an import of the tests is seen in a benchmark, and one of a benchmark in a test, wherever it stands."""
    text = (ROOT / "benchmarks" / "exactness.py").read_text(encoding="utf-8")
    assert imported(text) == {"harness"}
    assert "tests" in imported(f"{text}\n{planted}\n") - MAY_IMPORT["benchmarks"]
    planted = planted.replace("tests", "benchmarks").replace("conftest", "exactness")
    assert "benchmarks" in imported(f"{text}\n{planted}\n") - MAY_IMPORT["tests"]


@pytest.mark.parametrize("path", sorted((ROOT / "harness").rglob("*.py")), ids=lambda path: path.stem)
def test_a_file_of_the_harness_opens_with_what_it_holds(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_a_difference_is_relative_to_what_was_wanted():
    small, large = torch.tensor([1.0, -2.0]), torch.tensor([1.0, -8.0])
    assert closeness.difference(large, small) == 3
    assert closeness.difference(small, large) == 0.75
    assert closeness.largest_difference({"a": small, "b": large}, {"a": small, "b": small}) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_never_close_and_never_a_control(value):
    one = torch.ones(2)
    for pair in ((one * value, one), (one, one * value)):
        gap = closeness.difference(*pair)
        assert gap == math.inf
        with pytest.raises(AssertionError, match="allowed 1e-12"):
            closeness.assert_exact(gap)
        with pytest.raises(AssertionError, match="the control gave inf"):
            closeness.assert_broken(gap)


def test_comparisons_that_show_nothing_fail():
    with pytest.raises(AssertionError, match="nothing to compare with"):
        closeness.difference(torch.zeros(2), torch.zeros(2))
    with pytest.raises(AssertionError, match="shapes"):
        closeness.difference(torch.ones(1), torch.ones(2))
    with pytest.raises(AssertionError, match="not the same bits"):
        closeness.assert_bitwise(torch.ones(1), 1 + 1e-6 * torch.ones(1))
    with pytest.raises(AssertionError):
        closeness.assert_same_tensors({"a": torch.ones(1)}, {"b": torch.ones(1)})


def test_a_profile_is_chosen_by_the_environment(monkeypatch):
    monkeypatch.delenv(profiles.VARIABLE, raising=False)
    usual = profiles.examples(7)
    monkeypatch.setenv(profiles.VARIABLE, "random")
    nightly = profiles.examples(7)
    assert (usual.max_examples, usual.derandomize, usual.database) == (7, True, None)
    assert (nightly.max_examples, nightly.derandomize) == (7, False)
    monkeypatch.setenv(profiles.VARIABLE, "sometimes")
    with pytest.raises(ValueError, match="sometimes is not a profile, expected one of derandomized, random"):
        profiles.examples(7)


@pytest.mark.parametrize(("failed", "code"), [((), 0), (("the loss jumps by 2, allowed 1",), 1)])
def test_a_program_ends_with_its_line_and_fails_with_its_bounds(capsys, failed, code):
    quick = option("--quick", action="store_true")
    found = run(
        lambda chosen: Outcome(f"quick={chosen.quick}", failed),
        quick,
        doc="One.\n\nTwo.",
        arguments=["--quick"],
    )
    *before, line = capsys.readouterr().out.splitlines()
    assert (found, line) == (code, "quick=True")
    assert [text for text in before if text] == [f"FAILED: {text}" for text in failed]


def test_options_that_do_not_fit_end_a_program_as_a_usage_fault(capsys):
    def measure(_: argparse.Namespace) -> Outcome:
        raise UsageError("no setup has 'x' in its name")

    with pytest.raises(SystemExit) as ended:
        run(measure, doc="One.", arguments=[])
    assert ended.value.code == 2
    assert "no setup has 'x' in its name" in capsys.readouterr().err
