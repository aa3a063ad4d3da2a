"""The page of a report: its drawings and tables, their order and their captions."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from math import inf

from matplotlib.figure import Figure

from ...rules.schemes import STUDIED
from ...training.recipe import Recipe
from .bars import Bars
from .html import card, folded, notes, page, pair, picture, table, tag
from .known import Known, Sweep, Tried
from .lines import amount, curves_of, draw_bars, draw_curves, draw_first
from .maps import draw_map, draw_rungs, place_of
from .stay import growing, loss_text
from .verdict import Verdict
from .widths import cautions, draw_widths, why_not


@dataclass
class Gallery:
    """The images of a page, which are also written as files next to it."""

    images: dict[str, bytes] = field(default_factory=dict)

    def add(self, name: str, figure: Figure | None, alt: str, caption: str, why: str = "") -> str:
        """The picture as HTML; without a figure, a sentence that says why there is none."""
        if figure is None:
            return tag("p", why) if why else ""
        into = BytesIO()
        figure.savefig(into, format="png", dpi=120)
        self.images[f"{name}.png"] = into.getvalue()
        return picture(into.getvalue(), alt, caption)


def page_of(
    studies: Sequence[Known], bars: Sequence[Bars], judged: Sequence[Verdict]
) -> tuple[str, dict[str, bytes]]:
    """The page as HTML, and its pictures by file name."""
    gallery = Gallery()
    title = "Tuning: " + ", ".join(known.folder.name or str(known.folder) for known in studies[:4])
    parts = [
        tag("h1", title if len(studies) < 5 else f"{title}, …"),
        *map(_verdict, judged),
        _overview(studies),
    ]
    if len(studies) > 1:
        parts.append(_widths(studies, gallery))
    for number, (known, costs) in enumerate(zip(studies, bars, strict=True), 1):
        prefix = "" if len(studies) == 1 else f"{number}-"
        parts += _study(known, costs, gallery, prefix)
    if len(studies) == 1:
        parts.append(_widths(studies, gallery))
    parts.append(_made())
    return page(title, parts), gallery.images


def _verdict(verdict: Verdict) -> str:
    """The verdict, with which the page begins."""
    facts = [tag("p", fact) for fact in verdict.facts]
    commands = [tag("pre", "\n".join(verdict.commands))] if verdict.commands else []
    return card(verdict.head, [*facts, *([tag("strong", verdict.step)] if verdict.step else []), *commands])


def _overview(studies: Sequence[Known]) -> str:
    rows = []
    for number, known in enumerate(studies, 1):
        best = known.wide.leader if known.wide is not None and known.wide.best is not None else None
        control = _control(known)
        rows.append(
            (
                str(number),
                str(known.folder),
                f"{known.settings.width} → {known.settings.k * known.settings.width}",
                str(known.settings.at),
                "–" if known.base.best is None else f"{known.base.best.lr:.4g}",
                "–" if best is None else f"{best.point.lr:.4g}",
                "–" if best is None else f"{best.point.noise:.4g}",
                "–" if best is None else loss_text(best.loss),
                "–" if control is None else loss_text(control),
                loss_text(min((done.loss for done in known.stay.values() if done is not None), default=None)),
                known.status,
            )
        )
    head = "|study|width|reference|base's rate|rate after|noise|loss|without noise|not grown|status"
    return table(head.split("|"), rows, numbers=(0, 2, 3, 4, 5, 6, 7, 8, 9))


def _control(known: Known) -> float | None:
    """The lowest loss without noise, among finished runs."""
    tried = known.wide.tried if known.wide is not None else ()
    return min(
        (t.loss for t in tried if t.point.is_control and t.state == "finished" and t.loss is not None),
        default=None,
    )


def _widths(studies: Sequence[Known], gallery: Gallery) -> str:
    head, reason = tag("h2", "The best point against the width"), why_not(studies)
    if reason:
        return head + tag("p", reason)
    drawing = gallery.add(
        "widths",
        draw_widths(studies),
        "loss against learning rate and noise for each width; best learning rate and noise against the width",
        "Above: the least loss at each learning rate and at each noise; solid at the end, dotted at the first comparison, "
        "where no run had been stopped; dashed: no noise; the star is the best point. Below: the best values; grey reaches to the "
        "neighbours that were tried, so a change within it is not significant.",
    )
    return head + notes(cautions(studies)) + drawing


def _study(known: Known, costs: Bars, gallery: Gallery, prefix: str) -> list[str]:
    settings = known.settings
    heading = f"{known.folder}: width {settings.width} → {settings.k * settings.width}"
    parts = [tag("h2", heading), tag("p", f"study “{known.name}”"), notes(known.notes)]
    parts += _second(known, gallery, prefix)
    first = gallery.add(
        f"{prefix}sweep1",
        draw_first(known.base),
        f"loss against learning rate; {_best(known.base)}",
        "Sweep 1, the proxy base: loss against learning rate, joined at equal steps; × diverged.",
        _no_loss("1", known.base),
    )
    drawn = gallery.add(
        f"{prefix}cost",
        draw_bars(costs, settings.width, settings.k),
        "; ".join(f"{bar.name} {amount(float(bar.total), costs.unit)}" for bar in costs.bars),
        _cost_caption(known, costs),
    )
    parts.append(growing(known))
    parts += [tag("h3", "Learning rate of the base, and the cost"), pair([first, drawn]), _recipe(known)]
    parts += [tag("h3", "What was tried"), _tried(known), tag("h3", "The work"), _work(known)]
    return parts


def _no_loss(number: str, sweep: Sweep) -> str:
    states = [tried.state for tried in sweep.tried]
    counts = " and ".join(f"{states.count(s)} are {s}" for s in ("open", "diverged") if s in states)
    return f"There is no chart of sweep {number}: no point has a loss, {counts}."


def _best(sweep: Sweep) -> str:
    if sweep.leader is None:
        return "no point has a loss yet"
    return f"{'best' if sweep.best is not None else 'leading'}: {place_of(sweep.leader.point)}"


def _second(known: Known, gallery: Gallery, prefix: str) -> list[str]:
    sweep = known.wide
    if sweep is None:
        return [tag("h3", "Sweep 2"), tag("p", "Noise and learning rate are tuned when sweep 1 is done.")]
    name = STUDIED[known.settings.scheme].label
    states = [tried.state for tried in sweep.tried]
    counts = "; ".join(
        f"{states.count(s)} {s}" for s in ("finished", "stopped", "diverged", "open") if s in states
    )
    star = "the star is the best point" if sweep.best is not None else "the hollow star leads so far"
    parts = [
        tag("h3", "Sweep 2: noise and learning rate after growth"),
        gallery.add(
            f"{prefix}sweep2",
            None if sweep.leader is None else draw_map(sweep, name),
            f"map of learning rate and noise: {counts}; {_best(sweep)}",
            f"Colour is the loss of finished runs, {sweep.ladder.rungs[-1]} steps; {star}. Hatched: "
            "not at the end, stopped by a comparison or not finished yet; its loss is from an earlier step and cannot be "
            "compared with the others. Empty with ×: diverged.",
            _no_loss("2", sweep),
        ),
    ]
    rungs = gallery.add(
        f"{prefix}rungs",
        draw_rungs(sweep, name),
        "the same map at each step at which runs were compared",
        "Where runs were compared: every map shows losses at one step, on a scale of its own. The star stands on the same "
        "point in all of them.",
    )
    chosen, at_rate = curves_of(sweep)
    which = (
        "at the best learning rate" if at_rate else f"of the {len(chosen)} runs that got farthest and lowest"
    )
    curves = gallery.add(
        f"{prefix}curves",
        draw_curves(known),
        f"training curves {which}",
        f"Training loss {which}. Dashed: no noise, which continues the base. A bar marks the end of a run that was stopped, "
        "a cross one that diverged.",
    )
    return [*parts, rungs, curves]


def _cost_caption(known: Known, costs: Bars) -> str:
    settings = known.settings
    what = (
        f"Base: {settings.steps:,} steps. From scratch and upscaled: {settings.after:,} steps at {settings.k} times the "
        "width. Tuning: both sweeps; in full, every point to its end."
    )
    if costs.case is None:
        return (
            f"In steps, not in FLOPs: {costs.why_steps}. {what} A step at {settings.k} times the width costs up to "
            f"{settings.k**2} times as much."
        )
    return (
        f"FLOPs of forward and backward, counted on the proxy's own model. {what} Tuning was worth "
        f"{float(costs.case.trials):.4g} full runs of the grown proxy; for a target of width N: mupscale cost FILE "
        f"-k {settings.k} --width N --proxy {settings.width} --steps T --trials {float(costs.case.trials):.4g}"
    )


def _recipe(known: Known) -> str:
    recipe = known.recipe
    if recipe is None:
        return tag("h3", "The recipe") + tag("p", "There is none yet.")
    sigma = recipe.sigma
    rows = [
        ("optimizer", recipe.optimizer),
        ("learning rate of bases", f"{recipe.base_lr:.8g}" if recipe.base_lr is not None else "–"),
        ("learning rate after growth", f"{recipe.lr:.8g}"),
        ("noise", _noise(recipe)),
        *((key, str(value)) for key, value in recipe.constants.items() if key != "lr"),
        ("reference width", str(recipe.reference)),
        ("k", str(recipe.k)),
        ("steps, before and after", f"{recipe.steps}, {recipe.wide_steps}"),
        ("batch", str(recipe.batch if recipe.batch is not None else "not given")),
        ("schedule", str(recipe.schedule or "none")),
        ("loss", loss_text(recipe.loss)),
        (
            "the base, trained on" if recipe.by == "units" else "continued without noise",
            loss_text(recipe.control),
        ),
    ]
    sigmas = [(str(n), _sigma(v)) for n, v in sigma.items()] if isinstance(sigma, Mapping) else []
    parts = [tag("h3", "The recipe"), table(("constant, at the reference", "value"), rows)]
    if sigmas:
        parts.append(folded("σ̄ of each tensor", table(("tensor", "σ̄"), sigmas)))
    parts.append(folded("recipe.json", tag("pre", recipe.to_json())))
    return "".join(parts)


def _noise(recipe: Recipe) -> str:
    if recipe.by == "units":
        return "none: it grows by new units"
    if recipe.rise is not None:
        return f"its size is measured on each base: the loss rises by {recipe.rise:g} of what was learned"
    sigma = recipe.sigma
    return f"σ̄ for each of {len(sigma)} tensors" if isinstance(sigma, Mapping) else f"σ̄ = {sigma:.6g}"


def _sigma(value: object) -> str:
    numbers = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return ", ".join(f"{float(str(v)):.6g}" for v in numbers)


def _tried(known: Known) -> str:
    points: list[tuple[str, Sweep, Tried]] = [
        (name, sweep, tried)
        for name, sweep in (("2", known.wide), ("1", known.base))
        if sweep is not None
        for tried in sorted(sweep.tried, key=lambda t: (-t.steps, inf if t.loss is None else t.loss))
    ]
    rows = [
        (
            name,
            "" if tried.point.noise is None else f"{tried.point.noise:.6g}",
            f"{tried.point.lr:.6g}",
            loss_text(tried.loss),
            str(tried.steps),
            {"stopped": "before its end", "open": "not yet"}.get(tried.state, tried.state),
        )
        for name, _, tried in points
    ]
    chosen = next((i for i, (_, sweep, tried) in enumerate(points) if tried.point == sweep.best), None)
    return table(
        ("sweep", "noise", "learning rate", "loss", "at step", ""), rows, numbers=(1, 2, 3, 4), chosen=chosen
    )


def _work(known: Known) -> str:
    work = known.work
    rows = [
        ("trials", f"{work.trials}, one per leg between two comparisons"),
        ("counted", f"{work.counted}, {work.resumed} of them resumed from a checkpoint"),
        ("running, or killed and not noticed yet", str(work.running)),
        ("killed or silent", f"{work.killed}, repeated"),
        ("failed", str(work.failed)),
        ("duplicates left out", str(work.extra)),
        ("seconds of work", f"{work.seconds:,.1f}"),
        ("from", f"{work.began:%Y-%m-%d %H:%M:%S}" if work.began else "–"),
        ("to", f"{work.ended:%Y-%m-%d %H:%M:%S}" if work.ended else "–"),
    ]
    if known.equality is not None:
        allowed = float(known.equality.details.get("tolerance", inf))
        gap = f"losses differ by {known.equality.loss:.2g}, allowed {allowed:.2g}"
        rows.append(("zero noise at both widths", gap))
    troubles = [(str(trial.number), trial.leg, trial.why) for trial in known.work.troubles]
    listed = folded(
        f"{len(troubles)} trials that do not count", table(("trial", "leg", "why"), troubles, (0,))
    )
    return table(("", ""), rows) + (listed if troubles else "")


def _made() -> str:
    """The versions this page was made with."""
    found = []
    for name in ("mupscale", "torch", "optuna", "matplotlib"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return tag("p", f"This page was made with {', '.join(found)}, Python {platform.python_version()}.")
