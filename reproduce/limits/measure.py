"""The network, the reference and the wrong rules by which tests hold the infinite-width calculus against real training.

    python -m reproduce.limits [--figure docs/figures/limits.png]   errors of right and of wrong multipliers, by width
    python -m reproduce.limits --cost                               how time grows with steps
    python -m reproduce.limits --make-reference                     write reference.json anew

The last line of the first is `slope=S flattest=S margin=M`: the slope of log error against log width of growth as it is, the
steepest slope of a wrong multiplier, and its least error over the right one's at the largest width.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import mupscale as mu

from .convergence import Convergence, convergence
from .finite import FiniteWidth
from .kets import Side
from .mlp import mlp
from .program import Matrix, Vector
from .real import Grow, grown, train_model
from .sampled import SampledKets
from .schedule import Schedule

REFERENCE = Path(__file__).with_name("reference.json")
ACTIVATIONS: dict[str, nn.Module] = {"tanh": nn.Tanh(), "relu": nn.ReLU()}
SCHEDULE = Schedule(steps=9, grow_at=4, rate=0.5, rate_after=0.3)
NETWORK: dict[str, Any] = {
    "inputs": [[1.0, 0.3], [-0.5, 0.8], [0.2, -1.0]],
    "targets": [1.0, -0.5, 0.7],
    "sigma": [1.0, 1.3, 1.3],
    "noise": [0.4, 0.5, 0.5],
}
K = 2
OWN_SCHEDULE = Schedule(steps=9, grow_at=3, rate=0.2, rate_after=0.3)
OWN: dict[str, Any] = {
    "inputs": NETWORK["inputs"],
    "targets": [2.0, -1.0, 1.4],
    "sigma": [1.0, 1.5, 1.0],
    "noise": [0.5, 1.5, 0.5],
    "activation": nn.Tanh(),
}
SAMPLED = {"tanh": 5e-3, "relu": 1e-2}
STANDARD_ERRORS = 3.0  # of the mean over seeds at the largest width, from the reference
SLOPES = (-0.65, -0.35)
FLAT = -0.2  # the steepest slope that a wrong multiplier may have
SAMPLES = {"tanh": 2**13, "relu": 2**14}
OWN_K = 3


def largest(a: Any, b: Any) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def sampled(
    name: str, samples: int, seed: int, backend: type[SampledKets] = SampledKets
) -> list[list[float]]:
    return mlp(backend(K, samples, seed), SCHEDULE, activation=ACTIVATIONS[name], **NETWORK)


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
"""The last is what the paper's Algorithm 2 prints next to a readout without output multiplier."""


def make_reference() -> None:
    """Write the mean of four runs at 2¹⁷ draws for each activation, and how far the four lie apart."""
    stored = {}
    for name in ACTIVATIONS:
        runs = np.array([sampled(name, 2**17, seed) for seed in range(100, 104)])
        error = float((runs.std(0, ddof=1) / 2).max())
        stored[name] = {"outputs": runs.mean(0).round(7).tolist(), "standard_error": round(error, 7)}
        print(f"{name}: largest standard error of an output {error:.1e}")
    REFERENCE.write_text(json.dumps(stored, indent=1) + "\n")


def own_multipliers() -> tuple[Convergence, dict[str, Convergence]]:
    """The package's own growth against the limit, as it is and with each multiplier spoiled, after growth."""
    limit = np.mean([mlp(SampledKets(OWN_K, 2**14, seed), OWN_SCHEDULE, **OWN) for seed in range(3)], 0)

    def measured(grow: Grow, seeds: tuple[int, ...]) -> Convergence:
        def finite(n: int, seed: int) -> list[list[float]]:
            return train_model(n, OWN_K, OWN_SCHEDULE, seed=seed, grow=grow, **OWN).outputs

        return convergence(limit, finite, (128, 256, 512, 1024), seeds, since=OWN_SCHEDULE.grow_at)

    right = measured(grown, (48, 48, 40, 32))
    return right, {name: measured(grow, (8, 8, 6, 6)) for name, grow in WRONG.items()}


def show_cost() -> None:
    """Time of one run by its number of steps: samples are fixed, and every step adds vectors that all later ones meet."""
    print("steps  SampledKets 4096  FiniteWidth 512  (seconds)")
    for steps in (10, 20, 40, 80):
        schedule = Schedule(steps, steps // 2, 0.1)
        spent = []
        for backend in (SampledKets(K, 2**12), FiniteWidth(512, K)):
            started = time.process_time()
            mlp(backend, schedule, activation=ACTIVATIONS["tanh"], **NETWORK)
            spent.append(time.process_time() - started)
        print(f"{steps:5}{spent[0]:18.2f}{spent[1]:17.2f}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m reproduce.limits", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--figure", type=Path, help="where to draw right and wrong multipliers")
    parser.add_argument("--cost", action="store_true", help="measure time against steps, and nothing else")
    parser.add_argument(
        "--make-reference", action="store_true", help=f"write {REFERENCE.name}, and nothing else"
    )
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if chosen.cost or chosen.make_reference:
        (show_cost if chosen.cost else make_reference)()
        return 0
    right, wrong = own_multipliers()
    print(f"`upscale` against the limit, k = {OWN_K}\n{right}\n\n… with one multiplier wrong: error, slope")
    for name, found in wrong.items():
        print(f"{name:40}{''.join(f'{error:11.4f}' for error in found.errors)}  {found.slope:+.2f}")
    if chosen.figure is not None:
        shown = {name: found for name, found in wrong.items() if max(found.errors) < 1}
        right.plot(
            chosen.figure, shown, grow_at=OWN_SCHEDULE.grow_at
        )  # errors of hundreds would hide the others
    flattest = min(found.slope for found in wrong.values())
    margin = min(found.errors[-1] for found in wrong.values()) / right.errors[-1]
    print(f"slope={right.slope:.3f} flattest={flattest:.2f} margin={margin:.1f}")
    holds = SLOPES[0] <= right.slope <= SLOPES[1] and flattest >= FLAT and margin >= 3
    return 0 if holds else 1
