"""Every registered method on the same finished bases: a quarter of their FLOPs more, and as many again.

A width grows on the bases of the study that is asked, blocks and experts on a stock Llama of two layers on text, and a
mixture on a stock Mixtral of four experts. The tuning seed chooses among the rates of the method.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..choose import Arm, Known, runs_of, scratch, search
from ..methods import METHODS
from ..methods.method import Method
from ..sizes import Sizes
from ..spec import Spec
from . import directions

EXTRAS = (0.25, 1.0)


def arm(known: Known, started: Arm, method: Method, extra: float, extend: int) -> Arm:
    """One method from a base with so much more to spend, in multiples of the base's own budget."""
    if started.chosen is None:
        return started
    spec = method.of(started.chosen, round(extra * started.chosen.budget))
    rates = [rate * spec.lr for rate in method.rates]
    if len(rates) == 1:
        return started.then(Arm((), replace(spec, lr=rates[0])))
    return started.then(search(known, lambda lr: replace(spec, lr=lr), rates, extend))


def bases(known: Known, sizes: Sizes, method: Method) -> list[Arm]:
    """What a method grows: the finished bases of a study, or those that get blocks and experts."""
    if method.kind == "width":
        return [scratch(known, sizes, base.width, base.units) for base in sizes.bases]
    return [directions.base(known, directions.MIXTURE if method.kind == "mixture" else directions.Sizes())]


def specs(known: Known, sizes: Sizes, name: str) -> Iterator[Spec]:
    """The runs of one method."""
    method = METHODS[name]
    for base in bases(known, sizes, method):
        arms = [arm(known, base, method, extra, sizes.extend) for extra in EXTRAS]
        yield from runs_of(arms, (sizes.tuning_seed, *sizes.seeds))
