"""Lines and bars of one study: sweep 1, training curves of sweep 2, cost. Losses are joined at equal steps only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, log2
from statistics import fmean

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .bars import Bars
from .known import Known, Sweep, Tried
from .maps import INK, STAR, short

MOST_CURVES = 8  # more are hard to tell apart
SPANS = 100  # of a run, each a point of its curve: single steps are too noisy to compare


def rate_axis(axes: Axes, rates: Iterable[float], name: str = "learning rate") -> None:
    """A logarithmic axis that names the values themselves, as many as have room."""
    shown: list[float] = []
    values = sorted(set(rates))
    for value in values:
        if not shown or log2(value / shown[-1]) >= log2(values[-1] / values[0]) / 8.5:
            shown.append(value)
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, short(shown))
    axes.minorticks_off()
    axes.set_xlabel(name)


def logarithmic(axes: Axes, values: Iterable[float]) -> None:
    """Losses on a logarithmic axis where that helps: all above zero, and spread out."""
    known = list(values)
    if not known or min(known) <= 0 or max(known) < 1.5 * min(known):
        return
    axes.set_yscale("log")
    few = max(known) > 20 * min(known)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3) if few else (1, 1.5, 2, 3, 5, 7), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def thinned(curve: Sequence[tuple[int, float]], goal: int) -> list[tuple[float, float]]:
    """A curve in at most a hundred means over equal spans of a run of `goal` steps, each at the end of its span.

    >>> thinned([(1, 4.0), (2, 2.0), (4, 1.0)], goal=200)
    [(2, 3.0), (4, 1.0)]
    """
    span = max(1, -(-goal // SPANS))
    grouped: dict[int, list[tuple[int, float]]] = {}
    for step, loss in curve:
        grouped.setdefault((step - 1) // span, []).append((step, loss))
    return [(part[-1][0], fmean(loss for _, loss in part)) for part in grouped.values()]


def draw_first(sweep: Sweep) -> Figure | None:
    """Sweep 1: loss against learning rate, a line for each step at which runs were compared; None without a loss."""
    if sweep.leader is None:
        return None
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    ends = [end for end in sweep.ladder.rungs if any(end in t.rungs for t in sweep.tried)]
    for number, end in enumerate(ends):
        known = sorted((t.point.lr, t.rungs[end]) for t in sweep.tried if end in t.rungs)
        alive = [(lr, loss) for lr, loss in known if loss < inf]
        colour = colormaps["cividis"](0.7 - 0.65 * number / max(1, len(ends) - 1))
        axes.plot(*_columns(alive), "o-", color=colour, label=f"at step {end}", markersize=4 + number)
    _crosses(axes, [t.point.lr for t in sweep.tried if t.state == "diverged"])
    if sweep.leader.loss is not None:
        filled = sweep.best is not None
        axes.plot(
            [sweep.leader.point.lr], [sweep.leader.loss], "*", markersize=15, zorder=5,
            color=STAR if filled else "none", markeredgecolor="white" if filled else STAR, gid="best",
        )  # fmt: skip
    logarithmic(axes, [v for t in sweep.tried for v in t.rungs.values() if v < inf])
    rate_axis(axes, [t.point.lr for t in sweep.tried])
    axes.set_ylabel("loss")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=10)
    return figure


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _crosses(axes: Axes, places: Sequence[float]) -> None:
    """Runs that diverged, on the upper edge: they have no loss."""
    if places:
        axes.plot(
            places, [0.97] * len(places), "x", color=INK, transform=axes.get_xaxis_transform(), label="diverged",
            gid="diverged",
        )  # fmt: skip


def curves_of(sweep: Sweep) -> tuple[list[Tried], bool]:
    """The points whose curves are shown: those at the best rate, or, where it has fewer than three, the longest runs."""
    leader = sweep.leader
    if leader is None:
        return [], True
    at_rate = [t for t in sweep.tried if t.point.lr == leader.point.lr and t.curve]
    if len(at_rate) > 2:
        return at_rate, True
    ranked = sorted((t for t in sweep.tried if t.curve), key=lambda t: (-t.steps, t.loss or 0.0))
    noisy, controls = ([t for t in ranked if t.point.is_control is kind] for kind in (False, True))
    return [*noisy[:MOST_CURVES], *controls[:1]], False


def margins(losses: Sequence[float]) -> tuple[float, float]:
    """The ends of a logarithmic axis: a little more on each side than the losses have between them.

    >>> low, high = margins([6.0, 7.0])
    >>> 5.8 < low < 6.0, 7.0 < high < 7.2
    (True, True)
    """
    low, high = min(losses, default=1.0), max(losses, default=1.0)
    margin = max(1.02, (high / low) ** 0.08) if low > 0 else 1.3
    return low / margin, high * margin


def draw_curves(known: Known) -> Figure | None:
    """The base up to its end, then sweep 2 from there: coloured by noise, zero noise black and dashed."""
    if known.wide is None or known.wide.leader is None or known.base.leader is None:
        return None
    chosen, same = curves_of(known.wide)
    figure = Figure(figsize=(9.6, 4.8), layout="constrained")
    axes = figure.subplots()
    grown, base = known.settings.steps, known.base.leader
    axes.plot(*_columns(thinned(base.curve, base.goal)), color="#777777", linewidth=1.5, label="base")
    axes.axvline(grown, color="#777777", linestyle=":", linewidth=1)
    axes.annotate(
        "end of the base", (grown, 0.02), (-4, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
        ha="right", va="bottom", fontsize=10, color="#555555",
    )  # fmt: skip
    noises = sorted({t.point.noise for t in chosen if t.point.noise and t.state != "diverged"})
    low, high = (noises[0], noises[-1]) if noises else (1.0, 1.0)
    norm = LogNorm(low if low < high else low / 2, high if low < high else high * 2, clip=True)
    inside = [loss for t in (*chosen, base) if t.state != "diverged" for _, loss in thinned(t.curve, t.goal)]
    low_loss, top = margins(inside)
    for tried in sorted(chosen, key=lambda t: t.point.is_control):
        shifted = [(grown + step, loss) for step, loss in thinned(tried.curve, tried.goal)]
        if tried.point.is_control:
            label = _name(tried, same)
            axes.plot(*_columns(shifted), "--", color="black", linewidth=1.4, label=label, gid="control")
        else:
            shade = colormaps["viridis"](0.78 * norm(tried.point.noise or low))
            colour = "#bbbbbb" if tried.state == "diverged" else shade
            width = 2.4 if tried is known.wide.leader else 1.3
            axes.plot(
                *_columns(shifted), color=colour, linewidth=width, label=_name(tried, same), gid="curve"
            )
        if shifted and tried.state != "finished":
            marker = "x" if tried.state == "diverged" else "|"
            axes.plot([shifted[-1][0]], [min(shifted[-1][1], 0.95 * top)], marker, color=INK, markersize=8)
    logarithmic(axes, inside)
    if inside and min(inside) > 0:
        axes.set_ylim(low_loss, top)
    axes.set_xlabel("step, base and after")
    axes.set_ylabel("training loss")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=10, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


def _name(tried: Tried, same: bool) -> str:
    """The label of a curve, with its rate unless all curves have the same."""
    noise = "no noise" if tried.point.is_control else f"noise {tried.point.noise:.3g}"
    ended = {"diverged": ", diverged", "stopped": f", to step {tried.steps}"}.get(tried.state, "")
    return noise + ("" if same else f", rate {tried.point.lr:.2g}") + ended


def draw_bars(bars: Bars, width: int, k: int) -> Figure:
    """What each run takes, split by the width at which it runs."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    places = range(len(bars.bars))[::-1]
    narrow, wide = [float(b.narrow) for b in bars.bars], [float(b.wide) for b in bars.bars]
    axes.barh(places, narrow, color="#56B4E9", label=f"at width {width}")
    label = f"at width {k * width}"
    axes.barh(places, wide, left=narrow, color="#0072B2", hatch="//", edgecolor="white", label=label)
    for place, bar in zip(places, bars.bars, strict=True):
        axes.annotate(
            amount(float(bar.total), bars.unit), (float(bar.total), place), (4, 0), textcoords="offset points",
            va="center", fontsize=10,
        )  # fmt: skip
    axes.set_yticks(places, [bar.name for bar in bars.bars])
    axes.set_xlim(0, 1.3 * max([*(float(b.total) for b in bars.bars), 1e-9]))
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value, bars.unit)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=10, loc="upper center", ncols=2, bbox_to_anchor=(0.45, 1.12), frameon=False)
    return figure


def amount(value: float, unit: str) -> str:
    """A number of FLOPs or steps with its unit.

    >>> amount(3.2e13, "FLOPs"), amount(4200, "steps")
    ('32 TFLOPs', '4,200 steps')
    """
    if unit != "FLOPs":
        return f"{value:,.0f} {unit}"
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.4g} {prefix}FLOPs"
    return f"{value:,.0f} FLOPs"
