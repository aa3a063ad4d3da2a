"""Resolved noise: one reference constant σ̄ and one absolute size per tensor, written to a record and read from it.

The absolute size is σ̄ · fold · q with q from `rules/sizes.py`; nothing here knows a power of the width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from ..errors import MupscaleError
from ..files.strict import refuse_malformed
from ..frozen import freeze_mappings
from ..plans.plan import Plan
from ..rules.scale import ONE, Scale
from ..rules.sizes import noise_size, size_of_ratios
from ..tensors.noise import TensorNoise, Waking
from ..tensors.philox import Stream
from .kinds import Sigma
from .measures import wide_row


@dataclass(frozen=True)
class NoisePlan:
    """Resolved noise: σ̄ and absolute size per tensor. σ̄ is written at the reference, so it transfers across widths."""

    sigmas: Mapping[str, Sigma]
    stds: Mapping[str, Sigma]
    paired: Mapping[str, int] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    """Tensors that grow and get no noise although they are no vectors: frozen ones, and what a scheme leaves out."""
    seed: int = 0
    rows: Mapping[str, int] = field(default_factory=dict)
    """Embedding -> the row that gets no noise, its padding."""
    woken: Mapping[str, Sigma] = field(default_factory=dict)
    """σ̄ of the zeros behind copies, where it is not that of the copies; 0 for gains, which get a level."""
    zeros: Mapping[str, Waking] = field(default_factory=dict)
    """What follows from it, by tensor."""
    means: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """The mean row of the base's tables that get new words: what the new rows become. Of a gain, the root of its mean square."""

    def __post_init__(self) -> None:
        freeze_mappings(self)

    def tensor(self, name: str) -> TensorNoise | None:
        """The noise of one tensor, or None."""
        std, zeros = self.stds.get(name, 0.0), self.zeros.get(name)
        if std == 0 and zeros is None:
            return None
        return TensorNoise(Stream(self.seed, name), std, self.paired.get(name), self.rows.get(name), zeros)

    def as_json(self) -> dict[str, Any]:
        """What `restore_noise` needs to draw the same bits again."""
        return {
            "seed": self.seed,
            "sigmas": dict(self.sigmas),
            "paired": dict(self.paired),
            "without": list(self.without),
            "rows": dict(self.rows),
            **({"woken": dict(self.woken)} if self.woken else {}),
            **({"means": {name: list(row) for name, row in self.means.items()}} if self.means else {}),
        }


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
        sigmas = {name: _stored(value) for name, value in record["sigmas"].items()}
        unknown = [name for name in (*sigmas, *record.get("woken", {})) if name not in plan.tensors]
        if unknown:
            raise MupscaleError(
                f"the record has noise for {unknown[0]}, which the plan does not have; use the plan it was made for",
                code="noise.record_of_other_plan",
            )
        woken = {name: _stored(value) for name, value in record.get("woken", {}).items()}
        stds = {name: std_of(sigma, reference_size(name, plan, since)) for name, sigma in sigmas.items()}
        paired = {str(name): int(dim) for name, dim in record["paired"].items()}
        rows = {str(name): int(row) for name, row in record["rows"].items()}
        seed, without = int(record["seed"]), tuple(record["without"])
        means = {str(name): tuple(map(float, row)) for name, row in record.get("means", {}).items()}
        zeros = wakings(woken, means, plan, since)
        return NoisePlan(sigmas, stds, paired, without, seed, rows, woken, zeros, means)


def _stored(value: Any) -> Sigma:
    return tuple(map(float, value)) if isinstance(value, (list, tuple)) else float(value)


def std_of(sigma: Sigma, size: Scale) -> Sigma:
    return sigma * float(size) if isinstance(sigma, float) else tuple(s * float(size) for s in sigma)


def reference_size(name: str, plan: Plan, since: Plan | None) -> Scale:
    """fold · q of a wide tensor, counted from the reference."""
    entry = plan[name]
    if since is None:
        return noise_size(entry.axes, entry.fold)
    early = since[entry.sources[0] if entry.like is None else entry.like]
    pairs = [
        (a.role or b.role, Fraction(b.wide, a.base))
        for a, b in zip(early.axes, entry.axes, strict=True)
        if a.role or b.role
    ]
    return size_of_ratios(pairs, early.fold * entry.fold)


def wakings(
    woken: Mapping[str, Sigma], means: Mapping[str, tuple[float, ...]], plan: Plan, since: Plan | None
) -> dict[str, Waking]:
    """What the zeros of each tensor get: noise of their size, of a gain its fold, which is 1 in a fresh model, or what is typical
    of the base's, or the mean row."""
    found = {}
    for name, sigma in woken.items():
        entry, level = plan[name], 0.0
        if entry.gain:
            early = ONE if since is None else since[entry.sources[0]].fold
            level = float(early * entry.fold) - entry.shift
        elif entry.typical and name in means:
            level = means[name][0] * float(entry.change.s)
        row = wide_row(entry, means[name]) if name in means and not entry.typical else None
        found[name] = Waking(std_of(sigma, reference_size(name, plan, since)), entry.cut, level, row)
    return found
