"""The figures of one experiment: its curves, its sweep, its peers, its ledger. matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, nan
from pathlib import Path
from textwrap import fill
from typing import Any

Curves = Sequence[Sequence[float]]
COLOURS = {
    "base": "#7f7f7f",
    "scratch": "#1f77b4",
    "ours": "#d62728",
    "our_rate": "#aec7e8",
    "continue": "#7f7f7f",
    "net2wider": "#2ca02c",
    "tiling": "#9467bd",
    "zero_padding": "#8c564b",
    "paper_code": "#ff7f0e",
    "ours_paired": "#e377c2",
    "ours_muon": "#17becf",
}


def draw_curves(
    title: str, panels: Mapping[str, Mapping[str, Curves]], labels: Mapping[str, str], along: str, path: Path
) -> None:
    """One panel for each figure (training loss, held-out loss, accuracy): the mean over seeds with their range.

    Curves run from 0 to 1 `along` what they share: steps, or FLOPs. Losses are zoomed to what happens after the first
    tenth.
    """
    figure = _figure(4.2 * len(panels), 3.6)
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (what, methods) in zip(every, panels.items(), strict=True):
        shown: list[float] = []
        for name, seeds in methods.items():
            low, mean, high = _range(seeds)
            xs = [(i + 1) / len(mean) for i in range(len(mean))]
            axes.plot(xs, mean, color=COLOURS.get(name), lw=1.5, label=labels[name])
            axes.fill_between(xs, low, high, color=COLOURS.get(name), alpha=0.15, linewidth=0)
            shown += [v for v in mean[len(mean) // 10 :] if v == v]
        if shown:
            room = 0.05 * (max(shown) - min(shown)) + 1e-9
            axes.set_ylim(min(shown) - room, max(shown) + room)
        axes.set(xlabel=along, ylabel=what)
        axes.spines[["top", "right"]].set_visible(False)
    _legend(figure, every[0])
    _save(figure, title, path)


def draw_sweep(
    title: str,
    tried: Sequence[Mapping[str, Any]],
    best: tuple[float, float],
    noise_curves: Mapping[str, Sequence[float]],
    every: int,
    path: Path,
) -> None:
    """Sweep 2: the loss of every point on learning rate x noise, and the curves at the best rate by noise.

    A point of a curve is the mean of `every` steps.

    Points that were stopped early show their loss in brackets: it is that of an earlier step. × is one that diverged;
    the star marks the best.
    """
    from matplotlib import colormaps

    figure = _figure(9.5, 3.8)
    grid, lines = figure.subplots(1, 2)
    points = {(row["lr"], row["noise"]): row for row in tried if row["sweep"] == "wide"}
    lrs, noises = sorted({lr for lr, _ in points}), sorted({noise for _, noise in points})
    last = max(row["steps"] for row in points.values())
    losses = [row["loss"] for row in points.values() if row["loss"] is not None and row["steps"] == last]
    table = [[nan] * len(lrs) for _ in noises]
    for (lr, noise), row in points.items():
        x, y, loss = lrs.index(lr), noises.index(noise), row["loss"]
        if loss is not None and row["steps"] == last:
            table[y][x] = loss
        text = "×" if loss is None else f"{loss:.3g}" if row["steps"] == last else f"({loss:.3g})"
        grid.text(x, y, text, ha="center", va="center", fontsize=7)
    grid.imshow(table, cmap="viridis_r", aspect="auto", alpha=0.6, vmin=min(losses), vmax=max(losses))
    grid.plot(lrs.index(best[0]), noises.index(best[1]) - 0.3, marker="*", color="C3", ms=11)
    grid.set_xticks(range(len(lrs)), [f"{lr:.3g}" for lr in lrs], fontsize=7)
    grid.set_yticks(range(len(noises)), [f"{noise:.3g}" for noise in noises], fontsize=7)
    grid.invert_yaxis()
    grid.set(xlabel="learning rate, at the reference", ylabel="noise, at the reference")
    ordered = sorted(noise_curves, key=float)
    for number, noise in enumerate(ordered):
        colour = colormaps["viridis"](0.9 * number / max(1, len(ordered) - 1))
        look = {"color": "black", "ls": "--"} if float(noise) == 0 else {"color": colour}
        xs = [(i + 1) * every for i in range(len(noise_curves[noise]))]
        lines.plot(xs, noise_curves[noise], lw=1.2, label=noise, **look)
    lines.set(xlabel="step after growth", ylabel="training loss at the best rate")
    tails = [v for curve in noise_curves.values() for v in curve[len(curve) // 10 :]]
    if tails:  # a curve that blew up leaves the picture
        top = max(v for v in tails if v < 4 * min(tails))
        lines.set_ylim(0.98 * min(tails), 1.02 * top)
    lines.legend(title="noise", frameon=False, fontsize=7, title_fontsize=8)
    lines.spines[["top", "right"]].set_visible(False)
    _save(figure, title, path)


def draw_ledger(
    title: str,
    rows: Mapping[str, Mapping[str, tuple[float, float, float]]],
    accounts: Sequence[str],
    path: Path,
) -> None:
    """Bars of the speedup over training from scratch, four accounts for every method; the line is no speedup.

    A cross on the line: the loss was not reached.
    """
    figure = _figure(9.5, 3.6)
    axes = figure.subplots()
    width = 0.8 / len(accounts)
    for number, account in enumerate(accounts):
        for place, speedups in enumerate(rows.values()):
            x = place + (number - (len(accounts) - 1) / 2) * width
            if account not in speedups:
                axes.plot(x, 1, marker="x", color=f"C{number}", ms=5)
                continue
            mean, low, high = speedups[account]
            label = account if place == _first(rows, account) else None
            axes.bar(x, mean, width, color=f"C{number}", label=label)
            axes.errorbar(x, mean, [[mean - low], [high - mean]], color="black", lw=0.8, capsize=2)
    axes.axhline(1, color="grey", lw=0.8, ls=":")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(rows)), [fill(name, 14) for name in rows], fontsize=8)
    axes.set_ylabel("speedup over training from scratch")
    axes.spines[["top", "right"]].set_visible(False)
    _legend(figure, axes)
    _save(figure, title, path)


def _legend(figure: Any, axes: Any) -> None:
    """The names of the curves below the panels, where they hide none."""
    handles, names = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, names, loc="outside lower center", ncols=min(5, len(names)), frameon=False, fontsize=8
        )


def _first(rows: Mapping[str, Mapping[str, Any]], account: str) -> int:
    return next((i for i, speedups in enumerate(rows.values()) if account in speedups), -1)


def _range(seeds: Curves) -> tuple[list[float], list[float], list[float]]:
    """Lowest, mean and highest over seeds at every point; a seed that diverged leaves a gap in the mean."""
    length = max(map(len, seeds))
    padded = [[*seed, *[inf] * (length - len(seed))] for seed in seeds]
    columns = list(zip(*padded, strict=True))
    mean = [sum(c) / len(c) if max(c) < inf else nan for c in columns]
    return (
        [min(c) if min(c) < inf else nan for c in columns],
        mean,
        [max(c) if max(c) < inf else nan for c in columns],
    )


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
