"""weight_norm at each place of a kernel, as speech models have it: the norm is over rows and columns."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import mupscale as mu
from harness.refusals import refused
from mupscale.rules.scale import Scale

GAIN = "2.parametrizations.weight.original0"


def make(wide: int, inner: int = 4) -> nn.Module:
    kernel = weight_norm(nn.Conv1d(wide, inner, 3, padding=1), dim=2)
    return nn.Sequential(
        nn.Linear(3, wide), nn.Unflatten(1, (wide, 1)), kernel, nn.Flatten(), nn.GELU(), nn.Linear(inner, 1)
    )


@pytest.mark.parametrize(("wide", "inner", "fold"), [(12, 4, "3^(-1/2)"), (12, 12, "1"), (4, 12, "3^(1/2)")])
def test_the_gain_absorbs_the_longer_norm(wide, inner, fold):
    inputs = (torch.randn(5, 3),)
    plan = mu.infer_plan(lambda: make(4), lambda: make(wide, inner), example_inputs=inputs)
    assert str(plan[GAIN].fold) == fold
    wrong = replace(plan[GAIN], fold=plan[GAIN].fold * Scale.of(2))
    broken = replace(plan, tensors={**plan.tensors, GAIN: wrong})
    with refused("proof.run_deviates"):
        mu.grow(make(4), lambda: make(wide, inner), plan=broken, example_inputs=inputs)
