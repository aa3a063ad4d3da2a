"""One relative difference: the same for numbers, tensors and parts of tensors."""

import ast
from math import inf, nan
from pathlib import Path

import pytest
import torch

from mupscale.tensors.differences import FLOOR, curve_gap, difference, loss_gap, relative, whole

PACKAGE = Path(__file__).parents[2] / "src" / "mupscale"


def test_it_is_relative_and_never_negative():
    assert loss_gap(-4.0, -3.0) == loss_gap(4.0, 3.0) == 0.25
    assert relative(3e-8, 2e-8) == 3e-8 / FLOOR, "below the floor the floor counts"
    assert relative(3e-8, 2e-8, unit=1e-9) == 3e-8 / 2e-8, "in its own unit it is not below the floor"


def test_rounding_of_a_zero_is_not_an_error_and_a_small_wrong_number_is():
    assert loss_gap(0.0, 2e-16) <= 1e-9
    assert loss_gap(1e-17, -1e-16) <= 1e-9
    assert not loss_gap(0.0, 1e-14) <= 1e-9, "control"


@pytest.mark.parametrize("odd", [nan, inf, -inf])
def test_what_is_not_a_number_is_infinitely_far(odd):
    assert loss_gap(1.0, odd) == inf
    assert loss_gap(odd, 1.0) == inf
    assert relative(odd, odd) == inf
    assert difference(torch.tensor([1.0, odd]), torch.ones(2)).relative() == inf
    assert curve_gap([1.0, odd], [1.0, 1.0]) == inf
    assert curve_gap([1.0, odd], [1.0, odd]) == 0.0, "both diverged"


def test_curves_of_nothing_prove_nothing():
    assert curve_gap([], []) == inf


def test_parts_give_the_difference_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    want = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    found = 1.5 * want + 1e-3 * torch.randn(6, 5, generator=generator, dtype=torch.float64)
    once = difference(found, want)
    parts = [difference(f, w) for f, w in zip(found.split(4), want.split(4), strict=True)]
    parts.append(difference(found[:0], want[:0]))  # a rank that holds nothing
    together = whole(parts)
    assert (together.gap, together.size) == (once.gap, once.size)
    assert together.ratio == pytest.approx(once.ratio, rel=1e-12)
    assert once.ratio == pytest.approx(1.5, rel=1e-2)
    assert whole(parts[:1]) != once, "control: a part alone is not the whole"


def quotients(text):
    """Divisions whose numerator takes an absolute value of a difference: a relative difference written by hand."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            inside = ast.unparse(node.left)
            if "abs(" in inside and " - " in inside:
                found.append(ast.unparse(node))
    return found


def test_no_other_file_writes_a_relative_difference():
    hands = {path.name: quotients(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert not {name: found for name, found in hands.items() if found}
    assert quotients("x = abs(a - b) / max(abs(a), 1e-9)"), "control"
    assert quotients("x = float((a - b).abs().max()) / size"), "control"
