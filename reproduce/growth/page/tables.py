"""What is stored, as tables with spreads over seeds, and one line of figures.

A cell is the mean held-out loss of the reported seeds, and the distance between the lowest and the highest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2

from ..book import (
    NOT_RUN,
    Book,
    Seen,
    carried_over_others,
    cited_contest,
    mid_run_contest,
    new_units_regret,
    regret,
    ruled_contest,
    sunk_contest,
)
from ..choose import Arm
from ..questions import exactness, midrun, sunk, unseen
from ..questions.new_units import METHODS
from ..questions.noise_rule import RULES, regrets
from . import new_units as new_units_tables


def figures(books: Sequence[Book]) -> dict[str, str]:
    """The figures of the last line. a, b and c are of the first study; b of its cited base that gains least.

    d is the worst of all studies: in per cent for classification, in nats for text.
    """
    book = books[0]
    mid = mid_run_contest(book, midrun.middle(book.sizes))
    gains = {extra: cited_contest(book, extra) for extra in book.sizes.extras}
    told = {extra: gain for extra, gain in gains.items() if gain is not None}
    paying = [extra for extra, (gain, beyond) in told.items() if gain > 1 and beyond]
    end, early = (carried_over_others(book, figure) for figure in ("held", "early"))
    at_one = told.get(1.0)
    return {
        "a_gain": _told(None if mid is None else mid[0]),
        "b_gain": _told(None if at_one is None else at_one[0]),
        "b_from": NOT_RUN if not told else f"{min(paying):g}" if paying else "never",
        "c_end": _told(end),
        "c_early": _told(early),
        "d_regret": _worst([regret(book) for book in books if not book.nats and book.sizes.cited_unseen]),
        "d_nats": _worst([regret(book) for book in books if book.nats and book.sizes.cited_unseen]),
        "e_worst": NOT_RUN,
        **new_units_tables.figures(books),
    }


def show(books: Sequence[Book], say: Callable[[str], object] = print) -> int:
    """Print the tables and the line; 1 if something that the page cites is missing."""
    lacking = []
    for book in books:
        say(f"\n{book.name}")
        _show(book, say)
        lacking += [f"{line}{'' if book is books[0] else f' ({book.name})'}" for line in book.missing()]
    for line in new_units_tables.summary(books):
        say(f"\n{line}")
    for line in lacking:
        say(f"missing: {line}")
    say(" ".join(f"{name}={value}" for name, value in figures(books).items()))
    return 1 if lacking else 0


def _show(book: Book, say: Callable[[str], object]) -> None:
    """The tables of one study."""
    sizes = book.sizes
    for base in sizes.bases if "b" in sizes.stages else ():
        say(
            f"\nb: base {base.width} of {base.units} units, finished: held-out loss by what it may still spend"
        )
        trained = book.seen(Arm((), sunk.arm(book.known, sizes, base, "goes on", 1.0).chosen))
        if trained is not None and trained.chosen.start is not None:
            own = book.seen(Arm((), trained.chosen.start))
            say(f"the base itself: {_cell(own)}")
        say(_row("", [f"{extra:g} x its budget" for extra in sizes.extras]))
        for name in sunk.names(sizes, base):
            say(_row(name, [_cell(book.sunk(base, name, extra)) for extra in sizes.extras]))
        gains = [_gain(sunk_contest(book, base, extra), book.nats) for extra in sizes.extras]
        say(_row("gain of growing", gains))
        for name in sunk.ruled(sizes, base):
            say(_row(name, [_cell(book.sunk(base, name, extra)) for extra in sizes.extras]))
        gains = [_gain(ruled_contest(book, base, extra), book.nats) for extra in sizes.extras]
        say(_row("gain by rule", gains))
        for row in new_units_tables.base_rows(book, base, sizes.extras, _cell, _gain):
            say(_row(row[0], row[1:]))
    if "a" in sizes.stages:
        say(f"\na: {sizes.narrow} -> {sizes.wide} in mid-run, equal total FLOPs")
        say(_row("", [f"{units} units" for units in sizes.mid_run]))
        for name in midrun.names(sizes):
            say(_row(name, [_cell(book.mid_run(name, units)) for units in sizes.mid_run]))
        gains = [_gain(mid_run_contest(book, units), book.nats) for units in sizes.mid_run]
        say(_row("gain of growing", gains))
    if "u" in sizes.stages:
        say(f"\nu: {sizes.narrow} -> {2 * sizes.narrow} in mid-run by new units, equal total FLOPs")
        say(_row("", [f"{units} units" for units in sizes.cited_mid_run]))
        for row in new_units_tables.mid_run_rows(book, _cell, _gain):
            say(_row(row[0], row[1:]))
    if "c" in sizes.stages:
        say(f"\nc: {sizes.narrow} -> {2 * sizes.narrow} in mid-run, the same wide weights")
        say(_row("", [f"after {sizes.stop:.0%}, held out", "first 1 %, training"]))
        for name in exactness.names(sizes):
            say(_row(name, [_cell(book.exactness(name)), _cell(book.exactness(name, "early"))]))
    say(f"\nd: {sizes.wide // sizes.unseen_k} -> {sizes.wide}, a setting that chose nothing")
    for name in unseen.NAMES:
        say(_row(name, [_cell(book.unseen(name))]))
    say(_row("regret", [_told(regret(book))]))
    for name in (*unseen.NEW_UNITS, *(unseen.MEANS if sizes.centred else ())):
        say(_row(name, [_cell(book.unseen(name))]))
    for name in METHODS:
        found = new_units_regret(book, name)
        say(_row(f"regret of {name}", [_told(None if found is None else found[2])]))
    if book.grown:
        say(f"\nrules for the noise, {len(book.grown)} cases: mean and worst regret in per cent")
        for case in book.grown:
            say(f"  {case.label:44} {case.steps:6} steps, best share {case.best:.3f}")
        for name, rule in RULES.items():
            mean, worst = regrets(book.grown, rule)
            say(f"  {name:44} {100 * mean:.2f}  {100 * worst:.2f}")


def _worst(values: Sequence[float | None]) -> str:
    """The largest; not run while one is missing."""
    known = [value for value in values if value is not None]
    return _told(max(known) if known and len(known) == len(values) else None)


def _told(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value:.4f}"


def _gain(found: tuple[float, bool] | None, nats: bool) -> str:
    if found is None:
        return NOT_RUN
    gain, beyond = found
    told = f"{gain:+.4f} nats" if nats else f"{gain:.3f}"
    return f"{told}{' (seeds overlap)' if not beyond and gain > (0 if nats else 1) else ''}"


def _cell(seen: Seen | None) -> str:
    if seen is None:
        return NOT_RUN
    spec = seen.chosen
    noise = "t by rule" if spec.by_rule else f"t={spec.noise:g}"
    told = f"2^{log2(spec.lr):g}" + (f" {noise}" if spec.grows and spec.method == "ours" else "")
    return f"{seen.mean:.4f} ({seen.spread:.4f}) {told}"


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:45} " + "".join(f"{cell:28}" for cell in cells).rstrip()
