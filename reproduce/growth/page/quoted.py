"""Figures that pages quote in their text, each as the words around it, made from what is stored.

`unlike` finds a page that says otherwise, and on docs/frontier.md every share, loss and difference that no words here
account for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from ..book import Book, Seen, mid_run_contest
from ..clock import DECAY, WARM_UP
from ..questions import after, family, large, unseen, widths
from ..questions.noise_rule import RULES, regrets
from ..settings.stock import build, raw
from . import new_units, repairs, sizes
from .directions import against_peers, deep, gains, mixture_ends, over_stack, results
from .figures import DEFAULT, over_the_best, text_mid_run, without_sweep
from .stored import Stored

Quote = tuple[str, str]
"""A page, and words of it."""
MARKS = re.compile(r"<!-- table \w+ -->.*?<!-- end of table -->", re.S)
FIGURE = re.compile(r"(?<![\w.])(?:\d[\d.]*(?: %| nats)|\d\.\d{3,4}\b)")
"""A share, a difference in nats, or a loss."""


def unlike(stored: Stored, docs: Path) -> list[str]:
    """What the pages say otherwise than the store, or without it."""
    texts: dict[str, str] = {}
    told = []
    for page, words in quotes(stored):
        if page not in texts:
            texts[page] = " ".join(MARKS.sub("", (docs / page).read_text("utf-8")).split())
        if words not in texts[page]:
            told.append(f"{page} does not say what is stored: {words}")
    rest = texts["frontier.md"]
    for page, words in quotes(stored):
        rest = rest.replace(words, "") if page == "frontier.md" else rest
    told += [
        f"frontier.md quotes a figure that no run accounts for: {found}" for found in FIGURE.findall(rest)
    ]
    return told


def quotes(stored: Stored) -> Iterator[Quote]:
    """Every quoted figure."""
    for words in (*_protocol(), *_finished(stored), *_mid_run(stored), *_state(stored), *_rules(stored)):
        yield "frontier.md", words
    yield from _stock(stored)
    yield from _large(stored)


def percent(share: float) -> str:
    """
    >>> percent(0.0386)
    '3.9 %'
    """
    return f"{100 * share:.1f} %"


def _protocol() -> Iterator[str]:
    yield f"over {WARM_UP:.0%} of the FLOPs".replace("%", " %")
    yield f"over the last {DECAY:.0%}".replace("%", " %")
    yield "β2 = 0.999"
    yield f"more than {widths.BEHIND - 1:.0%} above the best one".replace("%", " %")


def _mean(seen: Seen | None) -> float:
    assert seen is not None, "a run that the page quotes is missing"
    return seen.mean


def _finished(stored: Stored) -> Iterator[str]:
    mlp, text = stored.books[0], stored.books[1]
    [base] = text.sizes.cited_bases
    ours = _mean(text.new_units(base, DEFAULT, 1.0))
    on, copies = (_mean(text.sunk(base, name, 1.0)) for name in ("goes on", "grown to 64"))
    stack = _mean(results(stored.known, stored.dense)["stack"])
    yield f"ends at {ours:.3f} nats when it is doubled in width"
    yield f"{on - ours:.3f} below training on, {copies - ours:.3f} below copies with tuned noise, and {stack - ours:.3f} below"
    quarter = over_the_best(stored, text, base, 0.25)
    assert quarter is not None
    yield f"training on is better by {-quarter[0]:.3f}"
    found = {e: [over_the_best(stored, mlp, b, e) for b in mlp.sizes.cited_bases] for e in (0.25, 1.0)}
    short, again = ([gain[0] for gain in each if gain is not None] for each in found.values())
    below = [1 - 1 / gain for gain in short]
    yield f"end {percent(min(below))} to {percent(max(below))} below the best other way with a quarter"
    yield f"they end {percent(1 - 1 / again[0])} and {percent(1 - 1 / again[1])} below it for the two smaller ones"
    yield f"tuned copies end {percent(1 / again[2] - 1)} lower"
    yield f"at {ours:.3f} nats; experts end lower at {_mean(results(stored.known, stored.dense)['experts']):.3f}"
    cloned = _mean(text.new_units(base, "HyperCloning", 1.0))
    yield f"HyperCloning ends at {cloned:.3f} and copies with tuned noise at {copies:.3f}"
    early, late = _mean(text.new_units(base, DEFAULT, 0.25)), _mean(text.sunk(base, "goes on", 0.25))
    yield f"{ours:.3f} against {on:.3f} nats, and {early:.3f} against {late:.3f} with a quarter"
    yield from _kept(mlp, text)


def _kept(mlp: Book, text: Book) -> Iterator[str]:
    most = max(value for values in new_units.kept_over_empty(mlp).values() for value in values)
    yield f"costs up to {percent(most - 1)} on the MLP"
    gained = [-v for (_, e), values in new_units.kept_over_empty(text).items() if e < 1 for v in values]
    yield f"it gains {min(gained):.3f} to {max(gained):.3f} nats with a quarter"


def _parameters(book: Book) -> int:
    """Of the base of the larger Llama."""
    model = build(raw(book.sizes.narrow, large.LAYERS))
    return sum(parameter.numel() for parameter in model.parameters())


def _large(stored: Stored) -> Iterator[Quote]:
    """The larger Llama."""
    book = stored.book("large")
    assert book is not None
    ends = {name: one.mean for name, one in sizes.ends(book, 1.0).items()}
    ours, asleep = ends[large.DEFAULT], ends[large.ASLEEP]
    stack, on, copies = ends["G_stack"], ends["goes on"], ends["copies, noise of the small one"]
    yield (
        "frontier.md",
        f"G_stack ends at {stack:.3f} nats, our new blocks, asleep at first and then woken, at {asleep:.3f}, going on at {on:.3f}, "
        f"new units at {ours:.3f} and copies with the noise of the small one at {copies:.3f}",
    )
    own, quarter = book.paired(large.base(book.known, book.sizes)), sizes.ends(book, 0.25)
    early, before = quarter[large.DEFAULT].mean, _mean(own)
    stacked = early - quarter["G_stack"].mean
    yield (
        "frontier.md",
        f"new units end at {early:.3f}, {early - before:.3f} above the base itself and {stacked:.3f} above G_stack",
    )
    page = "../README.md"
    yield page, f"new units end at {ours:.3f}, training on at {on:.3f}"
    yield page, f"{stack:.3f} by G_stack, {asleep:.3f} by new blocks of this library"
    for each in (page, "frontier.md"):
        yield each, f"{_parameters(book):,} parameters"


def _mid_run(stored: Stored) -> Iterator[str]:
    mlp, text = stored.books[0], stored.books[1]
    ways = repairs.ways_to_the_right_width(mlp, from_narrow=True)
    ends = [_mean(mlp.paired(widths.arm(mlp.known, mlp.sizes, way, DEFAULT))) for way in ways]
    yield f"copied readers end at {ends[0]:.4f} with {ways[0].units} units and at {ends[1]:.4f} with {ways[1].units}"
    ahead = sorted(fmean(repairs.over_best_width(mlp, way, DEFAULT) or ()) for way in ways)
    below = [percent(1 - 1 / gain) for gain in ahead]
    yield f"it ends {below[0]} to {below[-1]} below the best width throughout on the MLP"
    [first] = repairs.ways_to_the_right_width(mlp, from_narrow=False)
    yield f"from 32 to 64 {percent(1 / fmean(repairs.over_best_width(mlp, first, DEFAULT) or ()) - 1)} above it"
    names = (f"{2 * first.narrow} throughout", DEFAULT, f"{DEFAULT}, the base's rate")
    ends = [_mean(mlp.paired(widths.arm(mlp.known, mlp.sizes, first, name))) for name in names]
    yield f"64 throughout ends at {ends[0]:.4f}, the default at {ends[1]:.4f}, and at {ends[2]:.4f} with the base's own rate"
    yield from _family(mlp)
    nats = text_mid_run(stored)
    assert nats is not None
    yield f"on text {-nats:.3f} nats above it"
    units = text.sizes.cited_mid_run[0]
    half, whole = (
        _mean(text.new_units_mid_run(f"{DEFAULT}{rest}", units)) for rest in ("", ", the base's rate")
    )
    between = _mean(repairs.between(text, stored.known))
    yield f"48 throughout ends at {between:.3f} nats, and growing from 32 to 64 at {half:.3f}, or at {whole:.3f}"
    wrong = [mid_run_contest(mlp, units) for units in mlp.sizes.cited_mid_run]
    behind = sorted(1 / gain[0] - 1 for gain in wrong if gain is not None)
    told = f"ends {100 * behind[0]:.0f} % to {100 * behind[-1]:.0f} % above"
    yield f"{told} it."
    yield f"{told} 128 throughout"


def _family(mlp: Book) -> Iterator[str]:
    """Three models from one plateau: what is saved, and how far the two grown ones end above runs of their own."""
    words = []
    for share in mlp.sizes.family_shares:
        middle, large = (fmean(values) - 1 for values in sizes.over_independent(mlp, share) or ())
        words.append(
            f"{percent(family.saved(share))} less in all, they end {percent(middle)} and {percent(large)} above"
        )
    yield from words


def _state(stored: Stored) -> Iterator[str]:
    mlp = stored.books[0]
    quiet, noisy, alone = (
        _mean(mlp.exactness(name)) for name in ("carried, no noise", "carried, noise", "asymmetric, no noise")
    )
    yield f"carried state ends at {quiet:.4f} and with noise at {noisy:.4f}"
    yield f"the end is {alone:.4f} without a jump"
    text = stored.books[1]
    states = ("carried", "fresh", "asymmetric")
    silent = [repairs.state_ends(text, f"{state}, no noise").get(0, 0.0) for state in states]
    yield "without noise carried state ends at {:.3f}, a fresh one at {:.3f}, and that of one copy only at {:.3f}".format(
        *silent
    )
    carried, fresh = (repairs.state_ends(text, f"{state}, noise") for state in ("carried", "fresh"))
    apart = [f"{carried[seed] - fresh[seed]:.3f}" for seed in sorted(carried.keys() & fresh.keys())]
    yield f"carried state ends {', '.join(apart[:-1])} and {apart[-1]} nats above an empty one"
    yield from _after(mlp)
    yield from _after_on_text(text)


def _after(mlp: Book) -> Iterator[str]:
    """The rate after growth alone, on every seed."""

    def at(name: str) -> float:
        return _mean(mlp.paired(after.arm(mlp.known, mlp.sizes, name)))

    same, twice, both = (at(f"copies, {name}") for name in ("1, 1", "1, 2", "2, 2"))
    yield f"Twice the peak after growth alone takes copies from {same:.4f} to {twice:.4f}"
    yield f"the rest of the way to {both:.4f} is the base"
    units = [at(f"new units, 1, {name}") for name in ("0.25", "0.5", "1", "2")]
    yield f"{units[1]:.4f} and {units[2]:.4f} with half and the whole of the base's peak, and {units[3]:.4f} with twice it"


def _after_on_text(text: Book) -> Iterator[str]:
    def at(name: str) -> float:
        return _mean(text.paired(after.arm(text.known, text.sizes, name)))

    same, twice, both = (at(f"copies, {name}") for name in ("1, 1", "1, 2", "2, 2"))
    yield f"takes copies from {same:.3f} to {twice:.3f} nats, and to {both:.3f} where the base"
    quarter, half, whole = (at(f"{DEFAULT}, 1, {name}") for name in ("0.25", "0.5", "1"))
    yield f"copied readers end at {quarter:.3f}, {half:.3f} and {whole:.3f} nats with a quarter, a half and the whole"


def _rules(stored: Stored) -> Iterator[str]:
    mlp, norm = stored.books[0], stored.books[3]
    mean = {name: regrets(mlp.grown, rule)[0] for name, rule in RULES.items()}
    (ours,) = (value for name, value in mean.items() if name.endswith("(the rule)"))
    fixed = min(value for name, value in mean.items() if name.startswith("a fixed"))
    yield f"it ends {percent(ours)} above the lowest loss"
    yield f"fixed share ends {percent(fixed)} above it"
    lost = without_sweep(mlp)
    assert lost is not None
    new, tuned = _mean(mlp.unseen(DEFAULT)), _mean(mlp.unseen("tuned"))
    yield f"They lose {percent(lost)} to the lowest tuned point on the MLP, at {new:.4f} against {tuned:.4f}"
    left = _mean(norm.unseen(unseen.MEANS[0]))
    yield f"ends {_mean(norm.unseen('tuned')) - left:.3f} nats below tuned copies, at {left:.3f}"


def _stock(stored: Stored) -> Iterator[Quote]:
    """Blocks, experts, and more experts: on three pages."""
    found = results(stored.known, stored.dense)
    over = {of: gain[0] for of, gain in gains(found).items() if gain is not None}
    peers = {of: gain[0] for of, gain in against_peers(found).items() if gain is not None}
    page = "frontier.md"
    yield (
        page,
        f"experts end {over['experts']:.3f} nats below the better of going on and starting anew, width {over['width']:.3f} "
        f"and depth {over['depth']:.3f}",
    )
    yield "../README.md", f"at {_mean(found['stack']):.3f} by G_stack, the best published dense method here"
    yield page, f"our experts end {peers['experts']:.3f} below sparse upcycling"
    yield page, f"level with G_stack ({peers['depth']:.3f} below, seeds overlap)"
    apart = [
        abs(v) for sizes in (stored.dense, stored.larger) for v in over_stack(stored.known, sizes).values()
    ]
    yield page, f"on every seed within {max(apart):.4f} nats"
    rise = fmean(rise for rise, _ in deep(stored.known, stored.dense)["stack"].values())
    yield page, f"that of G_stack rises by {rise:.3f}"
    yield "growth.md", f"ends within {max(apart):.3f} nats of it"
    yield from _mixture(stored)


def _mixture(stored: Stored) -> Iterator[Quote]:
    told = mixture_ends(stored.known, stored.mixture)
    ends = {name: [float(one["held"]) for one in found] for name, found in told.items()}

    def below(name: str) -> Sequence[float]:
        return [other - ours for other, ours in zip(ends[name], ends["apart"], strict=True)]

    on, published, doubled = (below(n) for n in ("mixture goes on", "expert upcycling", "doubled"))
    noise = told["expert upcycling"][0]["noise"]
    rise = noise["after"]["choose"] - noise["before"]["choose"]
    first, second = (f"{value:.3f}" for value in published)
    yield (
        "frontier.md",
        f"{first} and {second} nats below Expert Upcycling, whose loss rises by {rise:.2f} at growth",
    )
    yield "growth.md", f"this way ends lowest on both seeds: {min(on):.3f} nats below the base that goes on"
    yield (
        "growth.md",
        f"{first} and {second} below Expert Upcycling, whose loss rises by {rise:.2f} first",
    )
    yield (
        "growth.md",
        f"and {doubled[0]:.3f} and {doubled[1]:.3f} below twice the experts and top-k",
    )
