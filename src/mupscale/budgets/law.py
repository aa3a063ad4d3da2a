"""The loss of a trained model as a function of its size and its FLOPs, fitted to finished runs; and what a base is worth.

    L(N, C) = floor + size / N^size_power + data / D^data_power,   D = C / 6N

N is the number of parameters and D the number of samples (tokens) that C FLOPs pay for. Growing is described by what the
base is worth to the wide model, in FLOPs. Knows numbers only: no torch, no models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import product
from math import exp, fsum, hypot, inf, log, sqrt
from typing import Any, NamedTuple

from ..errors import Fault, raise_faults

FLOPS_PER_PARAMETER = 6
"""Of one sample, forward and backward: a multiplication and an addition in each of three matrix products."""
LEAST_RUNS, LEAST_SIZES = 6, 3
"""The law has five unknowns, so five runs fit it exactly and tell nothing about its error; two sizes fit any power."""
POWERS = tuple(i / 5 for i in range(1, 11))
AROUND = (tuple(i / 20 for i in range(-3, 4)), tuple(i / 80 for i in range(-3, 4)))
"""Exponents that are tried: fifths up to 2, then twentieths around the best, then eightieths."""


Terms = tuple[float, float, float, float, float]
"""Floor, size, its power, data, its power."""


class Finished(NamedTuple):
    """A run from scratch that was trained to the end of its schedule."""

    params: float
    flops: float
    loss: float


@dataclass(frozen=True)
class Law:
    """The fitted law, how far off it was on runs that it had not seen, and the sizes it was fitted to.

    >>> law = Law(1.5, 400, 0.35, 400, 0.3, spread=0.01, runs=9, params=(1e6, 1e8), flops=(1e15, 1e18))
    >>> round(law.loss(1e7, 1e17), 3), f"{law.flops_to(1e7, 3.0):.1e}"
    (3.604, '1.2e+20')
    """

    floor: float
    size: float
    size_power: float
    data: float
    data_power: float
    spread: float
    """Root mean square of log(predicted / measured), each budget predicted without its runs."""
    runs: int
    params: tuple[float, float]
    flops: tuple[float, float]

    def loss(self, params: float, flops: float) -> float:
        """The expected loss of a run from scratch."""
        if not flops:
            return inf
        seen = samples(params, flops)
        return float(self.floor + self.size / params**self.size_power + self.data / seen**self.data_power)

    def flops_to(self, params: float, loss: float) -> float:
        """FLOPs after which a run from scratch has a loss; infinite where it never has."""
        above = loss - self.floor - self.size / params**self.size_power
        if above <= 0:
            return inf
        return float(FLOPS_PER_PARAMETER * params * (self.data / above) ** (1 / self.data_power))


@dataclass(frozen=True)
class GrowthWorth:
    """What a base is worth: measured on grown runs and on bases that went on.

    A wide run from scratch would need C* FLOPs to be as good as the base. Growing with B FLOPs left is like starting
    from scratch with B + worth · C* · (C* / (C* + B))^fades: what the base knows counts less, the longer the wide run
    goes on. A finished base that goes on for B FLOPs is like one run of B + kept · spent FLOPs.
    """

    worth: float
    fades: float
    kept: float
    grown_spread: float
    stay_spread: float
    contrast: float
    """The error of log(loss of one arm / loss of another) in the same case, also without the runs of its budget."""
    runs: int
    times: float
    """The largest measured ratio of parameters, wide to base."""
    more: tuple[float, float]
    """Measured range of FLOPs after a finished base, over the base's own."""
    shares: tuple[float, ...]
    """Shares of a budget at which growth in mid-run was measured."""
    noise: tuple[float, float]
    """Range of t, the size of SignalNoise, among the best grown runs."""
    peak: tuple[float, float]
    """Range of their peak rates over the base's, both written at the reference."""

    def grown(self, law: Law, base: tuple[float, float], params: float, flops: float) -> float:
        """The expected loss of a base, given as (parameters, FLOPs), that is grown and trained for more FLOPs."""
        equal = law.flops_to(params, law.loss(*base)) if base[1] else 0.0
        credit = self.worth * equal * (equal / (equal + flops)) ** self.fades if equal else 0.0
        return law.loss(params, flops + credit)

    def gone_on(self, law: Law, base: tuple[float, float], flops: float, *, decayed: bool) -> float:
        """The expected loss of a base that is trained for more FLOPs at its own size."""
        params, spent = base
        return law.loss(params, flops + (self.kept if decayed else 1.0) * spent)


@dataclass(frozen=True)
class StoredLaw:
    """What the package knows: the law of its own runs, and growth."""

    about: str
    law: Law
    growth: GrowthWorth

    def to_json(self) -> str:
        """Six digits, which are the same on every machine."""
        return json.dumps(asdict(self, dict_factory=_rounded), indent=1) + "\n"


def stored() -> StoredLaw:
    """The fit that comes with the package; without runs it has empty ranges, so every size is outside them.

    >>> found = stored()
    >>> found.law.params[0] <= found.law.params[1]
    True
    """
    data = json.loads(files(__package__).joinpath("law.json").read_text("utf-8"))
    return StoredLaw(data["about"], Law(**_tuples(data["law"])), GrowthWorth(**_tuples(data["growth"])))


def samples(params: float, flops: float) -> float:
    """Samples (tokens) that FLOPs pay for.

    >>> samples(1e6, 6e12)
    1000000.0
    """
    return flops / (FLOPS_PER_PARAMETER * params)


