"""What is known of growing, as numbers: how far each way ends above or below going on, fitted to stored runs.

    growing    offset + grow · log(samples left per parameter of the base)
    a new one  offset + scratch · log(samples left per parameter of the base) + share · share of all FLOPs that the base has had

Either is log(loss of the way / loss of going on) for MLPs, and nats for Llamas. Samples left are those that the base would
still see. A way has an offset for each kind of model; grow, scratch and share are the same for all of them.
`harness/frontier_store.py` makes the fit. Knows numbers only: no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.resources import files
from math import expm1, log
from typing import Any, Literal

FLOPS_PER_PARAMETER = 6
"""Of one sample, forward and backward: a multiplication and an addition in each of three matrix products."""
REACH = 1.05
"""How far beyond the measured range the law is used: people write 124e6 for 124,439,808, and no more than that is meant."""

Range = tuple[float, float]
"""The smallest and the largest measured value."""


@dataclass(frozen=True)
class Span:
    """Where a way was measured: samples left per parameter of the base, and the share of FLOPs that the base has had."""

    samples: Range
    share: Range


@dataclass(frozen=True)
class Way:
    """One way to go on with a base, in one kind of model."""

    name: str
    kind: Literal["grow", "scratch"]
    offset: float
    error: float | None
    """Root mean square of predicted - measured, each case predicted without itself; None if it was measured once."""
    cases: int
    times: Range
    """Parameters that a sample passes, over those of the base."""
    peak: Range
    """The peak of the rate over that of the base."""
    width: bool
    """Whether it makes the model wider; else deeper, or it adds experts."""
    finished: Span | None
    """Where it was measured on bases whose schedule had ended."""
    going: Span | None
    """Where it was measured in the place of a run at the base's size."""

    @property
    def within(self) -> float | None:
        """Half of the interval: two errors, and more where few cases know the error."""
        return None if self.error is None else (2 + 4 / self.cases) * self.error


@dataclass(frozen=True)
class Measured:
    """What was measured on one kind of model."""

    about: str
    unit: Literal["per cent", "nats"]
    params: Range
    """Of bases."""
    ways: tuple[Way, ...]

    def shown(self, difference: float) -> float:
        """A difference in the unit of this kind.

        >>> round(Measured("", "per cent", (0, 0), ()).shown(-0.1), 6), Measured("", "nats", (0, 0), ()).shown(-0.1)
        (-9.516258, -0.1)
        """
        return 100 * expm1(difference) if self.unit == "per cent" else difference


@dataclass(frozen=True)
class Law:
    """Everything that was measured, by kind of model."""

    grow: float
    scratch: float
    share: float
    kinds: dict[str, Measured]

    def difference(self, way: Way, samples: float, share: float) -> float:
        """How far a way ends above going on; below zero it ends lower."""
        if way.kind == "grow":
            return way.offset + self.grow * log(samples)
        return way.offset + self.scratch * log(samples) + self.share * share

    def to_json(self) -> str:
        """Six digits, which are the same on every machine."""
        return json.dumps(_rounded(asdict(self)), indent=1) + "\n"


def stored() -> Law:
    """The fit that comes with the package.

    >>> sorted(stored().kinds)
    ['llama', 'mlp']
    """
    return law_of(json.loads(files(__package__).joinpath("law.json").read_text("utf-8")))


def law_of(data: dict[str, Any]) -> Law:
    """The law that `Law.to_json` wrote."""
    kinds = {
        name: Measured(**{**_tuples(kind), "ways": tuple(_way(way) for way in kind["ways"])})
        for name, kind in data["kinds"].items()
    }
    return Law(**{**data, "kinds": kinds})


def samples(params: float, flops: float) -> float:
    """Samples (tokens) that FLOPs pay for.

    >>> samples(1e6, 6e12)
    1000000.0
    """
    return flops / (FLOPS_PER_PARAMETER * params)


def range_of(values: Iterable[float]) -> Range:
    known = tuple(values)
    return min(known), max(known)


def inside(value: float, measured: Range) -> bool:
    """Whether a value is in a measured range, or beyond it by no more than people round."""
    low, high = measured
    return low / REACH <= value <= high * REACH


def _way(entry: dict[str, Any]) -> Way:
    spans = {name: Span(**_tuples(entry[name])) if entry[name] else None for name in ("finished", "going")}
    return Way(**{**_tuples(entry), **spans})


def _tuples(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
