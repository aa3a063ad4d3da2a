"""The settings of a study: everything that decides its results, as a value that all its workers must share."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from ..arguments import shown, wrong_whole
from ..errors import Fault, MupscaleError, raise_faults
from ..rules.schemes import SCHEMES, STUDIED, UNITS
from .agenda.halving import Ladder

if TYPE_CHECKING:
    from .proxy import Proxy

_log = logging.getLogger(__name__)
RUNGS = (0.0625, 0.5)
_LEAST = {
    "width": 1, "k": 2, "steps": 1, "wide_steps": 1, "reference": 1, "extend": 0,
}  # fmt: skip
"""The smallest whole number that each setting may be; None stands for one that follows from the others."""
_NOISES = (0.0, 0.05, 0.1, 0.2, 0.4)
"""The sizes of noise that are tried unless others are given."""
_EXAMPLES = {
    "lrs": "0.001,0.002,0.004", "noises": "0.05,0.1,0.2", "factors": "0.5,1,2", "rungs": "0.0625,0.5",
}  # fmt: skip
"""What to write for each list of numbers."""
_RATES: Mapping[str, tuple[int, int]] = {
    "torch.optim.Adam": (-11, -5),
    "torch.optim.AdamW": (-11, -5),
    "torch.optim.SGD": (-7, -1),
}
"""Powers of two that span the default learning rates of a proxy base, by optimizer."""


@dataclass(frozen=True)
class Settings:
    """The two sweeps of a study. Two workers with unequal settings do not share one.

    Args:
        width: The width of the small base, in units; 100 or more transfer best.
        k: How many times wider the grown one is, 2 or more.
        steps: Training steps of the small base.
        wide_steps: Training steps after growth; by default as many.
        reference: The width at which constants are written down; by default the small base's. For a target that was trained
            without μP, the target's.
        lrs: Learning rates of the small base, at the reference; by default a range that suits the optimizer.
        noises: Sizes of noise, with which it grows by copies; zero is always included. None for new units, which have none.
        scheme: What the sizes are: "t", "sigma", "paired" or "rise"; "units" without sizes. By default "t" if there are sizes.
        factors: Learning rates after growth, as multiples of the base's best.
        halving: Whether runs are compared on their way and the worse ones end.
        rungs: At which fractions of the steps they are compared.
        keep: The fraction of the runs that continue after a comparison.
        extend: How often the grid may be extended beyond an edge.
        seed: The seed of initialisation and noise.
        control_at_base: Whether zero noise is run at the base's width, which by the theorem is the same run for a fraction of
            the cost.
        stay: Whether the base's width is also trained for as many FLOPs, which shows whether growing beats not growing.
        batch: The batch size. This and what follows are filled in from the proxy.
        optimizer: The full name of the optimizer's class.
        constants: Reference constants other than the learning rate, as text.
        proxy: The digest of the user's file or functions.
        flops: FLOPs of a step at the base's width and at k times it, where the proxy can count them.

    Raises:
        MupscaleError: If a setting cannot be used.

    >>> settings = Settings(width=32, k=4, steps=100, lrs=[0.001, 0.002, 0.004])
    >>> settings.after, settings.wide_ladder.rungs
    (100, (10, 50, 100))
    """

    width: int
    k: int
    steps: int
    wide_steps: int | None = None
    reference: int | None = None
    lrs: Sequence[float] | None = None
    noises: Sequence[float] | None = None
    scheme: str = ""
    factors: Sequence[float] = (0.25, 0.5, 1.0, 2.0, 4.0)
    halving: bool = True
    rungs: Sequence[float] = RUNGS
    keep: float = 0.5
    extend: int = 2
    seed: int = 0
    control_at_base: bool = True
    stay: bool = True
    batch: int | None = None
    optimizer: str = ""
    constants: str = ""
    proxy: str = ""
    flops: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not self.scheme:
            given = UNITS.name if self.noises is None else next(iter(SCHEMES))
            object.__setattr__(self, "scheme", given)
        if self.noises is None:
            object.__setattr__(self, "noises", (1.0,) if self.by_units else _NOISES)
        faults = []
        for key in _EXAMPLES:
            value = getattr(self, key)
            try:
                if isinstance(value, str):  # its letters would be taken for its members
                    raise TypeError
                numbers = None if value is None and key == "lrs" else tuple(map(float, value))
            except (TypeError, ValueError):
                faults.append(
                    Fault(
                        "study.not_numbers",
                        key,
                        f"it is {shown(value)}, expected numbers",
                        f"write {key}=[{_EXAMPLES[key]}]",
                    )
                )
            else:
                object.__setattr__(self, key, numbers)
        raise_faults("this study cannot be run", faults or self._faults())
        if self.reference == self.width:  # the default, written out
            object.__setattr__(self, "reference", None)

    def _faults(self) -> list[Fault]:
        faults: list[Fault] = []
        for key, least in _LEAST.items():
            value = getattr(self, key)
            if value is not None:
                faults += wrong_whole(key, value, least=least)
        sizes = tuple(self.noises or ())
        for key in ("lrs", "factors"):
            line = getattr(self, key)
            if line is None:
                continue
            if not line or not all(isfinite(v) and v > 0 for v in line) or len(set(line)) < len(line):
                what = f"{line}, expected one or more different numbers above 0"
                faults.append(
                    Fault("study.not_positive_numbers", key, what, f"write {_EXAMPLES[key]}, for example")
                )
        if self.by_units and sizes != (1.0,):
            what = f"{sizes}, and new units have no noise to tune"
            remedy = 'leave it out, or write scheme="t" (--by copies) for copies and noise'
            faults.append(Fault("study.units_without_noise", "noises", what, remedy))
        elif not all(isfinite(v) and v >= 0 for v in sizes) or not any(sizes):
            what = f"{sizes}, expected numbers of 0 or more, one of them above 0"
            faults.append(
                Fault("study.not_noise_sizes", "noises", what, f"write {_EXAMPLES['noises']}, for example")
            )
        if not all(0 < v < 1 for v in self.rungs) or not 0 < self.keep < 1:
            what = f"rungs {self.rungs}, keep {self.keep}, expected fractions between 0 and 1"
            faults.append(Fault("study.not_fractions", "halving", what, f"write rungs={RUNGS}, keep=0.5"))
        if self.scheme not in STUDIED:
            what = f"{self.scheme!r}, expected one of {', '.join(map(repr, STUDIED))}"
            faults.append(
                Fault("study.unknown_choice", "scheme", what, f"write scheme={next(iter(STUDIED))!r}")
            )
        largest = STUDIED[self.scheme].largest if self.scheme in STUDIED else inf
        if not self.by_units and any(v > largest for v in sizes):
            what = f"{sizes}, expected at most {largest:g} with the scheme {self.scheme!r}"
            faults.append(
                Fault("study.noise_above_scheme", "noises", what, f"write {_EXAMPLES['noises']}, for example")
            )
        return faults

    def for_proxy(self, proxy: Proxy) -> Settings:
        """These settings with what the proxy decides: its batch, optimizer and code, and default learning rates.

        A study compares them too, so that a worker with another proxy cannot join it.

        Args:
            proxy: The proxy.
        """
        return replace(
            self,
            lrs=self.lrs if self.lrs is not None else _usual_rates(proxy.optimizer_name),
            batch=proxy.batch,
            optimizer=proxy.optimizer_name,
            constants=repr(sorted(proxy.settings.items())),
            proxy=proxy.digest,
            flops=self._flops(proxy),
        )

    def _flops(self, proxy: Proxy) -> tuple[int, int] | None:
        if proxy.flops is None:
            return None
        try:
            return proxy.flops(self.width), proxy.flops(self.k * self.width)
        except MupscaleError as error:
            _log.warning("the FLOPs of a step are not known: %s [%s]", error.claim, error.code)
            return None

    @property
    def by_units(self) -> bool:
        """Whether the proxy grows by new units, so that rates alone are tuned."""
        return self.scheme == UNITS.name

    @property
    def sizes(self) -> tuple[float, ...]:
        """The sizes of noise besides zero: 1 for new units."""
        return tuple(size for size in self.noises or () if size)

    @property
    def at(self) -> int:
        """The width of the reference."""
        return self.width if self.reference is None else self.reference

    @property
    def after(self) -> int:
        """Steps after growth."""
        return self.steps if self.wide_steps is None else self.wide_steps

    @property
    def stay_steps(self) -> int | None:
        """Steps at the base's width that cost as much as those after growth; None where that run is left out or unknown.

        >>> Settings(width=8, k=2, steps=100, flops=(10, 35)).stay_steps
        350
        """
        if not self.stay or self.flops is None:
            return None
        narrow, wide = self.flops
        return round(self.after * wide / narrow)

    @property
    def base_ladder(self) -> Ladder:
        """At which steps runs of the first sweep are compared."""
        return Ladder.of(self.steps, self.rungs if self.halving else (), self.keep)

    @property
    def wide_ladder(self) -> Ladder:
        """At which steps runs of the second sweep are compared."""
        return Ladder.of(self.after, self.rungs if self.halving else (), self.keep)

    def as_json(self) -> dict[str, Any]:
        """The settings as plain values."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}


