"""Noise sized by μP moves every layer by the same amount at every width, and never the logits by more.

Bases of several widths are trained under μP with one reference and upscaled to twice their width. For each
tensor the figure is the RMS of its noise times the activations that really enter it, which are the trained
base's with every entry copied, and its slope against width on a log-log scale: 0 for tensors whose out axis
grows, -1/2 for those that grow in only (readouts), whose noise fades. Next to them stand the controls: noise of
one size on matrices of every width, and readouts given the matrix rule.

    python benchmarks/noise_sizes.py [--quick]

The last line is `tensors=N out=S in_only=S logits=S unscaled=C matrix_rule=C`: the slope nearest to its bound in
each class, and the controls; the exit code is 1 when a bound fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mupscale as mu
from harness.data import HELD_OUT
from harness.program import Outcome, option, pool, run
from harness.runs import step
from harness.widths import FAMILIES, Family, slope

REFERENCE, SIGMA, RATE, STEPS = 128, 0.05, 2e-3, 100
WIDTHS, SEEDS = (128, 256, 512, 1024, 2048), 3
QUICK_WIDTHS, QUICK_SEEDS, QUICK_STEPS = (64, 128, 256, 512), 2, 30
LOGITS = 0.05
CONTROLS = {"matrix": 0.3, "in-only": -0.1}  # the least slope of noise of the wrong size
OUT, IN_ONLY = 0.07, (-0.65, -0.4)
QUICK_OUT, QUICK_IN_ONLY = 0.15, (-0.75, -0.3)


@dataclass(frozen=True)
class Row:
    """One tensor over the widths: RMS of its noise times its input, right and with the control's size."""

    family: str
    tensor: str
    kind: str
    moves: list[float]
    slope: float
    control: float


Moves = tuple[dict[str, float], dict[str, float]]
"""By tensor, the RMS of noise times input, right and with the control's size; and the change of the logits."""


def train(family: Family, width: int, seed: int, steps: int) -> mu.Run:
    model, reference = family.fresh(REFERENCE, width, seed)
    optimizer = torch.optim.AdamW(mu.param_groups(model, reference, torch.optim.AdamW, lr=RATE))
    made = mu.Run(model, optimizer, since=reference)
    for number in range(steps):
        step(made, family.loss(model, number))
    return made


