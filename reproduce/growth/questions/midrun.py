"""Stage a: a budget that is shared. The narrow, the middle and the wide model for all of it, or growth on the way.

Growth tries noises at a quarter of the FLOPs of the middle budget, and the rates that the narrow run tried; other shares
try that noise and half of it. Other budgets take the noise from the middle one, and the rate from their narrow run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..choose import Arm, Known, best, runs_of, scratch, search
from ..sizes import Sizes
from ..spec import Spec

TUNED_SHARE = 0.25


def names(sizes: Sizes) -> tuple[str, ...]:
    """The arms, in the order of the table."""
    widths = (sizes.narrow, sizes.between, sizes.wide)
    return (
        *(f"{width} throughout" for width in widths if width is not None),
        *(f"grown at {f:g}" for f in sizes.shares),
    )


def middle(sizes: Sizes) -> int:
    return sizes.mid_run[len(sizes.mid_run) // 2]


def arm(known: Known, sizes: Sizes, name: str, units: int) -> Arm:
    if name.endswith("throughout"):
        return scratch(known, sizes, int(name.split()[0]), units)
    return _grown(known, sizes, float(name.split()[-1]), units)


def specs(known: Known, sizes: Sizes) -> Iterator[Spec]:
    """The runs, the middle budget first."""
    for units in sorted(sizes.mid_run, key=lambda units: abs(units - middle(sizes))):
        arms = [arm(known, sizes, name, units) for name in names(sizes)]
        yield from runs_of(arms, sizes.seeds)


def _grown(known: Known, sizes: Sizes, share: float, units: int) -> Arm:
    narrow = scratch(known, sizes, sizes.narrow, units)
    if narrow.chosen is None:
        return narrow

    def at(start: Spec, share: float, noise: float) -> Spec:
        return replace(start, width=sizes.wide, start=start, at=share, noise=noise)

    if units != middle(sizes):
        tuned = _grown(known, sizes, share, middle(sizes))
        if tuned.chosen is None:
            return tuned
        return tuned.then(best(known, [at(narrow.chosen, share, tuned.chosen.noise)]))
    chosen = narrow.chosen
    noise = search(known, lambda t: at(chosen, TUNED_SHARE, t), sizes.noises, sizes.extend)
    if noise.chosen is None:
        return narrow.then(noise)
    t = noise.chosen.noise
    if share != TUNED_SHARE:
        return narrow.then(noise).then(best(known, [at(chosen, share, t), at(chosen, share, t / 2)]))
    tried = [spec for spec in narrow.specs if spec.budget == chosen.budget]
    options = best(known, [at(start, share, t) for start in tried])
    return narrow.then(noise).then(options)
