"""Stage u: new units that write nothing yet, in the place of copies. Growing does not change the loss, and nothing is tuned.

The peak is half of the base's and warmed up again; every tensor keeps the rate that it has at the base's width. Readers of
new units are random, or copies of trained ones with noise, and the optimizer begins empty. On the first base its moments are
also kept, as `upscale` leaves them. Methods of others stand beside it there, each at its own rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..choose import Arm, Known, runs_of, scratch, search
from ..sizes import Finished, Sizes
from ..spec import Spec, State

METHODS: Mapping[str, str] = {"new units": "new_units", "copied readers": "copied_readers"}
KEPT = ", moments kept"
BASE_RATE = ", the base's rate"
ONE_RATE = ", one for all tensors"
PEERS: Mapping[str, str] = {"HyperCloning": "tiling", "Net2Wider": "net2wider"}
RATE = 0.5
"""The peak over that of the base: the best of a quarter, a half and one for finished bases."""
SHARE = 0.25
"""Of the FLOPs, after which a run grows that is not finished."""
TIMES = 2
"""How many times as wide the model becomes."""


def arm(known: Known, sizes: Sizes, base: Finished, name: str, extra: float) -> Arm:
    """One arm of a finished base with so much more to spend, in multiples of the base's own budget."""
    trained = scratch(known, sizes, base.width, base.units)
    if trained.chosen is None:
        return trained
    start = trained.chosen
    grown = replace(start, width=TIMES * base.width, budget=round(start.budget * extra), start=start)
    if name in PEERS:
        theirs = replace(grown, method=PEERS[name])
        rates = (RATE * start.lr, start.lr)
        return trained.then(search(known, lambda lr: replace(theirs, lr=lr), rates, sizes.extend))
    return trained.then(Arm((), untuned(grown, name)))


def mid_run(known: Known, sizes: Sizes, name: str, units: int) -> Arm:
    """One arm of a budget for everything: a width throughout, or growth after a quarter of it."""
    if name.endswith("throughout"):
        return scratch(known, sizes, int(name.split()[0]), units)
    narrow = scratch(known, sizes, sizes.narrow, units)
    if narrow.chosen is None:
        return narrow
    grown = replace(narrow.chosen, width=TIMES * sizes.narrow, start=narrow.chosen, at=SHARE)
    return narrow.then(Arm((), untuned(grown, name)))


def names(sizes: Sizes, base: Finished) -> tuple[str, ...]:
    """The arms of a base by new units, in the order of the table."""
    both = sizes.both_states and base == sizes.bases[0]
    return (*METHODS, *(f"{name}{KEPT}" for name in METHODS if both))


def mid_run_names(sizes: Sizes) -> tuple[str, ...]:
    """The arms of a budget for everything: the widths that are near and multiples of the reference, then growth."""
    near = (sizes.narrow, 3 * sizes.narrow // 2, TIMES * sizes.narrow)
    widths = [width for width in near if width % sizes.reference == 0]
    faster = tuple(f"{name}{BASE_RATE}" for name in METHODS if sizes.both_rates)
    faster += tuple(f"{name}{BASE_RATE}{ONE_RATE}" for name in sizes.one_rate)
    return (*(f"{width} throughout" for width in widths), *METHODS, *faster)


def specs(known: Known, sizes: Sizes) -> Iterator[Spec]:
    """The runs: new units on every finished base, then in mid-run, then methods of others on the first base."""
    for base in sizes.cited_bases:
        for extra in sizes.cited_extras:
            yield from _runs([arm(known, sizes, base, n, extra) for n in names(sizes, base)], sizes)
    for units in sizes.cited_mid_run:
        arms = [mid_run(known, sizes, name, units) for name in reversed(mid_run_names(sizes))]
        yield from _runs(arms, sizes)
    yield from _runs([arm(known, sizes, sizes.bases[0], name, 1.0) for name in PEERS], sizes)


def _runs(arms: list[Arm], sizes: Sizes) -> Iterator[Spec]:
    return runs_of(arms, (sizes.tuning_seed, *sizes.seeds))


def untuned(grown: Spec, name: str, rate: float = RATE) -> Spec:
    """The run that an arm asks for, from one at the peak of the base."""
    scaled = name.removesuffix(ONE_RATE)
    short = scaled.removesuffix(KEPT).removesuffix(BASE_RATE)
    peak = 1.0 if scaled.endswith(BASE_RATE) else rate
    state: State = "kept" if scaled.endswith(KEPT) else "empty"
    return replace(grown, lr=peak * grown.lr, method=METHODS[short], state=state, one_rate=scaled != name)
