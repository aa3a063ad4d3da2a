"""How a model came to be: the history of its growths, one frozen value for runs, directories, headers and checkpoints.

Knows what a growth records, the form in which it is stored, and the forms of 0.2.0, which had no number. Does not
know who grows, and opens no file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ..errors import MupscaleError
from ..files.strict import refuse_malformed
from ..frozen import FrozenDict
from ..plans.plan import Plan
from ..version import __version__

VERSION = 1
BASE_ITSELF = "the base itself"
"""The reference of a growth whose base was not grown before."""
_MALFORMED = "this is not a provenance, expected what as_json gave"
_LOADED = ("source", "bytes", "messages", "beside", "moments")
_RECIPE_TABLES = ("format", "tensors", "tried", "sigma")


def reference_of(since: Plan | None) -> str:
    """How a growth names the reference of its base: by the plan that leads from there to the base."""
    return BASE_ITSELF if since is None else since.hash


@dataclass(frozen=True, kw_only=True)
class Growth:
    """One growth: the plan, what proved it, its noise, what came with it. What is not known, or was not done, is None or empty.

    >>> growth = Growth(plan="8a1c", noise={"kind": "MupNoise", "seed": 3}, seed=3)
    >>> growth.noise["kind"], growth.reference, growth.lr
    ('MupNoise', 'the base itself', None)
    >>> growth.noise["seed"] = 4
    Traceback (most recent call last):
        ...
    TypeError: this mapping belongs to a frozen value and cannot be changed; dict(…) makes a copy that can
    """

    plan: str | None
    """The hash of the plan. 0.2.0 did not record it for runs that were widened without noise."""
    reference: str | None = BASE_ITSELF
    """The hash of the plan from the reference to the base, or "the base itself"."""
    proof: Mapping[str, Any] = field(default_factory=dict)
    """What proved the plan, and what the proof covers; `by` is its kind."""
    seed: int | None = None
    """As it was given; the one of `noise` is that of the numbers that were drawn."""
    noise: Mapping[str, Any] | None = None
    """The noise that was added by this growth: its kind, and what draws it again."""
    added_noise: tuple[Mapping[str, Any], ...] = ()
    """Later doses, by `add_noise`."""
    auto: Mapping[str, Any] | None = None
    """How the size of the noise was chosen, if it was."""
    lr: float | None = None
    """The learning rate that was set after growth, at the reference."""
    peak_lr: float | None = None
    """The peak that was set, at the reference."""
    recipe: Mapping[str, Any] | None = None
    """The recipe that was applied, without its trials."""
    loss: Mapping[str, Any] | None = None
    """`before` and `after` the noise."""
    carried: Mapping[str, Any] = field(default_factory=dict)
    """What came along although it is no tensor, by place."""
    named: Mapping[str, Any] = field(default_factory=dict)
    """What did not come along, by place, with the reason."""
    rounded: Mapping[str, Any] = field(default_factory=dict)
    """How far rounding has moved quantised optimizer state, by tensor."""
    loaded: Mapping[str, Any] | None = field(default=None, compare=False)
    """What loading on this rank has read and sent; no part of what the growth is."""
    mupscale: str | None = __version__
    """The version of mupscale that grew it."""
    torch: str | None = field(default_factory=lambda: str(torch.__version__))
    """The version of torch that grew it."""

    def __post_init__(self) -> None:
        for name in _NAMES:
            object.__setattr__(self, name, _frozen(getattr(self, name)))

    @staticmethod
    def by(plan: Plan, since: Plan | None, **more: Any) -> Growth:
        """A growth of now by this plan, of a base to which `since` leads from its reference."""
        known = {"plan": plan.hash, "reference": reference_of(since), "proof": {"by": plan.proof}}
        return Growth(**{**known, **more})

    def as_json(self) -> dict[str, Any]:
        """The fields that are set, as plain values."""
        return {name: _plain(getattr(self, name)) for name in self.known}

    @property
    def known(self) -> tuple[str, ...]:
        """The names of the fields that are set."""
        return tuple(name for name in _NAMES if getattr(self, name) not in (None, {}, ()))


_NAMES = tuple(f.name for f in fields(Growth))


@dataclass(frozen=True)
class Provenance(Mapping[str, Any]):
    """The history of a model's growths, oldest first. Reads like a dict of what the latest one recorded.

    Empty for a model that has not grown. It is the same value for a run (`run.provenance`), a grown directory, and the checkpoint of
    a trainer that continues it (`mupscale.diagnostics.read_provenance`).

    >>> from torch import nn
    >>> import mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> once = mu.upscale(make(4), lambda: make(8), mu.MupNoise(0.1), seed=3)
    >>> twice = mu.grow(once, lambda: make(16))
    >>> [growth.seed for growth in twice.provenance.growths], "noise" in twice.provenance
    ([3, None], False)
    >>> twice.provenance["plan"] == twice.plan.hash
    True
    >>> Provenance.from_json(twice.provenance.as_json()) == twice.provenance
    True
    """

    growths: tuple[Growth, ...] = ()
    """Every growth, oldest first."""
    undone: tuple[Growth, ...] = ()
    """Growths that `narrow` took back, in that order. What their noise did to the mean of the copies is still there."""
    version: int = VERSION
    """Of this form; each growth has the versions of mupscale and torch that made it."""

    def __getitem__(self, name: str) -> Any:
        if name not in tuple(self):
            raise KeyError(name)
        return getattr(self.growths[-1], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.growths[-1].known if self.growths else ())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def grown(self, growth: Growth) -> Provenance:
        """The history with one more growth."""
        return replace(self, growths=(*self.growths, growth))

    def noting(self, **changes: Any) -> Provenance:
        """The history with more said about its latest growth."""
        return replace(self, growths=(*self.growths[:-1], replace(self.growths[-1], **changes)))

    def narrowed(self, plan: Plan) -> Provenance:
        """The history before the growth by this plan; with another plan than the latest one, all of it is undone."""
        kept = self.growths[:-1] if self.growths and self.growths[-1].plan == plan.hash else ()
        return replace(self, growths=kept, undone=(*self.undone, *reversed(self.growths[len(kept) :])))

    def completed(self, steps: Sequence[tuple[Plan, Plan | None]]) -> Provenance:
        """The history with the growths that 0.2.0 did not record: those that added no noise, but for the proof of the last.

        `steps` has the plans of all growths, oldest first, each with the plan from the reference to its base.
        """
        recorded = {growth.plan: growth for growth in self.growths if growth.plan is not None}
        known = [plan.hash for plan, _ in steps]
        unplaced = any(growth.plan is None and {*growth.known} - {"proof"} for growth in self.growths)
        if not known or known[-1] in recorded or not recorded.keys() <= set(known) or unplaced:
            return self
        proof = self.growths[-1].proof if self.growths else {}
        if self.growths and self.growths[-1].plan is not None:
            recorded[self.growths[-1].plan] = replace(self.growths[-1], proof={})
        found = [
            recorded.get(plan.hash)
            or Growth(plan=plan.hash, reference=reference_of(since), mupscale=None, torch=None)
            for plan, since in steps
        ]
        return replace(self, growths=(*found[:-1], replace(found[-1], proof=proof)))

    def of(self, plan: Plan | None) -> Growth | None:
        """The latest growth by this plan."""
        own = None if plan is None else plan.hash
        return next(
            (growth for growth in reversed(self.growths) if own is not None and growth.plan == own), None
        )

    @property
    def seeds(self) -> frozenset[int]:
        """The seeds of all numbers that were drawn as noise so far."""
        doses = [d for growth in (*self.growths, *self.undone) for d in (growth.noise, *growth.added_noise)]
        return frozenset(int(dose["seed"]) for dose in doses if dose and "seed" in dose)

    def as_json(self) -> dict[str, Any]:
        """The history as plain values, to be saved with the weights; `{}` if there is none."""
        history = {key: [growth.as_json() for growth in getattr(self, key)] for key in ("growths", "undone")}
        return {"version": self.version, **history} if self.growths or self.undone else {}

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> Provenance:
        """The history that `as_json` gave, or that of a record of growth; also as 0.2.0 wrote either."""
        with refuse_malformed(_MALFORMED, "growth.malformed_provenance"):
            if "provenance" in stored:
                return Provenance.from_json(stored["provenance"])
            if "growths" not in stored:
                if stored.keys() <= set(_NAMES) and (
                    "mupscale" in stored or isinstance(stored.get("added_noise"), (list, tuple))
                ):
                    return Provenance(
                        _stored([stored])
                    )  # dict(run.provenance): what the latest growth recorded
                return _of_record(stored) if stored else Provenance()
            if stored["version"] != VERSION:
                raise MupscaleError(
                    f"this provenance has version {stored['version']}, expected {VERSION}; install the mupscale that wrote it, "
                    "or a later one",
                    code="growth.other_provenance_version",
                )
            return Provenance(_stored(stored["growths"]), _stored(stored["undone"]))


def _stored(growths: Sequence[Mapping[str, Any]]) -> tuple[Growth, ...]:
    """Stored growths; a field that one lacks is None and not today's default."""
    unknown = dict.fromkeys(("plan", "reference", "mupscale", "torch"))
    return tuple(Growth(**{**unknown, **growth}) for growth in growths)


