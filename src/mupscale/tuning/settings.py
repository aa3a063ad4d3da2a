"""What a study is: everything that decides its results, as a value that all its workers must share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from typing import Any, Literal

from ..arguments import wrong_whole
from ..errors import Fault, raise_faults
from ..training.noises import SCHEMES
from .grid import Point, points_of
from .halving import Agenda, Ladder, Results, grid_agenda, sampled_agenda
from .tpe import propose

Sampler = Literal["grid", "tpe"]
NOISES = (0.0, 0.05, 0.1, 0.2, 0.4)
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
RUNGS = (0.0625, 0.5)
_LEAST = {
    "width": 1, "k": 2, "steps": 1, "wide_steps": 1, "reference": 1, "extend": 0, "generations": 0,
}  # fmt: skip
"""The smallest whole number that each setting may be; None stands for one that follows from the others."""


@dataclass(frozen=True)
class Settings:
    """The two sweeps of a study. Two workers with unequal settings do not share one.

    >>> settings = Settings(width=32, k=4, steps=100, lrs=(0.001, 0.002, 0.004))
    >>> len(settings.base_agenda({}).open), settings.wide_ladder.rungs
    (3, (10, 50, 100))
    """

    width: int
    k: int
    steps: int
    lrs: tuple[float, ...]
    """The learning rates of the proxy base, at the reference."""
    reference: int | None = None
    """The width at which constants are written down; None: that of the proxy base."""
    wide_steps: int | None = None
    noises: tuple[float, ...] = NOISES
    scheme: str = "t"
    factors: tuple[float, ...] = FACTORS
    """The learning rates after growth, as multiples of the base's best."""
    halving: bool = True
    rungs: tuple[float, ...] = RUNGS
    keep: float = 0.5
    extend: int = 2
    sampler: Sampler = "grid"
    generations: int = 3
    """How many generations TPE proposes after the first, each as large as the learning rates are many."""
    seed: int = 0
    control_at_base: bool = True
    """Zero noise runs at the base's width: by the theorem it is the same run for a fraction of the cost."""
    batch: int | None = None
    optimizer: str = ""
    constants: str = ""
    """Reference constants beside the learning rate, as text."""
    proxy: str = ""
    """What tells the user's file from another."""

    def __post_init__(self) -> None:
        raise_faults("this study cannot be run", self._faults())

    def _faults(self) -> list[Fault]:
        faults: list[Fault] = []
        for key, least in _LEAST.items():
            value = getattr(self, key)
            if value is not None:
                faults += wrong_whole(key, value, least=least)
        for key, given in (("lrs", "0.001,0.002,0.004"), ("factors", "0.5,1,2")):
            line = getattr(self, key)
            if not line or not all(isfinite(v) and v > 0 for v in line) or len(set(line)) < len(line):
                what = f"{line}, expected one or more different numbers above 0"
                faults.append(Fault(key, what, f"write {given}, say"))
        if not all(isfinite(v) and v >= 0 for v in self.noises) or not any(self.noises):
            what = f"{self.noises}, expected numbers of 0 or more, one of them above 0"
            faults.append(Fault("noises", what, "write 0.05,0.1,0.2, say"))
        if not all(0 < v < 1 for v in self.rungs) or not 0 < self.keep < 1:
            what = f"rungs {self.rungs}, keep {self.keep}, expected fractions between 0 and 1"
            faults.append(Fault("halving", what, f"write rungs={RUNGS}, keep=0.5"))
        for key, known in (("scheme", tuple(SCHEMES)), ("sampler", ("grid", "tpe"))):
            if getattr(self, key) not in known:
                what = f"{getattr(self, key)!r}, expected one of {', '.join(map(repr, known))}"
                faults.append(Fault(key, what, f"write {key}={known[0]!r}"))
        return faults

    @property
    def at(self) -> int:
        """The width of the reference."""
        return self.width if self.reference is None else self.reference

    @property
    def after(self) -> int:
        """Steps after growth."""
        return self.steps if self.wide_steps is None else self.wide_steps

    @property
    def base_ladder(self) -> Ladder:
        return Ladder.of(self.steps, self.rungs if self.halving else (), self.keep)

    @property
    def wide_ladder(self) -> Ladder:
        return Ladder.of(self.after, self.rungs if self.halving else (), self.keep)

    def base_agenda(self, results: Results) -> Agenda:
        """The first sweep: the learning rate of the proxy base."""
        return self._agenda(self.lrs, (None,), results, self.base_ladder)

    def wide_agenda(self, best: Point, results: Results) -> Agenda:
        """The second sweep: noise and learning rate of the upscaled proxy, zero noise always among them."""
        rates = tuple(best.lr * factor for factor in self.factors)
        noises = tuple(dict.fromkeys((0.0, *sorted(self.noises))))
        return self._agenda(rates, noises, results, self.wide_ladder)

    def _agenda(
        self, lrs: tuple[float, ...], noises: tuple[float | None, ...], results: Results, ladder: Ladder
    ) -> Agenda:
        if self.sampler == "grid":
            return grid_agenda(lrs, noises, results, ladder, self.extend)
        first = points_of(lrs, (noises[0],))
        if noises[0] is not None:
            first += propose(-1, {}, count=len(lrs), lrs=lrs, noises=noises, seed=self.seed)
        more = partial(propose, count=len(lrs), lrs=lrs, noises=noises, seed=self.seed)

        def on_edge(best: Point) -> bool:
            """Whether it lies within a sixth of an end of the range: a sampler does not hit the end itself."""
            lines = ((best.lr, lrs), (best.noise, [noise for noise in noises if noise]))
            return any(
                value and line and not 1.2 * min(line) < value < max(line) / 1.2 for value, line in lines
            )

        return sampled_agenda(first, more, self.generations, results, ladder, on_edge)

    def as_json(self) -> dict[str, Any]:
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}


def check_same(ours: Settings, theirs: Mapping[str, Any]) -> None:
    """Raise unless the study was begun with these settings."""
    mine = ours.as_json()
    remedy = "give the same settings to every worker, or another study name and folder to start anew"
    faults = [
        Fault(key, f"the study has {theirs.get(key)!r}, this worker {mine.get(key)!r}", remedy)
        for key in sorted({*mine, *theirs})
        if theirs.get(key) != mine.get(key)
    ]
    raise_faults("this study was begun with other settings", faults)
