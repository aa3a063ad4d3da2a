"""Maps of a sweep: learning rate × noise, the loss as colour, at the end and where runs were compared.

Colours compare losses at one step only: runs that were stopped before the end are hatched and labelled with their step. Zero noise
has its own row, since a logarithmic axis has no place for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from textwrap import fill

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..agenda.grid import Point
from .known import Sweep, Tried

STAR, GREY, INK = "#D55E00", "#d9d9d9", "#222222"
MOST_TEXT = 8  # columns above which cells are too narrow for text
WIDEST = 9.6  # inches, as wide as a page of 1,200 pixels: a wider picture is shrunk, with its text
Value = Callable[[Tried], float | None]


def short(values: Sequence[float]) -> list[str]:
    """Numbers with as few digits as distinguish them.

    >>> short([0.00390625, 0.0078125]), short([0.1, 0.1000001])
    (['0.0039', '0.0078'], ['0.1', '0.1000001'])
    """
    for digits in (2, 3, 4, 8):
        texts = [f"{value:.{digits}g}" for value in values]
        if len(set(texts)) == len(set(values)):
            break
    return texts


def draw_map(sweep: Sweep, noise_name: str) -> Figure:
    """Every point with its loss at the last rung it reached: in colour at the end, hatched before it."""
    lrs, noises = _lines(sweep)
    figure = Figure(
        figsize=(min(WIDEST, 2.6 + 0.95 * len(lrs)), min(12, 1.9 + 0.55 * len(noises))), layout="constrained"
    )
    axes = figure.subplots()
    _cells(axes, sweep, _at_end, whole=True, text=len(lrs) <= MOST_TEXT)
    _star(axes, sweep, lrs, noises)
    _label(axes, sweep, noise_name)
    _colour_bar(figure, axes, _finished(sweep), f"loss at step {sweep.ladder.rungs[-1]}")
    return figure


def draw_rungs(sweep: Sweep, noise_name: str) -> Figure | None:
    """One map for each step at which runs were compared, with a scale of its own; None when there is only one."""
    ends = [end for end in sweep.ladder.rungs if any(end in t.rungs for t in sweep.tried)]
    if len(ends) < 2:
        return None
    lrs, noises = _lines(sweep)
    wide = min(3.6, 1.3 + 0.32 * len(lrs), WIDEST / len(ends))
    figure = Figure(
        figsize=(wide * len(ends), min(9, max(3.6, 1.6 + 0.36 * len(noises)))), layout="constrained"
    )
    for axes, end in zip(figure.subplots(1, len(ends), squeeze=False)[0], ends, strict=True):
        here = [t.rungs[end] for t in sweep.tried if end in t.rungs]
        _cells(axes, sweep, partial(_at, end))
        _star(axes, sweep, lrs, noises)
        _label(axes, sweep, noise_name if end == ends[0] else "")
        axes.tick_params(labelsize=9, labelleft=end == ends[0])
        axes.tick_params(axis="x", rotation=90)
        axes.set_title(f"step {end}: {len(here)} points", fontsize=10)
        _colour_bar(figure, axes, [v for v in here if v < inf], "")
    return figure


def _at(end: int, tried: Tried) -> float | None:
    return tried.rungs.get(end)


def _at_end(tried: Tried) -> float | None:
    return tried.loss if tried.state == "finished" else None


def _lines(sweep: Sweep) -> tuple[list[float], list[float]]:
    return (sorted({t.point.lr for t in sweep.tried}), sorted({t.point.noise or 0.0 for t in sweep.tried}))


def _finished(sweep: Sweep) -> list[float]:
    return [t.loss for t in sweep.tried if t.state == "finished" and t.loss is not None]


def _norm(values: Sequence[float]) -> Normalize:
    low, high = min(values, default=1.0), max(values, default=1.0)
    if low == high:
        low, high = (low * 0.9, low * 1.1) if low > 0 else (low - 1, low + 1)
    return LogNorm(low, high) if low > 0 and high > 3 * low else Normalize(low, high)


def _colour_bar(figure: Figure, axes: Axes, values: Sequence[float], label: str) -> None:
    """The legend of the colours; nothing while no cell is coloured."""
    if not values:
        return
    norm = _norm(values)
    bar = figure.colorbar(ScalarMappable(norm, "viridis"), ax=axes, pad=0.02)
    bar.set_label(label)
    low, high = float(norm.vmin or 0), float(norm.vmax or 0)
    middle = (low * high) ** 0.5 if isinstance(norm, LogNorm) else (low + high) / 2
    bar.set_ticks([low, middle, high], labels=[f"{v:.3g}" for v in (low, middle, high)])
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=9)


def _cells(axes: Axes, sweep: Sweep, value: Value, whole: bool = False, text: bool = False) -> None:
    """A cell for each point: coloured by its value, empty with a cross when it diverged.

    A `whole` map has every point: hatched when it did not get to its end, blank while nothing is known.
    """
    lrs, noises = _lines(sweep)
    norm = _norm([v for t in sweep.tried if (v := value(t)) is not None and v < inf])
    for tried in sweep.tried:
        x, y, loss = lrs.index(tried.point.lr), noises.index(tried.point.noise or 0.0), value(tried)
        colour: str | tuple[float, ...] = "white"
        hatch, state = None, "finished" if loss is not None else tried.state
        if loss == inf or (whole and tried.state == "diverged"):
            axes.plot([x], [y], marker="x", color=INK, markersize=9, gid="diverged")
            state = "diverged"
        elif loss is not None:
            colour = colormaps["viridis"](norm(loss))
        elif not whole:
            continue
        elif tried.state == "stopped":
            colour, hatch = GREY, "////"
        place = (x - 0.5, y - 0.5)
        axes.add_patch(
            Rectangle(place, 1, 1, facecolor=colour, hatch=hatch, edgecolor="white", gid=f"cell {state}")
        )
        if text:
            dark = loss is not None and loss < inf and norm(loss) < 0.55
            _write(axes, tried, x, y - (0.2 if tried is sweep.leader else 0), "white" if dark else INK)
    axes.set_xlim(-0.5, len(lrs) - 0.5)
    axes.set_ylim(-0.5, len(noises) - 0.5)


def _write(axes: Axes, tried: Tried, x: float, y: float, ink: str) -> None:
    if tried.state == "open":
        axes.text(x, y, "not yet", ha="center", va="center", fontsize=8, color="#666666")
    elif tried.state == "stopped":
        box = {"facecolor": GREY, "edgecolor": "none", "pad": 1.0}
        text = f"{tried.loss:.3g}\nat step {tried.steps}"
        axes.text(x, y, text, ha="center", va="center", fontsize=8, color=INK, bbox=box)
    elif tried.state == "finished":
        axes.text(x, y, f"{tried.loss:.4g}", ha="center", va="center", fontsize=9.5, color=ink)


def _star(axes: Axes, sweep: Sweep, lrs: Sequence[float], noises: Sequence[float]) -> None:
    """On the chosen point; while the sweep runs, a hollow star on the leading point."""
    leader = sweep.leader
    if leader is not None:
        place = [lrs.index(leader.point.lr)], [noises.index(leader.point.noise or 0.0) + 0.2]
        fill, gid = (STAR, "best") if sweep.best is not None else ("none", "leader")
        edge = "white" if sweep.best is not None else STAR
        axes.plot(*place, marker="*", markersize=15, color=fill, markeredgecolor=edge, zorder=6, gid=gid)


def _label(axes: Axes, sweep: Sweep, noise_name: str) -> None:
    lrs, noises = _lines(sweep)
    axes.set_xticks(range(len(lrs)), short(lrs))
    axes.set_yticks(range(len(noises)), [_noise(v) for v in noises])
    if len(lrs) > 8:
        axes.tick_params(axis="x", rotation=90)
    axes.tick_params(length=0)
    axes.set_xlabel("learning rate")
    # At its font size an inch holds about twelve letters; the rest of the height is what stands above and below the axes.
    inches = axes.figure.get_figure(root=True).get_figheight() - 1.1
    axes.set_ylabel(fill(noise_name, max(10, int(12 * inches))))
    axes.set_facecolor("white")
    if 0.0 in noises:
        axes.axhline(0.5, color=INK, linewidth=1.2)


def _noise(value: float) -> str:
    return "no noise" if value == 0 else f"{value:.4g}"


def place_of(point: Point) -> str:
    """A point in words.

    >>> place_of(Point(0.0039, 0.0)), place_of(Point(0.25, 0.2))
    ('no noise, learning rate 0.0039', 'noise 0.2, learning rate 0.25')
    """
    noise = "" if point.noise is None else "no noise, " if point.noise == 0 else f"noise {point.noise:.4g}, "
    return f"{noise}learning rate {point.lr:.4g}"