def _of_record(record: Mapping[str, Any]) -> Provenance:
    """The history in a record of growth: `mupscale.json`, or what runs of 0.2.0 and their checkpoints hold.

    Each says of its base what it knows, under `grown_from`.
    """
    before = Provenance.from_json(record.get("grown_from") or {})
    plan = record.get("plan")
    first = (
        record["since_reference"] == plan
        if "since_reference" in record
        else "plan_hash" in record and not before
    )
    noise = {key: value for key, value in (record.get("noise") or {}).items() if key not in ("asked", "auto")}
    settings, request = (record.get("noise") or {}).get("asked") or {}, record.get("request") or {}
    recipe = json.loads(request["recipe"]) if request.get("recipe") else {}
    entry: dict[str, Any] = {
        "plan": record.get("plan_hash") or (Plan.of_json(plan).hash if isinstance(plan, Mapping) else plan),
        "reference": record.get("reference") or (BASE_ITSELF if first else None),
        "proof": record.get("proof") or ({"by": plan["proof"]} if isinstance(plan, Mapping) else {}),
        "seed": record.get("seed", request.get("seed")) if noise else None,
        "noise": noise or None,
        "added_noise": _doses(record.get("added_noise")),
        "auto": record.get("auto") or (record.get("noise") or {}).get("auto"),
        "lr": record.get("lr") or settings.get("lr"),
        "peak_lr": record.get("peak_lr"),
        "recipe": record.get("recipe")
        or {key: value for key, value in recipe.items() if key not in _RECIPE_TABLES}
        or None,
        "loss": record.get("loss") or record.get("losses"),
        "named": record.get("not_carried") or {},
        "rounded": record.get("rounded") or {},
        "loaded": {key: record[key] for key in _LOADED if key in record} or None,
        "mupscale": record.get("version"),
        "torch": record.get("torch"),
    }
    return before.grown(Growth(**entry)) if any(entry.values()) else before


def _doses(dose: Mapping[str, Any] | None) -> tuple[dict[str, Any], ...]:
    """The doses of 0.2.0, each of which held the run that it was added to."""
    if not dose:
        return ()
    earlier = _doses(dose["added_to"].get("added_noise"))
    return (*earlier, {key: value for key, value in dose.items() if key != "added_to"})


def _frozen(value: Any) -> Any:
    """Plain values that cannot be changed; what JSON does not have is kept as its text."""
    if isinstance(value, Mapping):
        return FrozenDict({str(key): _frozen(entry) for key, entry in value.items()})
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, Tensor) and value.numel() == 1:
        return _frozen(value.item())
    if value is None or isinstance(value, str | bool):
        return value
    # Numbers of numpy become Python's.
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else repr(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value
