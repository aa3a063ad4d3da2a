"""The infinite-width calculus against closed recursions, a stored reference, real training, and wrong multipliers.

Six questions: does the exact backend give the paper's two recursions; do samples give what many more samples gave,
and not without their dot part; do means over finite widths, which know no kets, agree with that reference; does a
program at finite width equal a module that this package grew and torch trained; do finite widths approach the limit
as n^-1/2; and does one wrong multiplier in growth show as a mismatch that does not shrink with width?

    python benchmarks/limits.py [--quick] [--figure docs/figures/limits.png] [--cost] [--make-reference]

The last line is `linear=D tanh=D relu=D without_dot=R reference=E finite=D slope=S`: largest differences from the
recursions and from the reference for two activations; how many times its bound the control misses; the mean at
finite width from the reference, in standard errors; the largest difference from the real module; and the slope of
log error against log width. The exit code is 1 when a bound fails, 2 when limits_reference.json is missing.
`--make-reference` writes that file, `--cost` measures how time grows with steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.limits_controls import OWN_K, WRONG, Forgetful
from mupscale.limits import (
    FiniteWidth,
    LinearKets,
    SampledKets,
    Schedule,
    convergence,
    four_layer,
    four_layer_recursion,
    mlp,
    three_layer,
    three_layer_recursion,
)
from mupscale.limits.convergence import Convergence
from mupscale.limits.real import Grow, grown, train_model

REFERENCE = Path(__file__).with_name("limits_reference.json")
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
LINEAR, SAMPLED, FINITE = 1e-10, {"tanh": 5e-3, "relu": 1e-2}, 1e-12
MISSED = 5  # times its bound that samples without a dot part must be off
STANDARD_ERRORS = 3.0  # of the mean over seeds at the largest width, from the reference
SLOPES = (-0.65, -0.35)
FLAT = -0.2  # the steepest slope that a wrong multiplier may have
SAMPLES = {"tanh": 2**13, "relu": 2**14}


def largest(a: Any, b: Any) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def against_recursions() -> tuple[float, float]:
    """The largest difference of exact programs from the recursions, and the smallest once 1/k is read as 1."""
    worst, control = 0.0, float("inf")
    noise = {"A": 0.5, "B": 0.8, "C": 0.7, "D": 0.6}
    three = {"A": 0.5, "B": 0.8, "C": 0.6}
    settings: dict[str, Any] = {"x": 1.2, "sigma": 0.9, "slope": lambda y: y - 2.5}
    for paper in (True, False):
        schedule = Schedule(13, 5, 0.05, 0.025, growth_takes_a_step=paper)
        for k in (1, 2, 3, 5):
            simple = three_layer(LinearKets(k), schedule, noise=three, **settings)
            closed = three_layer_recursion(schedule, noise=three, **settings)
            deep = four_layer(LinearKets(k), schedule, noise=noise, **settings)
            right = four_layer_recursion(schedule, k=k, noise=noise, **settings)
            worst = max(worst, largest(simple, closed), largest(deep, right))
            if k > 1:
                wrong = four_layer_recursion(schedule, k=1, noise=noise, **settings)
                control = min(control, largest(deep, wrong))
    return worst, control


def sampled(
    name: str, samples: int, seed: int, backend: type[SampledKets] = SampledKets
) -> list[list[float]]:
    return mlp(backend(K, samples, seed), SCHEDULE, activation=ACTIVATIONS[name], **NETWORK)


def make_reference() -> None:
    """Write the mean of four runs at 2¹⁷ draws for each activation, and how far the four lie apart."""
    stored = {}
    for name in ACTIVATIONS:
        runs = np.array([sampled(name, 2**17, seed) for seed in range(100, 104)])
        error = float((runs.std(0, ddof=1) / 2).max())
        stored[name] = {"outputs": runs.mean(0).round(7).tolist(), "standard_error": round(error, 7)}
        print(f"{name}: largest standard error of an output {error:.1e}")
    REFERENCE.write_text(json.dumps(stored, indent=1) + "\n")


def against_modules() -> tuple[float, float]:
    """The largest difference of programs at width 64 from real modules, and the smallest with another noise."""
    worst, control = 0.0, float("inf")
    for activation in ACTIVATIONS.values():
        for k in (1, 2, 3):
            settings = {**NETWORK, "activation": activation}
            real = train_model(64, k, SCHEDULE, seed=k, keep_values=True, **settings)
            worst = max(
                worst,
                largest(mlp(FiniteWidth(64, k, values=real.values), SCHEDULE, **settings), real.outputs),
            )
            start = {name: value for name, value in real.values.items() if not name.startswith("noise")}
            other = mlp(FiniteWidth(64, k, values=start), SCHEDULE, **settings)
            control = min(control, largest(other, real.outputs))
    return worst, control


def finite_widths(name: str, limits: tuple[Any, Any], quick: bool) -> list[Convergence]:
    """The same runs at finite widths against each of two limits."""

    @cache
    def finite(n: int, seed: int) -> list[list[float]]:
        return mlp(FiniteWidth(n, K, seed), SCHEDULE, activation=ACTIVATIONS[name], **NETWORK)

    widths, seeds = (
        ((128, 256, 512), (32, 24, 16)) if quick else ((128, 256, 512, 1024, 2048), (48, 48, 32, 24, 12))
    )
    return [convergence(limit, finite, widths, seeds) for limit in limits]


def own_multipliers(quick: bool) -> tuple[Convergence, dict[str, Convergence]]:
    """The package's own growth against the limit, as it is and with each multiplier spoiled, after growth."""
    limit = np.mean([mlp(SampledKets(OWN_K, 2**14, seed), OWN_SCHEDULE, **OWN) for seed in range(3)], 0)

    def measured(grow: Grow, seeds: tuple[int, ...]) -> Convergence:
        def finite(n: int, seed: int) -> list[list[float]]:
            return train_model(n, OWN_K, OWN_SCHEDULE, seed=seed, grow=grow, **OWN).outputs

        return convergence(
            limit, finite, (128, 256, 512, 1024)[: len(seeds)], seeds, since=OWN_SCHEDULE.grow_at
        )

    right = measured(grown, (16, 12, 8) if quick else (48, 48, 40, 32))
    return right, {name: measured(grow, (4, 3, 2) if quick else (8, 8, 6, 6)) for name, grow in WRONG.items()}


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="smaller widths and fewer seeds")
    parser.add_argument(
        "--figure", type=Path, help="where to draw the comparison of right and wrong multipliers"
    )
    parser.add_argument("--cost", action="store_true", help="measure time against steps, and nothing else")
    parser.add_argument(
        "--make-reference", action="store_true", help=f"write {REFERENCE.name}, and nothing else"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.cost or asked.make_reference:
        (show_cost if asked.cost else make_reference)()
        return 0
    if not REFERENCE.is_file():
        print(f"needs {REFERENCE}: python benchmarks/limits.py --make-reference")
        return 2
    reference = json.loads(REFERENCE.read_text())
    failed = []

    def check(good: bool, what: str) -> None:
        if not good:
            failed.append(what)

    linear, control = against_recursions()
    print(
        f"exact programs and recursions differ by {linear:.1e}; with 1/k read as 1, by {control:.3f} at least"
    )
    check(
        linear <= LINEAR < control, f"recursions: {linear:.1e}, allowed {LINEAR:.0e}; control {control:.1e}"
    )
    differences, without_dot, missed = {}, {}, float("inf")
    for name, samples in SAMPLES.items():
        differences[name] = largest(sampled(name, samples, seed=0), reference[name]["outputs"])
        own = reference[name]["standard_error"]
        without_dot[name] = sampled(name, samples, seed=0, backend=Forgetful)
        control = largest(without_dot[name], reference[name]["outputs"])
        print(
            f"{name}, {samples} draws: {differences[name]:.1e} from the reference, whose four runs agree to {own:.1e}; "
            f"without the dot part, {control:.3f}"
        )
        missed = min(missed, control / SAMPLED[name])
        check(
            differences[name] <= SAMPLED[name] and control >= MISSED * SAMPLED[name],
            f"{name}: {differences[name]:.1e}, allowed {SAMPLED[name]:.0e}; without the dot part {control:.1e}",
        )
    finite, control = against_modules()
    print(
        f"programs at width 64 and real modules differ by {finite:.1e}; with other noise, by {control:.3f} at least"
    )
    check(finite <= FINITE < control, f"modules: {finite:.1e}, allowed {FINITE:.0e}; control {control:.1e}")
    standard_errors = 0.0
    for name in ("relu", "tanh"):
        limits = reference[name]["outputs"], without_dot[name]
        # Slopes of all widths are asked of tanh; for relu, the largest width of the quick run tests the reference.
        widths, other = finite_widths(name, limits, asked.quick or name == "relu")
        print(f"\n{name}, finite widths against the limit\n{widths}")
        off, control = widths.bias[-1], other.bias[-1]
        print(
            f"the mean at n = {widths.widths[-1]}, which knows no kets, is {off:.2f} standard errors "
            f"({widths.errors[-1] / widths.seeds[-1] ** 0.5:.1e} each) from the stored reference; "
            f"from a limit without dot parts, {control:.1f}"
        )
        check(
            off <= STANDARD_ERRORS < control / 2,
            f"reference of {name}: {off:.2f} standard errors, allowed {STANDARD_ERRORS}; control {control:.1f}",
        )
        standard_errors = max(standard_errors, off)
    check(SLOPES[0] <= widths.slope <= SLOPES[1], f"slope {widths.slope:.3f}, expected in {SLOPES}")
    right, wrong = own_multipliers(asked.quick)
    print(f"\n`upscale` against the limit, k = {OWN_K}\n{right}\n\n… with one multiplier wrong: error, slope")
    check(SLOPES[0] <= right.slope <= SLOPES[1], f"slope of upscale {right.slope:.3f}, expected in {SLOPES}")
    for name, measured in wrong.items():
        errors = "".join(f"{error:11.4f}" for error in measured.errors)
        print(f"{name:40}{errors}  {measured.slope:+.2f}")
        margin = measured.errors[-1] / right.errors[-1]
        check(
            measured.slope >= FLAT and margin >= 3,
            f"{name}: slope {measured.slope:+.2f}, {margin:.1f} times the error",
        )
    if asked.figure is not None:
        shown = {name: measured for name, measured in wrong.items() if max(measured.errors) < 1}
        right.plot(
            asked.figure, shown, grow_at=OWN_SCHEDULE.grow_at
        )  # errors of hundreds would hide the others
    for failure in failed:
        print(f"FAILED: {failure}")
    found = " ".join(f"{name}={difference:.1e}" for name, difference in differences.items())
    print(
        f"\nlinear={linear:.1e} {found} without_dot={missed:.0f} reference={standard_errors:.2f} "
        f"finite={finite:.1e} slope={widths.slope:.3f}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
