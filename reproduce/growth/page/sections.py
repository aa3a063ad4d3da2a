"""Sections of the page that are tables with their sentences: growth in mid-run, noise, optimizer state, no sweep."""

from __future__ import annotations

from math import log2
from textwrap import fill

from ..book import Book, Seen, mid_run_contest, new_units_regret, regret
from ..questions import exactness, midrun, unseen
from ..questions.new_units import METHODS
from ..questions.noise_rule import RULES, regrets
from ..spec import Spec
from . import new_units as new_units_tables
from .tables import figures


def mid_run(stored: Book) -> str:
    """Growth on the way, for the budgets whose runs are all stored."""
    sizes = stored.sizes
    found = {units: mid_run_contest(stored, units) for units in sizes.mid_run if "a" in sizes.stages}
    kept = {units: gain for units, gain in found.items() if gain is not None}
    if not kept:
        return ""
    of = "" if stored.name == "mlp" else ", a Llama on text"
    lines = [f"## One budget for all: {sizes.narrow} to {sizes.wide} on the way{of}", ""]
    lines += ["Every column has the same total FLOPs; growing is charged for its base.", ""]
    lines += [f"| | {' | '.join(f'{units} units' for units in kept)} |", "|---" * (len(kept) + 1) + "|"]
    for name in midrun.names(sizes):
        lines += [f"| {name} | {' | '.join(cell(stored.mid_run(name, units)) for units in kept)} |"]
    gains = [gain_cell(gain, stored.nats) for gain in kept.values()]
    against = "the best width throughout minus" if stored.nats else "the best width throughout over"
    return "\n".join([*lines, f"| {against} the best grown | {' | '.join(gains)} |", ""])


def new_units_section(stored: list[Book]) -> str:
    """New units: growth on the way, then what decides between kinds of readers and of state; "" while nothing is stored."""
    told = list(new_units_tables.summary(stored))
    if not told:
        return ""
    lines = ["## New units in the place of copies", ""]
    lines += [fill(_NEW_UNITS, 120), ""]
    for book in stored:
        kept = [row for row in new_units_tables.mid_run_rows(book, cell, gain_cell) if any(row[1:])]
        if any(row[0] in METHODS for row in kept):
            sizes = book.sizes
            of = "the MLP" if book.name == "mlp" else "a Llama on text"
            lines += [f"{sizes.narrow} → {2 * sizes.narrow} after a quarter of the FLOPs, {of}:", ""]
            lines += [f"| | {' | '.join(f'{units} units' for units in sizes.cited_mid_run)} |"]
            lines += ["|---" * (len(sizes.cited_mid_run) + 1) + "|"]
            lines += [*(f"| {' | '.join(row)} |" for row in kept), ""]
    return "\n".join([*lines, *(f"- {line}" for line in told), ""])


_NEW_UNITS = (
    '`mu.upscale(…, by="units")` adds units that write nothing yet, so the loss does not change. Their readers are random (new '
    "units) or copies of trained readers with noise of their size (copied readers). Nothing is tuned: the peak is half of the "
    "base's and warmed up again, the optimizer begins empty, and all tensors keep the rates that they have at the base's "
    "width, times the factor of a fold behind RMSNorm (2^(1/2) for what writes the stream and 2^(-1/2) for the gains, at twice the "
    "width), which a row named one for all tensors goes without. `upscale` itself leaves the moments of what was there, and `rewarm_(…, empty_state=True)` empties them; rows with "
    "moments kept show what they are worth. Rows of finished bases are in the tables above. In mid-run every column has the "
    "same total FLOPs."
)


