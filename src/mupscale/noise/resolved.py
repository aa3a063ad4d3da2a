"""Resolved noise: one reference constant σ̄ and one absolute size per tensor, written to a record and read from it.

The absolute size is σ̄ · fold · q with q from `rules/sizes.py`; nothing here knows a power of the width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from ..errors import MupscaleError
from ..files.strict import refuse_malformed
from ..frozen import freeze_mappings
from ..plans.plan import Plan
from ..plans.tensor_plan import TensorPlan
from ..rules.scale import ONE, Scale
from ..rules.sizes import noise_size, size_of_ratios
from ..tensors.noise import TensorNoise, Waking
from ..tensors.philox import Stream
from .kinds import Sigma
from .measures import wide_row


@dataclass(frozen=True)
class ResolvedNoise:
    """The noise of one tensor. σ̄ is written at the reference, so it transfers across widths."""

    sigma: Sigma | None = None
    """σ̄ of the copies, or of a new tensor; None if they get no noise."""
    paired: int | None = None
    """The dimension along which the noise sums to zero over copies."""
    split: int | None = None
    """The dimension along which each entry goes whole to one of its copies."""
    apart: int | None = None
    """The dimension along which all units have the same noise: the rows of a router, whose copies part along one hyperplane."""
    without_row: int | None = None
    """The padding row of an embedding, which gets no noise."""
    woken: Sigma | None = None
    """σ̄ of the zeros behind copies; 0 for gains, which get a level; None where zeros get what copies get."""
    copied: bool = False
    """Whether zeros become copies of trained units besides their noise."""
    mean: tuple[float, ...] | None = None
    """The mean row of a table of the base, which its new words become. Of a gain, one number: its root mean square."""
    repeats: bool = False
    """Whether a new tensor becomes a copy of the one that it is like, before it gets noise."""
    std: Sigma = 0.0
    """The absolute size that follows from σ̄."""
    zeros: Waking | None = None
    """What the zeros behind copies get, which follows from `woken` and `mean`."""


@dataclass(frozen=True)
class NoisePlan:
    """The noise of every tensor that gets any, and the seed that it is drawn with."""

    tensors: Mapping[str, ResolvedNoise]
    seed: int = 0
    without: tuple[str, ...] = ()
    """Tensors that grow and get no noise although they are not vectors: frozen ones, and what a scheme leaves out."""

    def __post_init__(self) -> None:
        freeze_mappings(self)

    def tensor(self, name: str) -> TensorNoise | None:
        """The noise of one tensor, or None."""
        one = self.tensors.get(name)
        if one is None or (one.std == 0 and one.zeros is None and one.split is None):
            return None
        return TensorNoise(
            Stream(self.seed, name), one.std, one.paired, one.without_row, one.zeros, one.split, one.apart
        )

    def woken(self, name: str, entry: TensorPlan) -> TensorPlan:
        """How a tensor is made with this noise: a new one that wakes as a copy has the source of the tensor it is like.

        Weights alone are made by it. To an optimizer the tensor is new, and has no state.
        """
        return (
            entry.woken_as_copy() if (one := self.tensors.get(name)) and one.repeats and entry.new else entry
        )

    def as_json(self) -> dict[str, Any]:
        """What `restore_noise` needs to draw the same bits again."""
        stored = {
            key: {
                name: list(value) if field == "mean" else value
                for name, one in self.tensors.items()
                if (value := getattr(one, field)) is not None and value is not False
            }
            for key, (field, _) in _STORED.items()
        }
        kept = {key: values for key, values in stored.items() if values or key not in _OPTIONAL}
        return {"seed": self.seed, "without": list(self.without), **kept}


def restore_noise(record: Mapping[str, Any], plan: Plan, since: Plan | None = None) -> NoisePlan:
    """The noise that `NoisePlan.as_json` recorded, for the same plan and reference: the same bits.

    >>> from mupscale import MupNoise
    >>> from mupscale.diagnostics import resolve_noise
    >>> from mupscale.plans import TensorPlan
    >>> from mupscale.rules import Axis
    >>> plan = Plan({"w": TensorPlan(("w",), (Axis.parse("out: 2x2"), Axis.parse("in: 2x2")))})
    >>> noise = resolve_noise({}, MupNoise(0.3), plan=plan, seed=1)
    >>> restore_noise(noise.as_json(), plan) == noise
    True
    """
    with refuse_malformed(
        "this is not a record of noise, expected what as_json gave", "noise.malformed_record"
    ):
        fields: dict[str, dict[str, Any]] = {}
        for key, (field, read) in _STORED.items():
            for name, value in (record.get(key, {}) if key in _OPTIONAL else record[key]).items():
                fields.setdefault(name, {})[field] = read(value)
        if unknown := [name for name in fields if name not in plan.tensors]:
            raise MupscaleError(
                f"the record has noise for {unknown[0]}, which the plan does not have; use the plan it was made for",
                code="noise.record_of_other_plan",
            )
        tensors = {name: sized(ResolvedNoise(**found), name, plan, since) for name, found in fields.items()}
        return NoisePlan(tensors, int(record["seed"]), tuple(record["without"]))


def _sigma(value: Any) -> Sigma:
    return tuple(map(float, value)) if isinstance(value, (list, tuple)) else float(value)


_STORED: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "sigmas": ("sigma", _sigma),
    "paired": ("paired", int),
    "rows": ("without_row", int),
    "woken": ("woken", _sigma),
    "split": ("split", int),
    "apart": ("apart", int),
    "copied": ("copied", bool),
    "repeats": ("repeats", bool),
    "means": ("mean", lambda row: tuple(map(float, row))),
}
"""Key of a record, with values by tensor -> the field of `ResolvedNoise`, and how it is read."""
_OPTIONAL = ("woken", "split", "apart", "copied", "repeats", "means")
"""Keys that records of noise that is added to copies do not have."""


def sized(one: ResolvedNoise, name: str, plan: Plan, since: Plan | None) -> ResolvedNoise:
    """The noise of a tensor with the absolute sizes that follow from its σ̄.

    Zeros get noise, and besides it what the `Sleep` of their tensor says: the fold of a gain, which is 1 in a fresh model,
    the root mean square of the base's entries, or its mean row. A gain that is copied has no level: its fold is in s.
    """
    entry, zeros = plan[name].woken_as_copy() if one.repeats else plan[name], None
    size = float(reference_size(entry, since))
    if one.woken is not None:
        sleep, level, row = entry.sleep, 0.0, None
        if one.copied and sleep.becomes != "mean":
            pass
        elif sleep.becomes == "fold":
            early = ONE if since is None else since[entry.sources[0]].fold
            level = float(early * entry.fold) - entry.shift
        elif sleep.becomes == "typical" and one.mean is not None:
            level = one.mean[0] * float(entry.change.s)
        elif one.mean is not None:
            row = wide_row(entry, one.mean)
        zeros = Waking(_times(one.woken, size), sleep.cut, level, row, one.copied)
    return replace(one, std=0.0 if one.sigma is None else _times(one.sigma, size), zeros=zeros)


def _times(sigma: Sigma, size: float) -> Sigma:
    return sigma * size if isinstance(sigma, float) else tuple(s * size for s in sigma)


def reference_size(entry: TensorPlan, since: Plan | None) -> Scale:
    """fold · q of a wide tensor, counted from the reference."""
    if since is None:
        return noise_size(entry.axes, entry.fold)
    early = since[entry.sources[0] if entry.like is None else entry.like]
    pairs = [
        (a.role or b.role, Fraction(b.wide, a.base))
        for a, b in zip(early.axes, entry.axes, strict=True)
        if a.role or b.role
    ]
    return size_of_ratios(pairs, early.fold * entry.fold)
