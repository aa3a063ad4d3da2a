"""Growth right after an evaluation, and modules that are in a mode of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.data import INPUTS, OUTPUTS
from harness.loops.situation import *


class Dropped(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return F.dropout(super().hidden(x), 0.3, self.training)


class Noisy(Net):
    """Noise in training, as long as the width."""

    def hidden(self, x: Tensor) -> Tensor:
        h = super().hidden(x)
        return h + 0.3 * torch.randn_like(h) if self.training else h


class Penalised(Net):
    """An activity penalty in training: a sum over the width."""

    def forward(self, x: Tensor) -> Tensor:
        penalty = 0.01 * self.inp(x).square().sum(1, keepdim=True) if self.training else 0.0
        return super().forward(x) + penalty


def batch_normed(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, OUTPUTS)
    )


def evaluated(make: Make) -> Pair:
    """Grown in eval mode, and trained on in train mode."""
    run = trained(make)
    run.model.eval()
    pair = grown(run, make)
    run.model.train()
    pair.wide.model.train()
    return pair


@situation(Warned(), "S1")
def dropout_after_evaluation() -> Pair:
    return evaluated(Dropped)


@situation(Warned(), "S1")
def noise_after_evaluation() -> Pair:
    return evaluated(Noisy)


@situation(Warned(), "S1")
def penalty_after_evaluation() -> Pair:
    return evaluated(Penalised)


@situation(Exact(), "S1")
def plain_model_after_evaluation() -> Pair:
    return evaluated(Net)


@situation(Exact(), "S1")
def batch_norm_after_evaluation() -> Pair:
    return evaluated(batch_normed)


@situation(Warned())
def dropout_in_training() -> Pair:
    return grown(trained(Dropped), Dropped)


@situation(Exact())
def batch_norm_frozen_by_eval() -> Pair:
    """The running statistics of one module stay as they are, as detectors are fine-tuned."""
    run = trained(batch_normed)
    run.model[1].eval()  # type: ignore[index]
    return grown(run, batch_normed)