def inputs_of(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """What enters every linear layer and embedding, by the name of its weight."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            seen[f"{name}.weight"] = args[0].detach()

        return hook

    handles = [
        module.register_forward_hook(keep(name))
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding))
    ]
    with torch.no_grad():
        model(batch)
    for handle in handles:
        handle.remove()
    return seen


def kind_of(entry: mu.plans.TensorPlan) -> str:
    roles = {axis.role for axis in entry.axes if axis.grows}
    return "matrix" if roles == {"in", "out"} else "out" if "out" in roles else "in-only"


def moves(name: str, width: int, seed: int, steps: int) -> Moves:
    torch.set_num_threads(1)
    family, ratio = FAMILIES[name], 2 * width / REFERENCE
    base = train(family, width, seed, steps)
    plan = family.plan(width, 2 * width)
    tensors = dict(base.model.named_parameters())
    noise = mu.diagnostics.resolve_noise(tensors, mu.MupNoise(SIGMA), plan=plan, seed=seed, since=base.since)
    wide = mu.grow(base.model, lambda: family.make(2 * width), plan=plan, prove=False).model
    batch = family.batch(HELD_OUT)[0]
    right: dict[str, float] = {}
    wrong: dict[str, float] = {}
    with torch.no_grad():
        logits = wide(batch)
        entering = inputs_of(wide, batch)  # the wide model is exact: these are the base's, copied
        for tensor, x in entering.items():
            drawn, parameter = noise.tensor(tensor), wide.get_parameter(tensor)
            assert drawn is not None
            assert isinstance(drawn.std, float)
            delta = drawn.slice(plan[tensor].axes, [0, 0], parameter.shape, parameter)
            moved = F.linear(x, delta) if x.is_floating_point() else delta[x]
            right[tensor] = float(moved.square().mean().sqrt())
            # noise times input is linear in the noise, so another size needs no other draw
            size = SIGMA * (1.0 if kind_of(plan[tensor]) == "matrix" else ratio**-0.5)
            wrong[tensor] = right[tensor] * size / drawn.std
            parameter.add_(delta)
        right["logits"] = wrong["logits"] = float((wide(batch) - logits).square().mean().sqrt())
    return right, wrong


def collect(family: str, widths: tuple[int, ...], found: Mapping[int, list[Moves]]) -> list[Row]:
    """Means over seeds, by tensor, and their slopes; `found` has the seeds of every width."""
    plan = FAMILIES[family].plan(widths[0], 2 * widths[0])
    rows = []
    for name in found[widths[0]][0][0]:
        right, wrong = ([fmean(m[side][name] for m in found[w]) for w in widths] for side in (0, 1))
        kind = "logits" if name == "logits" else kind_of(plan[name])
        rows.append(Row(family, name, kind, right, slope(widths, right), slope(widths, wrong)))
    return rows


def failures(rows: Iterable[Row], quick: bool) -> Iterable[str]:
    """Every bound that does not hold, in words."""
    out = QUICK_OUT if quick else OUT
    low, high = QUICK_IN_ONLY if quick else IN_ONLY
    allowed = {"matrix": (-out, out), "out": (-out, out), "in-only": (low, high), "logits": (-inf, LOGITS)}
    for r in rows:
        least, most = allowed[r.kind]
        if not least <= r.slope <= most:
            yield f"{r.family}, {r.tensor} has slope {r.slope:+.3f}, allowed {least:+.2f} to {most:+.2f}"
        if r.kind in CONTROLS and not r.control >= CONTROLS[r.kind]:
            yield f"{r.family}, {r.tensor} with the wrong size has slope {r.control:+.3f}, expected {CONTROLS[r.kind]:+.2f} or more"


def measure(chosen: argparse.Namespace) -> Outcome:
    quick = chosen.quick
    widths, seeds, steps = (QUICK_WIDTHS, QUICK_SEEDS, QUICK_STEPS) if quick else (WIDTHS, SEEDS, STEPS)
    families = ["MLP"] if quick else list(FAMILIES)
    with pool() as workers:
        jobs = {
            (family, width, seed): workers.submit(moves, family, width, seed, steps)
            for family in reversed(families)
            for width in reversed(widths)
            for seed in range(seeds)
        }
        found = {job: future.result() for job, future in jobs.items()}
    rows = [
        row
        for family in families
        for row in collect(family, widths, {w: [found[family, w, s] for s in range(seeds)] for w in widths})
    ]
    print(f"RMS of noise times input, mean of {seeds} seeds, base width\n")
    print(f"{'':38}" + "".join(f"{width:>9}" for width in widths) + f"{'slope':>8}{'control':>9}")
    for r in rows:
        numbers = "".join(f"{value:9.4f}" for value in r.moves)
        control = f"{r.control:+9.3f}" if r.kind in CONTROLS else f"{'-':>9}"
        print(f"{r.family:12}{r.tensor:18}{r.kind:8}{numbers}{r.slope:+8.3f}{control}")
    by_kind = {kind: [r for r in rows if r.kind == kind] for kind in ("matrix", "out", "in-only", "logits")}
    out = max((r.slope for r in by_kind["matrix"] + by_kind["out"]), key=abs)
    readout = max((r.slope for r in by_kind["in-only"]), key=lambda value: abs(value + 0.5))
    logits = max(r.slope for r in by_kind["logits"])
    unscaled, matrix_rule = (min(r.control for r in by_kind[kind]) for kind in CONTROLS)
    line = (
        f"tensors={len(rows) - len(families)} out={out:+.3f} in_only={readout:+.3f} logits={logits:+.3f} "
        f"unscaled={unscaled:+.3f} matrix_rule={matrix_rule:+.3f}"
    )
    return Outcome(line, list(failures(rows, quick)))


if __name__ == "__main__":
    quick = option("--quick", action="store_true", help="the MLP at small widths, with looser bounds")
    sys.exit(run(measure, quick, doc=__doc__))