def noise(stored: Book) -> str:
    """Rules for the noise beside the best noise."""
    if not stored.grown:
        return ""
    told = {name: regrets(stored.grown, rule) for name, rule in RULES.items()}
    rows = [f"| {name} | {100 * mean:.1f} % | {100 * worst:.1f} % |" for name, (mean, worst) in told.items()]
    most = max(stored.grown, key=lambda case: case.best)
    least = min(stored.grown, key=lambda case: case.best)
    return f"""\
## How much noise

Noise costs a share of what the base has learned, and `mu.AutoNoise` chooses its size by that share. Which share ends lowest
depends on the training that follows: {least.best:.2f} with {least.steps:,} steps, {most.best:.1f} with {most.steps:,}. The rule
of `AutoNoise(steps=…)` is a 4,000th for every step, and at most 1. The table shows how far above the lowest loss of the tuning
seed a rule ends, over {len(stored.grown)} growths that were run with three noises or more; between two of them the loss is read
on a line.

| share of what was learned | mean | worst |
|---|---|---|
{chr(10).join(rows)}

The rule was found on these runs, so its rows are what it could be fitted to. Settings that had no part in it are
[below](#without-a-sweep).
"""


def state(stored: Book) -> str:
    """What carried optimizer state is worth, once all cited runs are stored."""
    sizes = stored.sizes
    arms = {
        name: (stored.exactness(name), stored.exactness(name, "early")) for name in exactness.names(sizes)
    }
    if any(seen is None for name in exactness.cited(sizes) for seen in arms[name]):
        return ""
    rows = [
        f"| {_arm(name)} | {mean_cell(end)} | {mean_cell(early)} |"
        for name, (end, early) in arms.items()
        if end is not None and early is not None
    ]
    c = figures([stored])
    told = (
        f"Parting the copies is worth far more than the state. {_parted(stored)}With noise, carried state over the best other row "
        f"is {c['c_end']} at the end and {c['c_early']} over the first 1 %: at this size a fresh optimizer does as well, and "
        "carrying the state buys exactness, not a lower loss. State in wrong units is the worst of the rows with noise at the end."
    )
    return f"""\
## What exact optimizer state is worth

A base of width {sizes.narrow} is grown to {2 * sizes.narrow} in mid-run. With the same wide weights the state is carried in
new units, carried as it is, or fresh. Other methods follow, at the base's rate or at a rate that is tuned for them.

| | held out, at the end | training, over the first 1 % |
|---|---|---|
{chr(10).join(rows)}

{fill(told, 120)}
"""


def _parted(stored: Book) -> str:
    """A sentence about copies that the optimizer alone parts, beside noise; "" until both are stored."""
    alone, noisy = (stored.exactness(name) for name in ("asymmetric, no noise", "carried, noise"))
    if alone is None or noisy is None:
        return ""
    return (
        f"It can be done without noise: where only the first copy of a unit keeps its moments (asymmetric), and the rate is "
        f"warmed up again, the end is {alone.mean:.4f} without a jump of the loss, against {noisy.mean:.4f} with noise. "
    )


def without_a_sweep(stored: list[Book]) -> str:
    """The recipe against the tuned point, for every study that has both."""
    rows = []
    for book in stored:
        recipe, tuned = (book.unseen(name) for name in unseen.NAMES)
        lost = regret(book)
        if recipe is None or tuned is None or lost is None:
            continue
        sizes = book.sizes
        chosen = book.known(recipe.chosen)
        assert chosen is not None
        rows.append(
            f"| {_unseen(book)} | {mean_cell(recipe)}, "
            f"t = {chosen['noise']['t']:g} on seed {sizes.tuning_seed} | {cell(tuned)} | {_lost(book, lost)} |"
        )
    if not rows:
        return ""
    return f"""\
## Without a sweep

Copies: grow at a quarter of the FLOPs, keep the base's rate, let `AutoNoise(steps=…)` choose the noise. The tuned point is
the best of a grid of noises and of the base's rate, half and twice of it. These settings had no part in the recipe.

| | copies by the recipe | tuned copies | regret |
|---|---|---|---|
{chr(10).join(rows)}
{_new_units_without_a_sweep(stored)}"""


