"""Stage b: a finished base, decayed to zero and paid for. It may spend more FLOPs: by going on, grown, or on a new model.

Each arm is tuned on the tuning seed. When the base has as many FLOPs again, going on tries three peaks, growing tries
noises at the base's peak and then half and twice the peak. With other budgets the peak moves by at most a factor of two.

A size of noise that is chosen on one seed costs another share of what was learned on the next: t = 0.2 costs 2.9, 4.5 and
5.7 times of it on three seeds of one base. So growing is also run with noise by the library's rule, which looks at each base.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..choose import Arm, Known, best, runs_of, scratch, search
from ..sizes import Finished, Sizes
from ..spec import Spec

FIRST_NOISE = 0.1
"""The noise of the first look at growing: the best in most settings so far."""


def names(sizes: Sizes, base: Finished) -> tuple[str, ...]:
    """The arms of a base, in the order of the table."""
    told = ["goes on"]
    for k in sizes.ks:
        told += [f"grown to {k * base.width}", f"scratch {k * base.width}"]
    return tuple(told)


BY_RULE = ", noise by rule"


def ruled(sizes: Sizes, base: Finished) -> tuple[str, ...]:
    """The arms of a base that grow with noise by the rule; only their rate is tuned."""
    return tuple(f"grown to {k * base.width}{BY_RULE}" for k in sizes.ks)


def arm(known: Known, sizes: Sizes, base: Finished, name: str, extra: float) -> Arm:
    """One arm of a base with so much more to spend, in multiples of the base's own budget."""
    trained = scratch(known, sizes, base.width, base.units)
    units = base.units * extra
    if name.startswith("scratch"):
        return scratch(known, sizes, int(name.split()[-1]), units)
    if trained.chosen is None:
        return trained
    if name == "goes on":
        return _goes_on(known, sizes, trained.chosen, extra)
    if name.endswith(BY_RULE):
        grown = _more(trained.chosen, int(name.removesuffix(BY_RULE).split()[-1]), extra)
        rates = [replace(grown, by_rule=True, lr=grown.lr * factor) for factor in (1.0, 0.5, 2.0)]
        return best(known, rates)
    return _grown(known, sizes, trained.chosen, int(name.split()[-1]), extra)


def specs(known: Known, sizes: Sizes, base: Finished, extras: tuple[float, ...]) -> Iterator[Spec]:
    """The runs of a base, the most telling first: a first look, then tuning, then the other seeds."""
    trained = scratch(known, sizes, base.width, base.units)
    yield from trained.specs
    if trained.chosen is None:
        return
    for extra in extras:
        yield _more(trained.chosen, trained.chosen.width, extra)
        grown = _more(trained.chosen, 2 * base.width, extra)
        yield replace(grown, noise=min(sizes.noises, key=lambda t: abs(t - FIRST_NOISE)))
        yield from arm(known, sizes, base, f"scratch {2 * base.width}", extra).specs
    for extra in sorted(extras, key=lambda extra: abs(extra - 1)):
        arms = [arm(known, sizes, base, name, extra) for name in names(sizes, base)]
        yield from runs_of(arms, sizes.seeds)


def ruled_specs(known: Known, sizes: Sizes, base: Finished, extras: tuple[float, ...]) -> Iterator[Spec]:
    """The runs of a base with noise by the rule, once the base is trained."""
    trained = scratch(known, sizes, base.width, base.units)
    yield from trained.specs
    if trained.chosen is not None:
        for extra in extras:
            arms = [arm(known, sizes, base, name, extra) for name in ruled(sizes, base)]
            yield from runs_of(arms, sizes.seeds)


def _more(base: Spec, width: int, extra: float) -> Spec:
    return replace(base, width=width, budget=round(base.budget * extra), start=base)


def _goes_on(known: Known, sizes: Sizes, base: Spec, extra: float) -> Arm:
    same = _more(base, base.width, 1.0)
    middle = search(known, lambda lr: replace(same, lr=lr), (base.lr / 4, base.lr / 2, base.lr), sizes.extend)
    if extra == 1 or middle.chosen is None:
        return middle
    spec = replace(_more(base, base.width, extra), lr=middle.chosen.lr)
    return middle.then(best(known, [spec, replace(spec, lr=spec.lr / 2)]))


def _grown(known: Known, sizes: Sizes, base: Spec, width: int, extra: float) -> Arm:
    same = _more(base, width, 1.0)
    noise = search(known, lambda t: replace(same, noise=t), sizes.noises, sizes.extend)
    if noise.chosen is None:
        return noise
    around = [replace(noise.chosen, lr=noise.chosen.lr * factor) for factor in (1.0, 0.5, 2.0)]
    middle = noise.then(best(known, around))
    if extra == 1 or middle.chosen is None:
        return middle
    spec = replace(_more(base, width, extra), lr=middle.chosen.lr, noise=middle.chosen.noise)
    if extra > 1:
        options = [spec, replace(spec, noise=2 * spec.noise), replace(spec, lr=spec.lr / 2)]
        return middle.then(best(known, options))
    noise = search(known, lambda t: replace(spec, noise=t), sizes.noises, sizes.extend)
    if noise.chosen is None:
        return middle.then(noise)
    return middle.then(noise).then(best(known, [noise.chosen, replace(noise.chosen, lr=spec.lr / 2)]))