def _usual_rates(optimizer: str) -> tuple[float, ...]:
    if optimizer not in _RATES:
        raise MupscaleError(
            f"there is no default range of learning rates for {optimizer}; write lrs, each twice the one before "
            "(--lrs 0.001,0.002,0.004)",
            code="study.no_usual_rates",
        )
    low, high = _RATES[optimizer]
    return tuple(2.0**power for power in range(low, high + 1))


def stored_settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a study keeps, without those of the sampler that 0.2.0 had; raises if it was not the grid.

    >>> stored_settings({"width": 8, "sampler": "grid", "generations": 3})
    {'width': 8}
    """
    found = dict(stored)
    sampler, _ = found.pop("sampler", "grid"), found.pop("generations", None)
    if sampler != "grid":
        raise MupscaleError(
            f"this study was begun with --sampler {sampler}, which 0.2.0 had; start a new study, in another folder or by "
            "another name",
            code="study.sampled",
        )
    return found


def check_same(ours: Settings, begun: Mapping[str, Any]) -> None:
    """Raise unless the study was begun with these settings."""
    mine, theirs = ours.as_json(), stored_settings(begun)
    remedy = "give the same settings to every worker, or another study name and folder to start anew"
    faults = [
        Fault(
            "study.other_settings",
            key,
            f"the study has {theirs.get(key)!r}, this worker {mine.get(key)!r}",
            remedy,
        )
        for key in sorted({*mine, *theirs})
        if theirs.get(key) != mine.get(key)
    ]
    raise_faults("this study was begun with other settings", faults)
