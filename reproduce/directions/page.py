"""The table of the study, printed and as a section of docs/frontier.md, from what is stored."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from textwrap import fill

from ..frontier.book import NOT_RUN, Seen, contest, seen
from ..frontier.choose import Arm, Known
from ..store import RESULTS, Store
from .arms import ARMS, Sizes, arm, base

FILE = "directions.jsonl"
OURS = ("ours", "copied_readers")
PENDING = ("stacked",)
"""Arms without which the page is printed while they have not been run."""
DIRECTIONS = ("depth", "width", "experts")


def results(known: Known, sizes: Sizes) -> dict[str, Seen | None]:
    """Every arm with its reported seeds; None while a run is missing."""
    return {name: seen(known, arm(known, sizes, name), sizes.seeds) for name in ARMS}


def gains(found: dict[str, Seen | None]) -> dict[str, tuple[float, bool] | None]:
    """For each direction: how many nats its growth by our plans ends below the best of going on and starting anew.

    With it: whether the seeds do not overlap. The tuning seed chooses on both sides.
    """
    told = {}
    for of in DIRECTIONS:
        names = [name for name, made in ARMS.items() if made.of == of and not _is_pending(name, found)]
        grown = [found[name] for name in names if ARMS[name].method in OURS and not ARMS[name].scratch]
        others = [found["goes on"], *(found[name] for name in names if ARMS[name].scratch)]
        told[of] = contest(grown, others, nats=True)
    return told


def against_peers(found: dict[str, Seen | None]) -> dict[str, tuple[float, bool] | None]:
    """For depth and experts: how many nats growth by our plans ends below the best published method."""
    told = {}
    for of in ("depth", "experts"):
        made = [name for name, made in ARMS.items() if made.of == of and not made.scratch]
        names = [name for name in made if not _is_pending(name, found)]
        sides = {
            ours: [found[n] for n in names if (ARMS[n].method in OURS) is ours] for ours in (True, False)
        }
        told[of] = contest(sides[True], sides[False], nats=True)
    return told


def _is_pending(name: str, found: dict[str, Seen | None]) -> bool:
    return name in PENDING and found[name] is None


def figures(known: Known, sizes: Sizes) -> dict[str, str]:
    """The figures of the last line, in nats; below zero growing loses."""
    found = results(known, sizes)
    told = gains(found)
    told |= {f"{of}_over_peers": gain for of, gain in against_peers(found).items()}
    return {name: NOT_RUN if gain is None else f"{gain[0]:+.4f}" for name, gain in told.items()}


def show(known: Known, sizes: Sizes, say: Callable[[str], object] = print) -> int:
    """Print the table and the line of figures; 1 if a run is missing."""
    found = results(known, sizes)
    own = seen(known, Arm((), base(known, sizes).chosen), sizes.seeds)
    say(f"{'the base':64} {_cell(own)}")
    for name, made in ARMS.items():
        say(f"{': '.join(part for part in (made.of, made.label) if part):64} {_cell(found[name])}")
    missing = [name for name, one in found.items() if one is None]
    for name in missing:
        say(f"missing: {name}")
    say(" ".join(f"{name}={value}" for name, value in figures(known, sizes).items()))
    return 1 if missing else 0


def stored_section() -> str:
    """The section from what is stored in the repository."""
    store = Store(RESULTS / FILE)
    return section(lambda spec: store.known(spec.key), Sizes())


def section(known: Known, sizes: Sizes) -> str:
    """The section of the page; "" until every run is stored."""
    found = results(known, sizes)
    own = seen(known, Arm((), base(known, sizes).chosen), sizes.seeds)
    if own is None or any(one is None and not _is_pending(name, found) for name, one in found.items()):
        return ""
    trained = known(own.chosen)
    assert trained is not None
    rows = [f"| | {made.label} | {_cell(found[name])} |" for name, made in ARMS.items() if not made.of]
    for of in DIRECTIONS:
        rows += [
            f"| {of} | {made.label} | {_cell(found[name])} |"
            for name, made in ARMS.items()
            if made.of == of and not _is_pending(name, found)
        ]
    return f"""\
## Deeper, wider by zeros, or by experts: a Llama on text

`python -m reproduce.directions` makes these runs, and `--stage print` prints them. The base is a stock Llama of width
{sizes.width} with {sizes.layers} layers, trained on {trained.get("samples", 0):,} BPE tokens of textbooks until its rate is zero; it is at
{own.mean:.4f} ({own.spread:.4f}). Each row spends as many FLOPs again, {sizes.budget:.3g}. Schedule, choices and seeds are as above. What
[sleeps](growth.md) is woken before the first step. LLaMA Pro, G_stack and sparse upcycling train all weights here, with an
empty optimizer. No row has a balance loss.

| | | held out, at the end |
|---|---|---|
{chr(10).join(rows)}

{fill(_told(found), 120)}
"""


def _told(found: dict[str, Seen | None]) -> str:
    """What the table says, in sentences made of its figures."""
    told = []
    for of, gain in gains(found).items():
        assert gain is not None
        told.append(f"{_GROWN[of]} {_verdict(gain, 'the better of going on and starting anew')}.")
    for of, gain in against_peers(found).items():
        assert gain is not None
        told.append(
            f"With {of}, our plans end {_verdict(gain, 'the best other method').removeprefix('ends ')}."
        )
    return " ".join(told)


_GROWN = {
    "depth": "Growing deeper",
    "width": "Growing wider",
    "experts": "Adding experts",
}


def _verdict(gain: tuple[float, bool], other: str) -> str:
    """A gain in nats in words.

    >>> _verdict((0.03, True), "going on"), _verdict((-0.01, False), "going on")
    ('ends 0.030 nats below going on', 'ends 0.010 nats above going on')
    """
    nats, beyond = gain
    overlap = ", with seeds that overlap" if nats > 0 and not beyond else ""
    return f"ends {abs(nats):.3f} nats {'below' if nats > 0 else 'above'} {other}{overlap}"


def _cell(one: Seen | None) -> str:
    if one is None:
        return NOT_RUN
    copies = one.chosen.start is not None and one.chosen.width == 2 * one.chosen.start.width
    noise = f", t = {one.chosen.noise:g}" if copies else ""
    return f"{one.mean:.4f} ({one.spread:.4f}) 2^{log2(one.chosen.lr):g}{noise}"