def fit(runs: Sequence[Finished], where: str = "losses", least: int = LEAST_RUNS) -> Law:
    """The law with the smallest relative error; refused where the runs cannot determine it.

    >>> truth = Law(0.5, 40, 0.5, 90, 0.4, 0.0, 0, (0, 0), (0, 0))
    >>> sizes, budgets = (1e4, 4e4, 1.6e5), (1e11, 1e12, 1e13)
    >>> law = fit([Finished(n, c, truth.loss(n, c)) for n in sizes for c in budgets])
    >>> round(law.floor, 2), round(law.size_power, 2), round(law.data_power, 2), round(law.loss(2e4, 5e12) / truth.loss(2e4, 5e12), 3)
    (0.5, 0.5, 0.4, 1.0)
    """
    sizes = {run.params for run in runs}
    faults = []
    if len(runs) < least:
        what = f"{len(runs)} runs, expected {least} or more: the law has five unknowns"
        faults.append(
            Fault("advice.too_few_runs", where, what, "add (params, FLOPs, final loss) of more finished runs")
        )
    if len(sizes) < LEAST_SIZES:
        what = f"{len(sizes)} sizes of models, expected {LEAST_SIZES} or more"
        faults.append(Fault("advice.too_few_sizes", where, what, "add runs of another size"))
    if not any(_falls([run for run in runs if run.params == size]) for size in sizes):
        what = "the loss falls with FLOPs at no size"
        faults.append(
            Fault("advice.loss_does_not_fall", where, what, "pass losses at the end of each run's schedule")
        )
    raise_faults("no law of the loss can be fitted", faults)
    solved = _solve(runs)
    assert solved is not None
    _, constants = solved
    return Law(
        *constants,
        _spread(runs),
        len(runs),
        _range(run.params for run in runs),
        _range(run.flops for run in runs),
    )


def root_mean_square(errors: Sequence[float]) -> float:
    return hypot(*errors) / sqrt(len(errors)) if errors else inf


def _falls(runs: Sequence[Finished]) -> bool:
    in_order = sorted(runs, key=lambda run: run.flops)
    return in_order[-1].loss < in_order[0].loss


def _spread(runs: Sequence[Finished]) -> float:
    """The error on runs that a fit has not seen, a budget at a time; the last digit of a budget does not count."""
    groups: dict[int, list[Finished]] = {}
    for run in runs:
        groups.setdefault(round(10 * log(run.flops)), []).append(run)
    errors = []
    for left_out in groups.values():
        solved = _solve([run for run in runs if run not in left_out])
        if solved is not None:
            law = Law(*solved[1], 0.0, 0, (0, 0), (0, 0))
            errors += [log(law.loss(run.params, run.flops) / run.loss) for run in left_out]
    return root_mean_square(errors)


def _solve(runs: Sequence[Finished]) -> tuple[float, Terms] | None:
    """The error and (floor, size, size_power, data, data_power) of the best exponents."""
    if not runs:
        return None
    middle = exp(fsum(log(run.params) for run in runs) / len(runs))
    seen = exp(fsum(log(samples(run.params, run.flops)) for run in runs) / len(runs))

    def tried(powers: Iterable[tuple[float, float]]) -> Iterator[tuple[float, Terms]]:
        for a, b in powers:
            rows = [
                [
                    1 / r.loss,
                    (middle / r.params) ** a / r.loss,
                    (seen / samples(r.params, r.flops)) ** b / r.loss,
                ]
                for r in runs
            ]
            for error, (floor, size, data) in _nonnegative(rows):
                yield error, (floor, size * middle**a, a, data * seen**b, b)

    best = min(tried(product(POWERS, POWERS)), default=None)
    for steps in AROUND:
        if best is not None:
            _, _, a, _, b = best[1]
            best = min(tried((a + da, b + db) for da, db in product(steps, steps)), default=best)
    return best


def _nonnegative(rows: list[list[float]]) -> Iterator[tuple[float, tuple[float, float, float]]]:
    """Least squares towards 1 with the floor, the size term or both left out; only solutions that are not negative."""
    for used in ((0, 1, 2), (1, 2), (0, 2), (2,)):
        kept = [[row[i] for i in used] for row in rows]
        square = [[fsum(row[i] * row[j] for row in kept) for j in range(len(used))] for i in range(len(used))]
        found = _linear(square, [fsum(row[i] for row in kept) for i in range(len(used))])
        if found is None or min(found) < 0 or not found[-1]:
            continue
        error = root_mean_square([fsum(x * y for x, y in zip(row, found, strict=True)) - 1 for row in kept])
        whole = dict(zip(used, found, strict=True))
        yield error, (whole.get(0, 0.0), whole.get(1, 0.0), whole[2])
        if len(used) == len(rows[0]):
            return


def _linear(square: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss elimination of at most three equations; None where they depend on each other."""
    rows = [[*row, value] for row, value in zip(square, right, strict=True)]
    for i in range(len(rows)):
        pivot = max(range(i, len(rows)), key=lambda row: abs(rows[row][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) < 1e-12 * abs(square[i][i]):
            return None
        for j in range(len(rows)):
            if j != i:
                factor = rows[j][i] / rows[i][i]
                rows[j] = [x - factor * y for x, y in zip(rows[j], rows[i], strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]


def _range(values: Iterator[float]) -> tuple[float, float]:
    known = tuple(values)
    return min(known), max(known)


def _rounded(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    def short(value: Any) -> Any:
        if isinstance(value, tuple):
            return [short(each) for each in value]
        return float(f"{value:.6g}") if isinstance(value, float) else value

    return {name: short(value) for name, value in pairs}


def _tuples(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
