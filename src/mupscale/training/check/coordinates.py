"""The coordinate check: do activations move by the same amount at every width?

For each width a fresh run takes a few steps; the change of every module's output on a fixed batch is
measured, and its slope against width on a log-log scale is 0 under μP. It detects rates and sizes that are wrong
by a power of the width. It does not detect errors of eps or decay; the certificate does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...arguments import wrong_function, wrong_kind, wrong_whole
from ...errors import Fault, raise_faults
from ...extras import needs
from ...models.outputs import outputs_of
from ...runs.run import Run

Start = Callable[[int, int], Run]
Probe = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Coordinates:
    """The measured changes by module, one number per width.

    Args:
        widths: The widths that were compared.
        changes: By name of module the change of its output at each width; the whole model is "".

    >>> Coordinates((64, 128, 256), {"readout": (0.5, 0.25, 0.125)}).slopes
    {'readout': -1.0}
    """

    widths: tuple[int, ...]
    changes: dict[str, tuple[float, ...]]

    @property
    def slopes(self) -> dict[str, float]:
        """Least-squares slope of log2(change) against log2(width)."""
        xs = [log2(width) for width in self.widths]
        mean = sum(xs) / len(xs)
        spread = sum((x - mean) ** 2 for x in xs)
        return {
            name: sum((x - mean) * log2(max(y, 1e-300)) for x, y in zip(xs, ys, strict=True)) / spread
            for name, ys in self.changes.items()
        }

    @property
    def worst(self) -> float:
        """The slope farthest from 0."""
        return max(self.slopes.values(), key=abs)

    def __str__(self) -> str:
        head = f"{'module':28}" + "".join(f"{width:>10}" for width in self.widths) + f"{'slope':>8}"
        rows = [
            f"{name or 'output':28}" + "".join(f"{y:10.3g}" for y in ys) + f"{self.slopes[name]:+8.3f}"
            for name, ys in self.changes.items()
        ]
        return "\n".join([head, *rows])

    def plot(self, path: Path | str, title: str = "") -> None:
        """Write the curves to a figure; needs the `plot` extra."""
        with needs("a figure", "plot"):
            from matplotlib.figure import Figure
        figure = Figure(figsize=(5.2, 3.6), layout="constrained")
        axes = figure.subplots()
        for name, ys in self.changes.items():
            axes.plot(self.widths, ys, marker="o", ms=3, lw=1, label=name or "output")
        axes.set(
            xscale="log", yscale="log", xlabel="width", ylabel="change of activations (RMS)", title=title
        )
        axes.set_xticks(self.widths, [str(width) for width in self.widths])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=6, ncols=2)
        figure.savefig(path, dpi=150)


def coordinate_check(
    start: Start,
    *,
    step: Callable[[Run, int], Any],
    probe: Probe,
    widths: Sequence[int],
    steps: int = 4,
    seeds: int = 4,
) -> Coordinates:
    """Measure how far every module's output moves in the first steps, at several widths, averaged over seeds.

    In μP the changes do not depend on the width, so every slope is near 0.

    Args:
        start: `start(width, seed)` returns a fresh run.
        step: `step(run, i)` takes one training step on batch i.
        probe: `probe(model)` runs a fixed batch.
        widths: The widths that are compared.
        steps: How many steps are taken before the outputs are compared.
        seeds: Over how many seeds the changes are averaged.

    Returns:
        The change of every module's output at every width, and its slope.

    Raises:
        MupscaleError: If there are too few widths, or a function takes other arguments.

    >>> import mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> x = torch.ones(4, 3)
    >>> def start(width, seed):
    ...     model, plan = make(width), mu.plans.plan_between(make, 8, width)
    ...     mu.init_weights_(model, plan, std=make(8), seed=seed)
    ...     return Run(model, torch.optim.SGD(mu.param_groups(model, plan, torch.optim.SGD, lr=0.1)))
    >>> def step(run, i):
    ...     run.optimizer.zero_grad()
    ...     run.model(x).square().mean().backward()
    ...     run.optimizer.step()
    >>> check = coordinate_check(start, step=step, probe=lambda model: model(x), widths=(8, 16), steps=1, seeds=1)
    >>> list(check.slopes)                                          # the first layer, the readout, the model
    ['0', '2', '']
    """
    faults = [*wrong_function("start", start, "width", "seed"), *wrong_function("step", step, "run", "i")]
    faults += [*wrong_function("probe", probe, "model"), *wrong_whole("steps", steps, least=1)]
    faults += wrong_whole("seeds", seeds, least=1)
    if len(set(widths)) < 2:
        what = f"they are {list(widths)}, expected two or more: a slope needs them"
        faults.append(
            Fault("argument.too_few_widths", "widths", what, "write widths=(64, 128, 256), for example")
        )
    raise_faults("coordinates cannot be checked", faults)
    changes: dict[str, list[float]] = {}
    for width in widths:
        sums: dict[str, float] = {}
        for seed in range(seeds):
            run = start(width, seed)
            kind = wrong_kind("start(width, seed)", run, Run, "return Run(model, optimizer)")
            raise_faults("coordinates cannot be checked", kind)
            before = _outputs(run.model, probe)
            for i in range(steps):
                step(run, i)
            for name, after in _outputs(run.model, probe).items():
                moved = float((after - before[name]).square().mean().sqrt())
                sums[name] = sums.get(name, 0.0) + moved / seeds
        for name, value in sums.items():
            changes.setdefault(name, []).append(value)
    return Coordinates(tuple(widths), {name: tuple(values) for name, values in changes.items()})


def _outputs(model: nn.Module, probe: Probe) -> dict[str, Tensor]:
    """The output of every module that holds parameters, and of the whole model."""
    watched = {n for n, m in model.named_modules() if not n or list(m.parameters(recurse=False))}
    with torch.no_grad():
        seen = outputs_of(model, lambda: probe(model))
    return {name: output for name, output in seen.items() if name in watched}
