"""What is stored, as tables with spreads over seeds, and one line of figures.

A cell is the mean held-out loss of the reported seeds, and the distance between the lowest and the highest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log2
from statistics import fmean

from . import exactness, midrun, sunk, unseen
from .choose import Arm, Known
from .noise_rule import RULES, Case, cases, regrets
from .sizes import Finished, Sizes
from .spec import Spec
from .studies import Study
from .train import Trainer

NOT_RUN = "not_run"


@dataclass(frozen=True)
class Seen:
    """An arm that is complete: its chosen spec, and a figure for every reported seed."""

    chosen: Spec
    choose: float
    """The loss of the tuning seed on the rows for choosing."""
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def spread(self) -> float:
        return max(self.values) - min(self.values)


@dataclass(frozen=True)
class Book:
    """What is stored of one study."""

    known: Known
    sizes: Sizes
    name: str = "mlp"
    nats: bool = False
    """Whether losses are compared by their difference; else by their ratio."""
    grown: tuple[Case, ...] = ()
    """Growth with several noises, by which rules for the noise are judged."""

    @staticmethod
    def of(study: Study, trainer: Trainer) -> Book:
        return Book(trainer.known, study.sizes, study.name, study.nats, tuple(cases(trainer.all())))

    def seen(self, arm: Arm, figure: str = "held") -> Seen | None:
        return seen(self.known, arm, self.sizes.seeds, figure)

    def sunk(self, base: Finished, name: str, extra: float) -> Seen | None:
        return self.seen(sunk.arm(self.known, self.sizes, base, name, extra))

    def mid_run(self, name: str, units: int) -> Seen | None:
        return self.seen(midrun.arm(self.known, self.sizes, name, units))

    def exactness(self, name: str, figure: str = "held") -> Seen | None:
        return self.seen(exactness.arm(self.known, self.sizes, name), figure)

    def unseen(self, name: str) -> Seen | None:
        return self.seen(unseen.arm(self.known, self.sizes, name))

    def missing(self) -> Iterator[str]:
        """What the page cites and is not stored."""
        for base in self.sizes.cited_bases:
            for extra in self.sizes.cited_extras:
                ruled = sunk.ruled(self.sizes, base) if self.sizes.cited_ruled else ()
                for name in (*sunk.names(self.sizes, base), *ruled):
                    if self.sunk(base, name, extra) is None:
                        yield f"b: base {base.width} of {base.units} units, {extra:g} times more: {name}"
        for name in exactness.cited(self.sizes) if self.sizes.cited_exactness else ():
            if self.exactness(name) is None:
                yield f"c: {name}"
        for units in self.sizes.cited_mid_run:
            for name in midrun.names(self.sizes):
                if self.mid_run(name, units) is None:
                    yield f"a: {units} units: {name}"
        for name in unseen.NAMES if self.sizes.cited_unseen else ():
            if self.unseen(name) is None:
                yield f"d: {name}"


def seen(known: Known, arm: Arm, seeds: Sequence[int], figure: str = "held") -> Seen | None:
    """An arm with all its seeds; None while a run is missing or if one diverged."""
    if arm.chosen is None:
        return None
    tuning = known(arm.chosen)
    told = [known(arm.chosen.with_seed(seed)) for seed in seeds]
    if tuning is None or tuning["choose"] is None:
        return None
    values = tuple(float(t[figure]) for t in told if t is not None and t[figure] is not None)
    if len(values) < len(told):
        return None
    return Seen(arm.chosen, float(tuning["choose"]), values)


def contest(
    grown: Sequence[Seen | None], others: Sequence[Seen | None], nats: bool = False
) -> tuple[float, bool] | None:
    """The mean loss of the best alternative over that of growing, and whether the difference is beyond the spread.

    With `nats` it is their difference.

    It is if the worst seed of growing is below the best seed of the alternative: bases of two seeds differ by more than
    some gains. On each side the tuning seed chooses; None while a run is missing.

    >>> spec = Spec(8, 1, 0.5, 0)
    >>> gain, beyond = contest([Seen(spec, 1.0, (0.9, 1.1))], [Seen(spec, 2.0, (2.0, 2.0)), Seen(spec, 3.0, (1.0, 1.0))])
    >>> gain, beyond
    (2.0, True)
    """
    sides = [[seen for seen in side if seen is not None] for side in (grown, others)]
    if [len(side) for side in sides] != [len(grown), len(others)]:
        return None
    ours, best = (min(side, key=lambda seen: seen.choose) for side in sides)
    gain = best.mean - ours.mean if nats else best.mean / ours.mean
    return gain, max(ours.values) < min(best.values)


def sunk_contest(book: Book, base: Finished, extra: float) -> tuple[float, bool] | None:
    """Growing a finished base against the best of going on and of new models."""
    sides: dict[bool, list[Seen | None]] = {True: [], False: []}
    for name in sunk.names(book.sizes, base):
        sides[name.startswith("grown")].append(book.sunk(base, name, extra))
    return contest(sides[True], sides[False], book.nats)


def ruled_contest(book: Book, base: Finished, extra: float) -> tuple[float, bool] | None:
    """The same contest, where growing has noise by the rule."""
    others = [book.sunk(base, n, extra) for n in sunk.names(book.sizes, base) if not n.startswith("grown")]
    grown = [book.sunk(base, name, extra) for name in sunk.ruled(book.sizes, base)]
    return contest(grown, others, book.nats)


def mid_run_contest(book: Book, units: int) -> tuple[float, bool] | None:
    """Growing in mid-run against the best width for all of the budget."""
    sides: dict[bool, list[Seen | None]] = {True: [], False: []}
    for name in midrun.names(book.sizes):
        sides[name.startswith("grown")].append(book.mid_run(name, units))
    return contest(sides[True], sides[False], book.nats)


def cited_contest(book: Book, extra: float) -> tuple[float, bool] | None:
    """The smallest gain of growing among the cited bases, and whether all are beyond the spread."""
    found = [sunk_contest(book, base, extra) for base in book.sizes.cited_bases]
    told = [each for each in found if each is not None]
    if not told or len(told) < len(found):
        return None
    return min(gain for gain, _ in told), all(beyond for _, beyond in told)


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
        "d_regret": _worst([regret(book) for book in books if not book.nats]),
        "d_nats": _worst([regret(book) for book in books if book.nats]),
        "e_worst": NOT_RUN,
    }


def regret(book: Book) -> float | None:
    """What the recipe without a sweep loses to the tuned point: in nats, or as a share of the loss."""
    recipe, tuned = (book.unseen(name) for name in unseen.NAMES)
    if recipe is None or tuned is None:
        return None
    return recipe.mean - tuned.mean if book.nats else recipe.mean / tuned.mean - 1


def show(books: Sequence[Book], say: Callable[[str], object] = print) -> int:
    """Print the tables and the line; 1 if something that the page cites is missing."""
    lacking = []
    for book in books:
        say(f"\n{book.name}")
        _show(book, say)
        lacking += [f"{line}{'' if book is books[0] else f' ({book.name})'}" for line in book.missing()]
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
    if "a" in sizes.stages:
        say(f"\na: {sizes.narrow} -> {sizes.wide} in mid-run, equal total FLOPs")
        say(_row("", [f"{units} units" for units in sizes.mid_run]))
        for name in midrun.names(sizes):
            say(_row(name, [_cell(book.mid_run(name, units)) for units in sizes.mid_run]))
        gains = [_gain(mid_run_contest(book, units), book.nats) for units in sizes.mid_run]
        say(_row("gain of growing", gains))
    if "c" in sizes.stages:
        say(f"\nc: {sizes.narrow} -> {2 * sizes.narrow} in mid-run, the same wide weights")
        say(_row("", [f"after {sizes.stop:.0%}, held out", "first 1 %, training"]))
        for name in exactness.names(sizes):
            say(_row(name, [_cell(book.exactness(name)), _cell(book.exactness(name, "early"))]))
    say(f"\nd: {sizes.wide // sizes.unseen_k} -> {sizes.wide}, a setting that chose nothing")
    for name in unseen.NAMES:
        say(_row(name, [_cell(book.unseen(name))]))
    say(_row("regret", [_told(regret(book))]))
    if book.grown:
        say(f"\nrules for the noise, {len(book.grown)} cases: mean and worst regret in per cent")
        for case in book.grown:
            say(f"  {case.label:44} {case.steps:6} steps, best share {case.best:.3f}")
        for name, rule in RULES.items():
            mean, worst = regrets(book.grown, rule)
            say(f"  {name:44} {100 * mean:.2f}  {100 * worst:.2f}")


def carried_over_others(book: Book, figure: str) -> float | None:
    """The loss with noise and carried state over that of the best other state of the same wide model with noise."""
    arms = {
        name: book.exactness(name, figure) for name in exactness.names(book.sizes) if name.endswith(", noise")
    }
    seen = {name: arm for name, arm in arms.items() if arm is not None}
    if not {name for name in exactness.cited(book.sizes) if name in arms} <= seen.keys():
        return None
    others = [arm.mean for name, arm in seen.items() if not name.startswith("carried")]
    return seen["carried, noise"].mean / min(others)


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
    told = f"2^{log2(spec.lr):g}" + (f" {noise}" if spec.grows else "")
    return f"{seen.mean:.4f} ({seen.spread:.4f}) {told}"


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:28}" + "".join(f"{cell:28}" for cell in cells).rstrip()
