"""What is stored of a study: the arms of every stage with spreads over seeds, and the contests between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from .choose import Arm, Known
from .questions import after, exactness, family, large, midrun, new_units, states, sunk, unseen, widths
from .questions.noise_rule import Case, cases
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

    def paired(self, arm: Arm, figure: str = "held") -> Seen | None:
        """An arm on every seed, the tuning seed first."""
        return seen(self.known, arm, (self.sizes.tuning_seed, *self.sizes.seeds), figure)

    def on_tuning_seed(self, arm: Arm) -> Seen | None:
        return seen(self.known, arm, (self.sizes.tuning_seed,))

    def sunk(self, base: Finished, name: str, extra: float) -> Seen | None:
        return self.seen(sunk.arm(self.known, self.sizes, base, name, extra))

    def mid_run(self, name: str, units: int) -> Seen | None:
        return self.seen(midrun.arm(self.known, self.sizes, name, units))

    def exactness(self, name: str, figure: str = "held") -> Seen | None:
        return self.seen(exactness.arm(self.known, self.sizes, name), figure)

    def unseen(self, name: str) -> Seen | None:
        return self.seen(unseen.arm(self.known, self.sizes, name))

    def new_units(self, base: Finished, name: str, extra: float) -> Seen | None:
        return self.seen(new_units.arm(self.known, self.sizes, base, name, extra))

    def new_units_mid_run(self, name: str, units: int) -> Seen | None:
        return self.seen(new_units.mid_run(self.known, self.sizes, name, units))

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
        more = unseen.NEW_UNITS if self.sizes.cited_new_units else ()
        more = (*more, *unseen.MEANS) if self.sizes.centred else more
        for name in (*unseen.NAMES, *more) if self.sizes.cited_unseen else ():
            if self.unseen(name) is None:
                yield f"d: {name}"
        for base in self.sizes.cited_bases if self.sizes.cited_new_units else ():
            for extra in self.sizes.cited_extras:
                for name in new_units.names(self.sizes, base):
                    if self.new_units(base, name, extra) is None:
                        yield f"u: base {base.width} of {base.units} units, {extra:g} times more: {name}"
        for units in self.sizes.cited_mid_run if self.sizes.cited_new_units else ():
            for name in new_units.mid_run_names(self.sizes):
                if self.new_units_mid_run(name, units) is None:
                    yield f"u: {units} units: {name}"
        yield from self._missing_pairs()

    def _missing_pairs(self) -> Iterator[str]:
        """What is cited with every seed."""
        known, sizes = self.known, self.sizes
        arms = {f"r: {name}": after.arm(known, sizes, name) for name in after.names(sizes)}
        arms |= {f"s: {name}": states.arm(known, sizes, name) for name in states.names(sizes)}
        for way in sizes.ways:
            kept = widths.near(known, sizes, way) or widths.throughout(way)
            for name in (*kept, *widths.grown(way)):
                arms[f"w: {way.narrow} with {way.units} units: {name}"] = widths.arm(known, sizes, way, name)
        for share in sizes.family_shares:
            for size, made in zip(("middle", "large"), family.grown(known, sizes, share), strict=True):
                arms[f"f: the {size} model of a family, {share:g} × the FLOPs"] = made
        for extra in sizes.cited_extras:
            arms |= {f"l: {extra:g} ×: {name}": large.arm(known, sizes, name, extra) for name in large.FIRST}
        for line, made in arms.items():
            if line[0] in sizes.cited_paired and self.paired(made) is None:
                yield line


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


def new_units_contest(book: Book, base: Finished, name: str, extra: float) -> tuple[float, bool] | None:
    """The same contest for one arm by new units."""
    others = [book.sunk(base, n, extra) for n in sunk.names(book.sizes, base) if not n.startswith("grown")]
    return contest([book.new_units(base, name, extra)], others, book.nats)


def new_units_mid_run_contest(book: Book, name: str, units: int) -> tuple[float, bool] | None:
    """One arm by new units in mid-run against the best of the widths near it for all of the budget."""
    widths = [n for n in new_units.mid_run_names(book.sizes) if n.endswith("throughout")]
    others = [book.new_units_mid_run(width, units) for width in widths]
    return contest([book.new_units_mid_run(name, units)], others, book.nats)


def mid_run_contest(book: Book, units: int) -> tuple[float, bool] | None:
    """Growing in mid-run against the best width for all of the budget."""
    sides: dict[bool, list[Seen | None]] = {True: [], False: []}
    for name in midrun.names(book.sizes):
        sides[name.startswith("grown")].append(book.mid_run(name, units))
    return contest(sides[True], sides[False], book.nats)


def regret(book: Book) -> float | None:
    """What the recipe without a sweep loses to the tuned point: in nats, or as a share of the loss."""
    recipe, tuned = (book.unseen(name) for name in unseen.NAMES)
    if recipe is None or tuned is None:
        return None
    return recipe.mean - tuned.mean if book.nats else recipe.mean / tuned.mean - 1


def new_units_regret(book: Book, name: str) -> tuple[Seen, Seen, float] | None:
    """One arm by new units without a sweep, the lowest tuned point of all ways to grow, and what the first loses to it.

    It is the lowest by the seeds that are reported, which favours the tuned side.
    """
    tuned = [
        book.unseen(each) for each in ("tuned", *(reader + unseen.TUNED for reader in new_units.METHODS))
    ]
    ours, points = book.unseen(name), [point for point in tuned if point is not None]
    if ours is None or len(points) < len(tuned):
        return None
    best = min(points, key=lambda point: point.mean)
    return ours, best, ours.mean - best.mean if book.nats else ours.mean / best.mean - 1
