"""Wrong rules that limits.py must see: samples without their dot part, and growth with one multiplier spoiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import mupscale as mu
from mupscale.limits import SampledKets
from mupscale.limits.kets import Side
from mupscale.limits.program import Matrix, Vector
from mupscale.limits.real import Grow, grown

OWN_K = 3


class Forgetful(SampledKets):
    """The nearest wrong rule: products without their dot part, as if Wᵀ had never met what W did."""

    def product(self, matrix: Matrix, x: Vector) -> Vector:
        sides = list(matrix.state)
        sides[not matrix.transposed] = Side()
        return super().product(Matrix(self, matrix.kind, matrix.scale, sides, matrix.transposed), x)


def spoiled(
    layer: str, signal: float = 1.0, rate: float = 1.0, noise: Callable[[int], float] = lambda wide: 1.0
) -> Grow:
    """`upscale` with one multiplier wrong: on the widened weight, on its rate, or on its noise, by the wide width."""

    def grow(
        run: mu.Run, make_wide: Callable[[], nn.Module], sizes: mu.MupNoise, lr: float, seed: int
    ) -> mu.Run:
        wide = grown(run, make_wide, sizes, lr, seed)
        weight = wide.model.get_parameter(layer)
        if rate == 1:
            widened = grown(run, make_wide, mu.MupNoise(0.0), lr, seed).model.get_parameter(layer)
            with torch.no_grad():
                weight.copy_(widened * signal + (weight - widened) * noise(weight.shape[1]))
        for group in wide.optimizers[0].param_groups:
            group["lr"] *= rate if any(p is weight for p in group["params"]) else 1.0
        return wide

    return grow


WRONG: dict[str, Grow] = {
    "no 1/k on a matrix": spoiled("2.weight", signal=OWN_K),
    "rate of the readout not divided by k": spoiled("4.weight", rate=OWN_K),
    "rate of the input layer not times k": spoiled("0.weight", rate=1 / OWN_K),
    "noise of a matrix without $N^{-1/2}$": spoiled("2.weight", noise=lambda wide: wide**0.5),
    "noise of the readout without 1/N": spoiled("4.weight", noise=lambda wide: wide),
}
"""The last is what the paper's Algorithm 2 prints beside a readout without output multiplier."""
