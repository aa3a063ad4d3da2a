"""Declarations for buffers do what they say."""

from typing import Any

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.refusals import refused
from mupscale.plans.direction import Direction
from mupscale.plans.wide_model import fill_model_
from mupscale.proofs.identity import gradient_identity


class Projected(nn.Module):
    """A random projection, summed over the width."""

    table: torch.Tensor
    mask: torch.Tensor

    def __init__(self, n: int) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(4, n), nn.Linear(6, 3)
        self.register_buffer("table", torch.randn(n, 6))
        self.register_buffer("mask", torch.ones(n, n, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> Any:
        h = self.inside(x) @ self.mask.to(x.dtype)
        return self.out(torch.tanh(h / len(self.mask) @ self.table))


X = torch.randn(5, 4, dtype=torch.float64)


def worst(**more) -> float:
    plan = mu.plans.plan_between(Projected, 4, 8, declared=mu.Declared(layouts={"mask": 1}, **more))
    base, wide = Projected(4).double(), Projected(8).double()
    fill_model_(wide, base, Direction(plan), in_place=True)
    return gradient_identity(base, wide, loss=lambda m: m(X).square().mean(), plan=plan).worst[1]


@pytest.mark.parametrize("declared", [{"roles": {"table": "in"}}, {"folds": {"table": "1/2"}}])
def test_a_buffer_is_scaled_as_declared(declared):
    assert worst(**declared) < 1e-12


def test_a_buffer_without_a_declaration_is_copied():
    assert worst() > 1e-3, "control: a sum over copies doubles"


def test_the_search_scales_a_buffer_that_nothing_else_can_absorb():
    plan = mu.plans.plan_between(
        Projected, 4, 8, declared=mu.Declared(layouts={"mask": 1}), loss=lambda m: m(X).square().mean()
    )
    assert str(plan["table"].change.s) == "1/2"


def test_whole_numbers_are_not_scaled():
    with refused("scale.fold_of_whole_numbers", where=["mask", "torch.bool"]):
        mu.plans.plan_between(
            Projected, 4, 8, declared=mu.Declared(layouts={"mask": 1}, folds={"mask": "1/2"})
        )
