"""Finite widths against their limit: how far off they are, and whether that falls as n^-1/2.

Knows: outputs as numbers, errors, slopes, a table and a figure. The function that computes outputs, from a program
at finite width or a real model, is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mupscale.arguments import wrong_whole
from mupscale.errors import Fault, MupscaleError, raise_faults
from mupscale.extras import needs

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Convergence:
    """Errors against the limit by width, and what was seen at the smallest width."""

    limit: Numbers
    """Steps down, outputs across."""
    since: int
    """The step from which errors are counted."""
    widths: tuple[int, ...]
    seeds: tuple[int, ...]
    errors: tuple[float, ...]
    """Root mean square over steps, outputs and seeds."""
    bias: tuple[float, ...]
    """Error of the mean over seeds, in its own standard errors, root mean square: about 1 when there is no bias."""
    low: Numbers
    high: Numbers
    """Lowest and highest over the seeds of the smallest width, shaped as the limit."""

    @property
    def slope(self) -> float:
        """Least-squares slope of log error against log width: -1/2 when the limit is right, 0 when it is not."""
        return float(np.polyfit(np.log(self.widths), np.log(self.errors), 1)[0])

    def __str__(self) -> str:
        head = f"{'n':>6}{'seeds':>7}{'error':>11}{'√n·error':>10}{'bias/se':>9}"
        rows = [
            f"{n:6}{seeds:7}{error:11.5f}{error * n**0.5:10.3f}{bias:9.2f}"
            for n, seeds, error, bias in zip(self.widths, self.seeds, self.errors, self.bias, strict=True)
        ]
        return "\n".join([head, *rows, f"slope {self.slope:+.3f}"])

    def plot(
        self, path: Path | str, others: Mapping[str, Convergence] | None = None, grow_at: int | None = None
    ) -> None:
        """Outputs and errors in one figure, next to the errors of `others`; needs the `plot` extra."""
        with needs("a figure", "plot"):
            from matplotlib.figure import Figure
            from matplotlib.ticker import LogLocator, StrMethodFormatter
        figure = Figure(figsize=(11, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 0.9))
        self._draw_outputs(left, grow_at)
        self._draw_errors(right, others or {})
        right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        right.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=130)

    def _draw_outputs(self, axes: Any, grow_at: int | None) -> None:
        steps = range(len(self.limit))
        for i in range(self.limit.shape[1]):
            band = f"width {self.widths[0]}, all seeds" if i == 0 else None
            line = "infinite width" if i == 0 else None
            axes.fill_between(
                steps, self.low[:, i], self.high[:, i], color=f"C{i}", alpha=0.25, lw=0, label=band
            )
            axes.plot(steps, self.limit[:, i], color=f"C{i}", lw=1.8, label=line)
        if grow_at is not None:
            axes.axvline(grow_at, color="grey", lw=0.8, ls=":", label="growth")
        axes.set(xlabel="step", ylabel="output, one colour for each input", title="outputs during training")
        axes.legend(frameon=False, fontsize=8)

    def _draw_errors(self, axes: Any, others: Mapping[str, Convergence]) -> None:
        axes.plot(self.widths, self.errors, "o-", color="C0", label=f"as it is ({self.slope:+.2f})")
        ideal = [self.errors[0] * (n / self.widths[0]) ** -0.5 for n in self.widths]
        axes.plot(self.widths, ideal, color="black", lw=0.8, ls="--", label="slope -1/2")
        for i, (name, other) in enumerate(others.items(), 3):
            label = f"{name} ({other.slope:+.2f})"
            axes.plot(other.widths, other.errors, "s-", color=f"C{i}", ms=4, lw=1, label=label)
        axes.set(xscale="log", yscale="log", xlabel="width n before growth", ylabel="error against the limit")
        axes.set_title("errors, and their slopes")
        axes.set_xticks(self.widths, [str(n) for n in self.widths])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def convergence(
    limit: ArrayLike,
    finite: Callable[[int, int], ArrayLike],
    widths: Sequence[int],
    seeds: int | Sequence[int] = 16,
    since: int = 0,
) -> Convergence:
    """Measure `finite(width, seed)` against the limit at several widths, each over some seeds.

    Outputs are numbers, one or several for each step. Errors are counted from step `since` on.

    >>> def finite(width, seed):                                   # an error of n^-1/2, up or down
    ...     return [1 + (-1) ** seed / width**0.5]
    >>> round(convergence([1.0], finite, widths=(64, 256, 1024), seeds=4).slope, 6)
    -0.5
    """
    faults = wrong_whole("seeds", seeds, least=2) if isinstance(seeds, Real) else []
    raise_faults("nothing can be measured", faults)
    counts = [seeds] * len(widths) if isinstance(seeds, int) else list(seeds)
    target = _table(limit)
    if len(widths) < 2 or list(widths) != sorted(set(widths)):
        faults.append(
            Fault(
                "limits.widths_not_ascending",
                "widths",
                f"they are {list(widths)}, expected two or more, ascending",
                "write (64, 256), for example",
            )
        )
    if len(counts) != len(widths) or min(counts, default=0) < 2:
        what = f"they are {counts}, expected a number for each width, 2 or more"
        faults.append(Fault("limits.too_few_seeds", "seeds", what, "write seeds=16, for example"))
    if not 0 <= since < len(target):
        faults.append(
            Fault(
                "limits.since_outside_of_steps",
                "since",
                f"it is {since} of {len(target)} steps",
                f"write 0 to {len(target) - 1}",
            )
        )
    raise_faults("nothing can be measured", faults)
    runs = []
    for n, count in zip(widths, counts, strict=True):
        run = np.stack([_table(finite(n, seed)) for seed in range(count)])
        if run.shape[1:] != target.shape:
            shapes = f"the limit has shape {target.shape}, a run of width {n} has {run.shape[1:]}"
            raise MupscaleError(
                f"{shapes}, expected the same; return one row for each step", code="limits.shapes_differ"
            )
        runs.append(run)
    late = [(run - target)[:, since:] for run in runs]
    return Convergence(
        limit=target,
        since=since,
        widths=tuple(widths),
        seeds=tuple(counts),
        errors=tuple(float(np.sqrt(np.mean(error**2))) for error in late),
        bias=tuple(_bias(error) for error in late),
        low=runs[0].min(0),
        high=runs[0].max(0),
    )


def _table(outputs: ArrayLike) -> Numbers:
    numbers = np.asarray(outputs, dtype=np.float64)
    return numbers.reshape(len(numbers), -1)


def _bias(errors: Numbers) -> float:
    standard = errors.std(0, ddof=1) / len(errors) ** 0.5
    moved = standard > 0
    return float(np.sqrt(np.mean((errors.mean(0)[moved] / standard[moved]) ** 2))) if moved.any() else 0.0
