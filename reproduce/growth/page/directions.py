"""Tables of blocks, experts and more experts, from what is stored, and how growth by plans compares with other ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log2
from statistics import fmean

from ..book import Seen, contest, seen
from ..choose import Arm, Known
from ..questions.directions import ARMS, DEEP, Sizes, arm, base
from ..train import Result
from .cells import by_seed, gain_cell, table

OURS = ("ours", "copied_readers")
DIRECTIONS = ("depth", "width", "experts")


def results(known: Known, sizes: Sizes) -> dict[str, Seen | None]:
    """Every arm with its reported seeds; None while a run is missing."""
    return {name: seen(known, arm(known, sizes, name), sizes.seeds) for name in sizes.arms}


def gains(found: dict[str, Seen | None]) -> dict[str, tuple[float, bool] | None]:
    """For each direction: how many nats its growth by our plans ends below the best of going on and starting anew.

    With it: whether the seeds do not overlap. The tuning seed chooses on both sides.
    """
    told = {}
    for of in DIRECTIONS:
        names = [name for name, made in ARMS.items() if made.of == of]
        grown = [found[name] for name in names if ARMS[name].method in OURS and not ARMS[name].scratch]
        others = [found["goes on"], *(found[name] for name in names if ARMS[name].scratch)]
        told[of] = contest(grown, others, nats=True)
    return told


def against_peers(found: dict[str, Seen | None]) -> dict[str, tuple[float, bool] | None]:
    """For depth and experts: how many nats growth by our plans ends below the best published method."""
    told = {}
    for of in ("depth", "experts"):
        made = [name for name, made in ARMS.items() if made.of == of and not made.scratch]
        sides = {ours: [found[n] for n in made if (ARMS[n].method in OURS) is ours] for ours in (True, False)}
        told[of] = contest(sides[True], sides[False], nats=True)
    return told


def deep(known: Known, sizes: Sizes) -> dict[str, dict[int, tuple[float, float]]]:
    """For each way to double the layers, by seed: by how much the loss rises at growth, and where it ends.

    Only seeds that every way has; none before the rates are chosen.
    """
    chosen = {name: arm(known, sizes, name).chosen for name in DEEP}
    told: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in DEEP}
    for seed in (sizes.tuning_seed, *sizes.seeds):
        found = {name: known(spec.with_seed(seed)) for name, spec in chosen.items() if spec is not None}
        ended = {name: one for name, one in found.items() if one is not None and one["held"] is not None}
        for name, one in ended.items() if len(ended) == len(DEEP) else ():
            told[name][seed] = (_rise(one), float(one["held"]))
    return told


def _rise(result: Result) -> float:
    noise = result["noise"]
    return float(noise["after"]["choose"] - noise["before"]["choose"])


def over_stack(known: Known, sizes: Sizes) -> dict[int, float]:
    """What stack order with writers of zero ends above G_stack, by seed."""
    found = deep(known, sizes)
    return {seed: end - found["stack"][seed][1] for seed, (_, end) in found["stacked"].items()}


def own(known: Known, sizes: Sizes) -> Seen | None:
    """The base itself."""
    return seen(known, Arm((), base(known, sizes).chosen), sizes.seeds)


def missing(known: Known, parts: Sequence[Sizes]) -> Iterator[str]:
    """The arms that the page cites and that lack a run."""
    for sizes in parts:
        for name, one in results(known, sizes).items():
            if one is None:
                yield f"{ARMS[name].of or 'the base'}, from width {sizes.width}: {ARMS[name].label}"


def directions_table(known: Known, sizes: Sizes) -> str:
    """Every arm of the dense base with as many FLOPs again."""
    found = results(known, sizes)
    rows = [["", "the base itself", _cell(own(known, sizes))]]
    rows += [["", ARMS[name].label, _cell(one)] for name, one in found.items() if not ARMS[name].of]
    rows += [
        [of, ARMS[name].label, _cell(one)]
        for of in DIRECTIONS
        for name, one in found.items()
        if ARMS[name].of == of
    ]
    for of, gain in gains(found).items():
        rows.append(
            [of, "the better of going on and starting anew minus our plans", gain_cell(gain, nats=True)]
        )
    for of, gain in against_peers(found).items():
        rows.append([of, "the best other method minus our plans", gain_cell(gain, nats=True)])
    return table(["", "", "held out, at the end"], [row for row in rows if row[2]])


def order_table(known: Known, parts: Sequence[Sizes]) -> str:
    """Ways to double the layers beside each other, at the sizes and on the seeds that have them all."""
    kept = [each for each in parts if over_stack(known, each)]
    rows = []
    for name in DEEP:
        ends = [part for each in kept for part in _rise_and_end(deep(known, each)[name])]
        rows.append([ARMS[name].label, *ends])
    apart = [over_stack(known, each).values() for each in kept]
    rows.append(
        [
            "stack order minus G_stack, by seed",
            *(part for values in apart for part in ("", by_seed(values, nats=True))),
        ]
    )
    head = [part for each in kept for part in (f"width {each.width}: rises by", "ends at")]
    return table(["", *head], rows)


def orders_table(known: Known, sizes: Sizes) -> str:
    """Other orders and sizes of copied blocks beside G_stack, on every seed that each has; "" while nothing is stored."""
    seeds = (sizes.tuning_seed, *sizes.seeds)
    rows = []
    for name in ("stack", *sizes.arms):
        chosen = arm(known, sizes, name).chosen
        found = [None if chosen is None else known(chosen.with_seed(seed)) for seed in seeds]
        ended = [one for one in found if one is not None and one["held"] is not None]
        if ended:
            ends = ["" if one is None else f"{one['held']:.4f}" for one in found]
            rows.append([ARMS[name].label, f"{fmean(map(_rise, ended)):+.4f}", *ends])
    if len(rows) < 2:
        return ""
    return table(["", "rises by", *(f"ends at, seed {seed}" for seed in seeds)], rows)


def mixture_ends(known: Known, sizes: Sizes) -> dict[str, tuple[Result, ...]]:
    """What a mixture may become, with every seed; arms that lack one are left out."""
    seeds = (sizes.tuning_seed, *sizes.seeds)
    told = {}
    for name in sizes.arms:
        chosen = arm(known, sizes, name).chosen
        found = [None if chosen is None else known(chosen.with_seed(seed)) for seed in seeds]
        ended = tuple(one for one in found if one is not None and one["held"] is not None)
        if len(ended) == len(seeds):
            told[name] = ended
    return told


def mixture_table(known: Known, sizes: Sizes) -> str:
    """The same as a table; rises are those of the tuning seed."""
    rows = []
    for name, ended in mixture_ends(known, sizes).items():
        chosen = arm(known, sizes, name).chosen
        assert chosen is not None
        rise = f"{_rise(ended[0]):+.4f}" if chosen.grows else ""
        ends = [f"{one['held']:.4f}" for one in ended]
        rows.append([ARMS[name].label, rise, *ends, f"2^{log2(chosen.lr):g}", f"{ended[0]['steps']:,}"])
    names = [f"ends at, seed {seed}" for seed in (sizes.tuning_seed, *sizes.seeds)]
    return table(["", "rises by", *names, "rate", "steps"], rows)


def _rise_and_end(found: Mapping[int, tuple[float, float]]) -> tuple[str, str]:
    rises, ends = zip(*found.values(), strict=True)
    spread = f" ({max(ends) - min(ends):.4f})" if len(ends) > 1 else ""
    return f"{fmean(rises):.4f}", f"{fmean(ends):.4f}{spread}"


def _cell(one: Seen | None) -> str:
    if one is None:
        return ""
    copies = one.chosen.start is not None and one.chosen.width == 2 * one.chosen.start.width
    noise = f", t = {one.chosen.noise:g}" if copies else ""
    return f"{one.mean:.4f} ({one.spread:.4f}) 2^{log2(one.chosen.lr):g}{noise}"