def _new_units_without_a_sweep(stored: list[Book]) -> str:
    """New units at half of the base's rate against the best tuned point of every way; "" while nothing is stored."""
    rows = []
    for book in stored:
        for name in METHODS:
            if (found := new_units_regret(book, name)) is not None:
                ours, best, lost = found
                how = "copies" if best.chosen.method == "ours" else best.chosen.method.replace("_", " ")
                rows.append(
                    f"| {_unseen(book)}, {name} | {cell(ours)} | {cell(best)}, {how} | {_lost(book, lost)} |"
                )
    if not rows:
        return ""
    return f"""
New units: grow at the same time, at half of the base's rate, with nothing to tune. The tuned point is the lowest of tuned
copies and of new units with both kinds of readers at a quarter, a half and the whole of the base's rate. The Llama had a
part in choosing this rule, the other settings had none.

| | without a sweep | tuned | regret |
|---|---|---|---|
{chr(10).join(rows)}
{_channels_of_the_mean(stored)}"""


def _channels_of_the_mean(stored: list[Book]) -> str:
    """Streams that LayerNorm centres, by both ways of growing them; "" while nothing is stored."""
    rows, told = [], []
    for book in (book for book in stored if book.sizes.centred):
        tuned, copied = book.unseen("tuned"), book.unseen("copied readers")
        left, ruled, flat = (book.unseen(name) for name in unseen.MEANS)
        if tuned and copied and left and ruled and flat:
            over = _lost(book, left.mean - tuned.mean)
            rows.append(
                f"| {_unseen(book)} | {' | '.join(map(cell, (copied, ruled, left, flat)))} | {over} |"
            )
            told.append(f"The third minus the fourth: {_lost(book, left.mean - flat.mean)}.")
    if not rows:
        return ""
    return f"""
The rows of the GPT-2 above grow its stream, which LayerNorm centres, by copies, as `grow(…, by="units")` does. `upscale` gives it
new channels that carry the mean of the others. Below both have copied readers. The first two columns follow the same rule. In the
third nothing is done after `upscale`: the schedule goes on at the base's rate, and the moments of what was there are kept. The
fourth is the third without the factor of the fold: all tensors have one rate. Nothing is tuned in any of them.

| | stream by copies | new channels | new channels, nothing else done | the same, one rate | the third minus tuned copies |
|---|---|---|---|---|---|
{chr(10).join(rows)}

{" ".join(told)}
"""


def _unseen(book: Book) -> str:
    """A setting of stage d in words."""
    what = {
        "mlp": f"MLP of {book.sizes.depth} layers",
        "text": "Llama on text",
        "images": "ResNet on CIFAR-10",
        "layernorm": "GPT-2 on text",
    }
    return f"{what[book.name]}, {book.sizes.wide // book.sizes.unseen_k} → {book.sizes.wide}"


def _lost(book: Book, lost: float) -> str:
    return f"{lost:+.4f} nats" if book.nats else f"{100 * lost:+.1f} %"


def _arm(name: str) -> str:
    """An arm of stage c in words.

    >>> _arm("wrong_units, noise"), _arm("shrink_pad, own rate")
    ('state in wrong units, noise', 'shrink, pad and perturb, own rate')
    """
    words = {
        "carried": "state carried",
        "wrong_units": "state in wrong units",
        "fresh_rewarmed": "state fresh, warmed up again",
        "fresh": "state fresh",
        "asymmetric": "state of one copy only, warmed up again",
        "net2wider": "Net2WiderNet",
        "shrink_pad": "shrink, pad and perturb",
        "tiling": "tiling (HyperCloning)",
    }
    first, comma, rest = name.partition(", ")
    return words[first] + comma + rest


def mean_cell(seen: Seen | None) -> str:
    return "" if seen is None else f"{seen.mean:.4f} ({seen.spread:.4f})"


def gain_cell(found: tuple[float, bool] | None, nats: bool) -> str:
    if found is None:
        return ""
    gain, beyond = found
    level = not beyond and gain > (0 if nats else 1)
    return f"{f'{gain:+.4f} nats' if nats else f'{gain:.3f}'}{', seeds overlap' if level else ''}"


def cell(seen: Seen | None) -> str:
    return "" if seen is None else f"{seen.mean:.4f} ({seen.spread:.4f}) {_told(seen.chosen)}"


def _told(spec: Spec) -> str:
    noise = "t by rule" if spec.by_rule else f"t = {spec.noise:g}"
    return f"2<sup>{log2(spec.lr):g}</sup>" + (f", {noise}" if spec.grows and spec.method == "ours" else "")
