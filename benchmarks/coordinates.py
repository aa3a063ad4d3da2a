"""Under μP activations move by the same amount at every width, and under PyTorch's defaults they do not.

A fresh model takes four steps on one batch; the figure is the change of every module's output and of the
logits on that batch, averaged over seeds, and its slope against width on a log-log scale. Initialisation and
learning rates come from `mu.init_weights_` and `mu.param_groups`, with constants written at the reference. Next to
them stands the control: PyTorch's defaults, that is, the model as it is built at every width (the readout's
size falls with the root of the width, as everywhere) and one learning rate for all tensors and widths.

Muon's iteration runs in float32 instead of bfloat16, which is many times slower on a CPU.

    python benchmarks/coordinates.py [--quick] [--figure docs/figures/coordinates.png]

The last line is `checks=N worst=S control=C`: the slope farthest from 0, and the least of the controls'
farthest slopes, over models and optimizers; the exit code is 1 when a bound fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

import mupscale as mu
from harness.exactness import precise_muon
from harness.program import Outcome, option, pool, run
from harness.runs import step
from harness.widths import FAMILIES, Family

BOUND, QUICK_BOUND, CONTROL = 0.05, 0.10, 0.15
MOVED = 1e-5  # a change that is smaller tests nothing
STEPS = 4
RATES: dict[tuple[str, str], Mapping[str, float]] = {
    ("MLP", "SGD"): {"SGD": 1.0},
    ("MLP", "AdamW"): {"AdamW": 2e-3},
    ("MLP", "Muon+AdamW"): {"Muon": 0.01, "AdamW": 2e-3},
    ("transformer", "SGD"): {"SGD": 0.1},
    ("transformer", "AdamW"): {"AdamW": 2e-3},
    ("transformer", "Muon+AdamW"): {"Muon": 0.01, "AdamW": 2e-3},
}
"""Learning rates at the reference, or, in the control, of every tensor at every width."""


@dataclass(frozen=True)
class Check:
    """One optimizer on one model, over widths; without a reference it is the control."""

    family: str
    optimizer: str
    widths: tuple[int, ...]
    reference: int | None
    seeds: int

    @property
    def name(self) -> str:
        how = "control" if self.reference is None else f"reference {self.reference}"
        return f"{self.family}, {self.optimizer}, {how}"


def optimizers(model: nn.Module, plan: mu.Plan | None, names: Mapping[str, float]) -> list[optim.Optimizer]:
    """The optimizers by name, Muon for matrices that grow both ways; without a plan, one group each."""
    rest = dict(model.named_parameters())
    made: list[optim.Optimizer] = []
    for name, lr in names.items():
        kind: Any = getattr(optim, name)
        skip = ("inputs", "readout", "tokens", "positions") if name == "Muon" else ()
        mine = {n: p for n, p in rest.items() if not skip or (p.dim() == 2 and not n.startswith(skip))}
        rest = {n: p for n, p in rest.items() if n not in mine}
        if plan is None:
            made.append(kind(list(mine.values()), lr=lr))
        else:
            made.append(kind(mu.param_groups(model, plan, kind, parameters=mine.items(), lr=lr)))
    return made


def start(family: Family, check: Check, width: int, seed: int) -> mu.Run:
    rates = RATES[check.family, check.optimizer]
    if check.reference is None:
        torch.manual_seed(seed)
        model = family.make(width)
        return mu.Run(model, optimizers(model, None, rates))
    model, plan = family.fresh(check.reference, width, seed)
    return mu.Run(model, optimizers(model, plan, rates), since=plan)


def changes(check: Check) -> mu.diagnostics.Coordinates:
    torch.set_num_threads(1)
    family = FAMILIES[check.family]

    with precise_muon():
        return mu.diagnostics.coordinate_check(
            partial(start, family, check),
            step=lambda run, _: step(run, family.loss(run.model)),
            probe=family.loss,
            widths=check.widths,
            steps=STEPS,
            seeds=check.seeds,
        )


def checks(quick: bool) -> list[Check]:
    pairs = [("MLP", "SGD"), ("MLP", "AdamW")] if quick else list(RATES)
    widths: tuple[int, ...] = (64, 128, 256) if quick else (64, 128, 256, 512, 1024)
    below = [] if quick else [(256, (64, 96, 160, 640))]
    kinds: list[tuple[int | None, tuple[int, ...]]] = [(64, widths), *below, (None, widths)]
    return [Check(*pair, sizes, reference, 2 if quick else 4) for pair in pairs for reference, sizes in kinds]


def failures(found: Mapping[Check, mu.diagnostics.Coordinates], bound: float) -> Iterable[str]:
    """Every bound that does not hold, in words."""
    for check, measured in found.items():
        least = min(min(values) for values in measured.changes.values())
        if check.reference is None:
            if not abs(measured.worst) >= CONTROL:
                yield f"{check.name}: no slope beyond {measured.worst:+.3f}, so the check sees nothing"
        elif not abs(measured.worst) <= bound:
            name = max(measured.slopes, key=lambda module: abs(measured.slopes[module]))
            yield f"{check.name}: {name or 'output'} has slope {measured.worst:+.3f}, allowed {bound}"
        elif not least >= MOVED:
            yield f"{check.name}: something moved by {least:.1e} only, so it tests nothing"


def draw(found: Mapping[Check, mu.diagnostics.Coordinates], path: Path) -> None:
    """Two panels, μP and the control: the logits of every run and the hidden layers, relative to the first width."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    colours = {pair: f"C{i}" for i, pair in enumerate(RATES)}
    for check, measured in found.items():
        if check.reference not in (64, None):
            continue
        panel = panels[int(check.reference is None)]
        for module, values in measured.changes.items():
            panel.plot(
                check.widths,
                [value / values[0] for value in values],
                color=colours[check.family, check.optimizer],
                lw=0.5 if module else 2,
                alpha=0.5 if module else 1,
                label=None if module else f"{check.family}, {check.optimizer}",
            )
    for panel, title in zip(
        panels, ("μP: init_weights_ and param_groups", "control: PyTorch's defaults"), strict=True
    ):
        panel.set(xscale="log", yscale="log", xlabel="width", title=title)
        panel.set_xticks(check.widths, [str(width) for width in check.widths])
        panel.minorticks_off()
        panel.axhline(1, color="black", lw=0.5, ls=":")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"change after {STEPS} steps, over width {check.widths[0]}")
    panels[0].legend(frameon=False, fontsize=7, title="logits (thin: every layer)", title_fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def measure(options: argparse.Namespace) -> Outcome:
    planned = checks(options.quick)
    # the dearest first, so that the workers end together
    order = sorted(planned, key=lambda c: (c.family != "transformer", "Muon" not in c.optimizer))
    with pool() as workers:
        futures = {check: workers.submit(changes, check) for check in order}
        found = {check: futures[check].result() for check in planned}
    for check, measured in found.items():
        print(f"{check.name}\n{measured}\n")
    print(f"{'farthest slope':32}" + "".join(f"{name:>16}" for name in ("reference 64", "256", "control")))
    for family, optimizer in dict.fromkeys((c.family, c.optimizer) for c in planned):
        row = {c.reference: m for c, m in found.items() if (c.family, c.optimizer) == (family, optimizer)}
        cells = (f"{row[key].worst:+.3f}" if key in row else "-" for key in (64, 256, None))
        print(f"{family + ', ' + optimizer:32}" + "".join(f"{cell:>16}" for cell in cells))
    if options.figure is not None:
        draw(found, options.figure)
    worst = max((m.worst for c, m in found.items() if c.reference is not None), key=abs)
    control = min(abs(m.worst) for c, m in found.items() if c.reference is None)
    failed = list(failures(found, QUICK_BOUND if options.quick else BOUND))
    return Outcome(f"checks={len(planned)} worst={worst:+.3f} control={control:.3f}", failed)


if __name__ == "__main__":
    quick = option("--quick", action="store_true", help=f"the MLP to width 256, bound {QUICK_BOUND}")
    sys.exit(
        run(measure, quick, option("--figure", type=Path, help="where to draw the changes"), doc=__doc__)
    )
