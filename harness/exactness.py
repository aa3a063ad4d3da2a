"""A base that was trained for a few steps with one of the optimizers of `setups.py`, and how its outputs continue."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import _muon

import mupscale as mu
from harness.data import HELD_OUT
from harness.models import Case
from harness.runs import step
from harness.setups import Setup, newton_schulz

EVERY = 5
"""Steps between two outputs."""


def output(model: nn.Module, case: Case) -> Tensor:
    """What the model says about the held-out batch, in eval mode, so that BatchNorm's buffers count too."""
    model.eval()
    with torch.no_grad():
        found: Tensor = model(case.batch(HELD_OUT)[0])
    model.train()
    return found


def train(run: mu.Run, case: Case, sign: int, steps: range) -> list[Tensor]:
    """Take the steps; return the outputs before, every few steps, and after."""
    outputs = [output(run.model, case)]
    for i in steps:
        step(run, sign * case.loss(run.model, i))
        if (i - steps.start + 1) % EVERY == 0:
            outputs.append(output(run.model, case))
    return outputs


def warm_base(setup: Setup, case: Case) -> mu.Run:
    torch.manual_seed(0)
    model = case.make(case.base)
    run = mu.Run(model, setup.build(model))
    train(run, case, setup.sign, range(setup.warm))
    return run


def precise_muon() -> AbstractContextManager[object]:
    """Muon without its own rounding, which is far above the bound."""
    return patch.object(_muon, "_zeropower_via_newtonschulz", newton_schulz)


def prepare_worker() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    # torch warns about sparse tensors unless asked either way
    torch.sparse.check_sparse_tensor_invariants.enable()  # type: ignore[no-untyped-call]


def every_third(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """A third of the pairs of names: every first name with some of its second names, which change from one to the next.

    >>> every_third([(a, b) for a in "uv" for b in "xyz"])
    [('u', 'x'), ('v', 'y')]
    """
    found = []
    for n, first in enumerate(dict.fromkeys(first for first, _ in pairs)):
        own = [pair for pair in pairs if pair[0] == first]
        found += own[n % min(3, len(own)) :: 3]
    return found
