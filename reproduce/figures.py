"""The figures of the experiments, one function each. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, nan
from pathlib import Path
from statistics import fmean
from typing import Any


def draw_transfer(
    title: str,
    powers: tuple[Sequence[int], Sequence[int]],
    bands: Mapping[str, tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]],
    path: Path,
) -> None:
    """Loss against learning rate and against noise: a curve for each row, with the range of its seeds.

    `powers` are the powers of two along the two axes; `bands` gives, for each name, the losses of every seed along
    both. Names that start with "without" are drawn dashed, as controls. The best point of each curve has a star; a
    cross at the top is a point where a seed diverged.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    every = figure.subplots(1, 2, sharey=True)
    ours = [name for name in bands if not name.startswith("without")]
    colours = {name: colormaps["viridis"](0.9 * i / max(1, len(ours) - 1)) for i, name in enumerate(ours)}
    for axes, along, label, place in zip(
        every, powers, ("learning rate, at the reference", "noise, at the reference"), (0, 1), strict=True
    ):
        for name, both in bands.items():
            _band(axes, [2.0**p for p in along], both[place], name, colours.get(name))
        axes.axvline(2.0 ** along[len(along) // 2], color="grey", lw=0.7, ls=":", zorder=0)
        axes.set_xscale("log", base=2)
        axes.set_xlim(2.0 ** (along[0] - 0.3), 2.0 ** (along[-1] + 0.3))
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    every[0].set_ylabel("training loss at the end")
    means = [[fmean(c) for c in zip(*seeds, strict=True)] for both in bands.values() for seeds in both]
    bests, seen = [min(line) for line in means], [loss for line in means for loss in line if loss < inf]
    top = min(1.6 * max(bests), 1.01 * max(seen))
    every[0].set_ylim(min(bests) - 0.06 * (top - min(bests)), top)
    every[0].set_yscale("log")
    every[0].yaxis.set_major_formatter("{x:.3g}")
    every[0].yaxis.set_minor_formatter("{x:.3g}")
    every[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _band(axes: Any, xs: Sequence[float], seeds: Sequence[Sequence[float]], name: str, colour: Any) -> None:
    """The mean over seeds with their range; where one diverged the curve has a gap."""
    columns = list(zip(*seeds, strict=True))
    mean = [fmean(column) for column in columns]
    control = colour is None
    look = {"color": "C3" if control else colour, "ls": "--" if control else "-"}
    axes.plot(
        xs, [loss if loss < inf else nan for loss in mean], marker="o", ms=3, lw=1.4, label=name, **look
    )
    gone = [x for x, loss in zip(xs, mean, strict=True) if loss == inf]
    axes.plot(gone, [0.99] * len(gone), "x", ms=5, color=look["color"], transform=axes.get_xaxis_transform())
    low, high = [min(c) for c in columns], [max(c) for c in columns]
    axes.fill_between(
        xs, low, high, where=[h < inf for h in high], color=look["color"], alpha=0.15, linewidth=0
    )
    best = min(range(len(mean)), key=mean.__getitem__)
    axes.plot(xs[best], mean[best], marker="*", ms=11, color=look["color"], zorder=3)
