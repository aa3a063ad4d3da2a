"""Several studies side by side: does the best point stay where it is when the width changes?

Refuses to compare constants that are written at different references, and says which other settings differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .known import Known, Tried
from .lines import logarithmic, rate_axis
from .maps import STAR, WIDEST, short

_SHARED = ("k", "steps", "after", "scheme", "batch", "seed", "proxy")
"""Settings other than the width that move the best point; a note warns when studies differ in one of them."""
Coordinate = Callable[[Tried], float]


def why_not(studies: Sequence[Known]) -> str:
    """Why these studies cannot be drawn over each other; empty when they can."""
    if len({known.settings.width for known in studies}) < 2:
        return "This needs more than one width: mupscale report STUDY STUDY …, studies of the same file."
    references = sorted({known.settings.at for known in studies})
    if len(references) > 1:
        return (
            f"These studies write their constants at different references ({', '.join(map(str, references))}), where the "
            f"same number means another learning rate. Tune all of them with --reference {references[0]}."
        )
    schemes = sorted({known.settings.scheme for known in studies})
    if len(schemes) > 1:
        return f"These studies measure noise in different units ({', '.join(schemes)})."
    return ""


def cautions(studies: Sequence[Known]) -> list[str]:
    """Settings other than the width that differ between studies."""
    found = []
    for name in _SHARED:
        values = list(dict.fromkeys(str(getattr(known.settings, name)) for known in studies))
        if len(values) > 1:
            what = (
                "the proxy's file"
                if name == "proxy"
                else f"{name.replace('after', 'wide_steps')} ({', '.join(values)})"
            )
            found.append(
                f"not only the width differs, but also {what}: the best point may move for that reason"
            )
    return found


def draw_widths(studies: Sequence[Known]) -> Figure:
    """Loss against rate and against noise, a colour for each width; and the best of both against the width."""
    ordered = sorted(enumerate(studies), key=lambda pair: (pair[1].settings.width, pair[0]))
    figure = Figure(figsize=(WIDEST, 7), layout="constrained")
    grid = figure.subplots(2, 2)
    for axes, of, name in ((grid[0][0], _rate, "learning rate"), (grid[0][1], _noise, "noise")):
        ticks = []
        for place, (number, known) in enumerate(ordered):
            colour = colormaps["viridis"](0.78 * place / max(1, len(ordered) - 1))
            ticks += _lines(axes, known, of, colour, _name(known, number, studies))
        logarithmic(axes, [value for _, value in ticks])
        rate_axis(axes, [x for x, _ in ticks], name)
        axes.set_ylabel(f"loss, at the best {'noise' if of is _rate else 'learning rate'}")
        axes.grid(alpha=0.25)
    if ordered:
        grid[0][0].legend(fontsize=9)
    _best(grid[1][0], [known for _, known in ordered], _rate, "best learning rate")
    _best(grid[1][1], [known for _, known in ordered], _noise, "best noise")
    return figure


def _rate(tried: Tried) -> float:
    return tried.point.lr


def _noise(tried: Tried) -> float:
    return tried.point.noise or 0.0


def _name(known: Known, number: int, studies: Sequence[Known]) -> str:
    twice = sum(other.settings.width == known.settings.width for other in studies) > 1
    return f"width {known.settings.width}" + (f" (study {number + 1})" if twice else "")


def _lines(
    axes: Axes, known: Known, of: Coordinate, colour: tuple[float, ...], name: str
) -> list[tuple[float, float]]:
    """Solid at the end, dotted at the first comparison, where every point still was; a star on the best."""
    if known.wide is None:
        return []
    rungs, drawn = known.wide.ladder.rungs, list[tuple[float, float]]()
    for end, style in {rungs[0]: ":", rungs[-1]: "-"}.items():
        least: dict[float, float] = {}
        for tried in known.wide.tried:
            place, loss = of(tried), tried.rungs.get(end, inf)
            if place > 0 and loss < least.get(place, inf):
                least[place] = loss
        line = sorted(least.items())
        marker = "o" if style == "-" else ""
        xs, ys = [x for x, _ in line], [y for _, y in line]
        axes.plot(xs, ys, style, marker=marker, color=colour, label=f"{name}, step {end}")
        drawn += line
    controls = [
        t.loss
        for t in known.wide.tried
        if t.point.is_control and t.state == "finished" and t.loss is not None
    ]
    if of is _noise and controls:
        axes.axhline(min(controls), color=colour, linestyle="--", linewidth=1)
        drawn += [(x, min(controls)) for x, _ in drawn[:1]]
    leader = known.wide.leader
    if leader is not None and leader.loss is not None and of(leader) > 0:
        axes.plot(
            [of(leader)], [leader.loss], "*", color=STAR, markersize=14, markeredgecolor=colour, zorder=5
        )
        drawn.append((of(leader), leader.loss))
    return drawn


def _best(axes: Axes, studies: Sequence[Known], of: Coordinate, name: str) -> None:
    """The best value at each width, with the neighbours that were tried as its uncertainty."""
    places, values = list[float](), list[float]()
    for known in studies:
        leader = None if known.wide is None or known.wide.best is None else known.wide.leader
        if leader is None or known.wide is None:
            continue
        tried = sorted({of(t) for t in known.wide.tried if of(t) > 0})
        below = max((v for v in tried if v < of(leader)), default=of(leader))
        above = min((v for v in tried if v > of(leader)), default=of(leader))
        if of(leader) > 0:
            ends = [known.settings.width] * 2, [below, above]
            axes.plot(*ends, color="#999999", linewidth=3, solid_capstyle="butt")
            places.append(known.settings.width)
            values.append(of(leader))
    label = "after growth" if of is _rate else None
    axes.plot(places, values, "*--", color=STAR, markersize=13, label=label, gid="best")
    if of is _rate:
        firsts = [(k.settings.width, k.base.best.lr) for k in studies if k.base.best is not None]
        axes.plot(
            [w for w, _ in firsts], [v for _, v in firsts], "s:", color="#0072B2", label="base", gid="base"
        )
        values = values + [v for _, v in firsts]
        axes.legend(fontsize=9)
    axes.set_xscale("log", base=2)
    widths = sorted({known.settings.width for known in studies})
    axes.set_xticks(widths, [str(w) for w in widths])
    if values:  # where no noise is best at every width, there is nothing to place on a logarithmic axis
        axes.set_yscale("log", base=2)
        low, high = min(values) / 4, max(values) * 4
        ticks = sorted(set(values))
        axes.set_ylim(low, high)
        axes.set_yticks(ticks, short(ticks))
    axes.minorticks_off()
    axes.set_xlabel("width of the base")
    axes.set_ylabel(name)
    axes.grid(alpha=0.25)
