"""The result of planning a family, as a frozen value with JSON: what is written into a checkpoint's provenance.

Knows nothing about transformers, so that code that acts on a plan need not import it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import Any

from ..errors import MupscaleError
from ..files.strict import refuse_malformed
from ..noise.where import Exempt
from ..plans.plan import Plan
from ..plans.rows import old_words
from ..plans.tensor_plan import Powers
from .config.goal import Goal
from .types.declarations import Declarations

FORMAT = "mupscale family plan 1"
JUMP = 1e-10
"""How far the loss of a small copy may move in float64 when new units wake: rounding, far below what training could show."""


Cell = tuple[int, int]
"""(which, of how many): a dimension is cut into equal parts, and this is one of them."""


@dataclass(frozen=True)
class Part:
    """A stored tensor: one cell of a model's tensor. A dimension of which one entry is stored is left out."""

    tensor: str
    cells: tuple[Cell, ...]
    dropped: tuple[int, ...] = ()
    below: tuple[str, ...] = ()
    """Tensors of the same shape whose rows follow under the same name: keys and values below queries."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """All tensors that are stored under its name, in the order of their rows."""
        return (self.tensor, *self.below)

    def as_json(self) -> list[Any]:
        return [self.tensor, [list(cell) for cell in self.cells], list(self.dropped), *self.below]

    @staticmethod
    def of_json(entry: list[Any]) -> Part:
        tensor, cells, dropped, *below = entry
        pairs = tuple((int(i), int(n)) for i, n in cells)
        return Part(str(tensor), pairs, tuple(map(int, dropped)), tuple(map(str, below)))


@dataclass(frozen=True)
class Reading:
    """How `from_pretrained` reads the names that one directory stores."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Stored name -> the tensor of the model that it is read as, where the two differ."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Stored name -> why no tensor of the model is read from it."""
    absent: tuple[str, ...] = ()
    """Tensors of the model that are not stored and that the class makes anew: a head, a pooler."""

    def as_json(self) -> dict[str, Any]:
        return {"names": dict(self.names), "left_out": dict(self.left_out), "absent": list(self.absent)}

    @staticmethod
    def of_json(entry: Mapping[str, Any]) -> Reading:
        names, left_out = ({str(k): str(v) for k, v in entry[key].items()} for key in ("names", "left_out"))
        return Reading(names, left_out, tuple(map(str, entry["absent"])))


@dataclass(frozen=True)
class Evidence:
    """What was measured on the small copy, in float64 with casts lifted."""

    source: str
    """"row" when the registry says something about the type, "search" when all was found."""
    trials: int
    worst_gradient: float
    """The largest relative distance of a gradient from r · dup(G), over all tensors."""
    loss_gap: float
    parameters: int
    """Size of the small base model."""
    seconds: float
    steps: int = 0
    """Optimizer steps compared by `prove`; 0 when it has not run, or where new channels carry a mean: losses and gradients then."""
    worst_step: float = 0.0
    """The largest relative error of losses, gradients and weights over those steps."""
    control: float = 0.0
    """The same with learning rates and eps left unscaled, or with zeros for means: must be far larger."""
    jump: float | None = None
    """How far the loss of the copy moves, relatively, when what is new wakes and copies are split; None where nobody looked."""
    kept: float | None = None
    """The share of the copy's tokens that keep their experts when copies of experts part; None where none do."""


@dataclass(frozen=True)
class FamilyPlan:
    """A plan for a stock checkpoint: the growth of every tensor, and the config.json of the result.

    >>> from ..plans.plan import Plan
    >>> evidence = Evidence("search", 1, 1e-15, 0.0, 10, 0.1)
    >>> family = FamilyPlan("llama", "LlamaForCausalLM", "LlamaForCausalLM", Goal(), {}, {}, Plan({}), evidence)
    >>> FamilyPlan.from_json(family.to_json()) == family
    True
    """

    model_type: str
    architecture: str
    wide_architecture: str
    goal: Goal
    base_config: Mapping[str, Any]
    wide_config: Mapping[str, Any]
    """What the config.json of the wide checkpoint holds."""
    plan: Plan
    evidence: Evidence
    small_config: Mapping[str, Any] = field(default_factory=dict)
    """The configuration of the copy on which the plan was found and proved."""
    small_goal: Goal = field(default_factory=Goal)
    """How the copy grows: as the model does, by sizes of its own."""
    powers: Powers = field(default_factory=dict)
    """Parts of folds that depend on how much of an axis is filled, so that they can be computed at other sizes."""
    not_stored: tuple[str, ...] = ()
    """Tensors of the plan that a checkpoint does not hold, because the model computes them."""
    notes: tuple[str, ...] = ()
    export: str | None = None
    """None for the class of the base, else "granite"."""
    stored: Mapping[str, Part] = field(default_factory=dict)
    """Stored name -> part of a tensor, for tensors that a checkpoint does not hold as they are."""
    reading: Reading = field(default_factory=Reading)
    """How the names of the directory are read, where a directory was planned."""
    exempt: Exempt = field(default_factory=Exempt)
    """What gets no noise: gains of norms, padding rows."""
    declared: Declarations = field(default_factory=Declarations)
    """What the user declared about the model."""
    new_blocks: tuple[int, ...] = ()
    """The numbers of the blocks that the base does not have, where the model grows deeper."""

    @property
    def new_words(self) -> tuple[int, int] | None:
        """The first id of the words that the base does not have, and the first id behind them."""
        return old_words(self.plan)

    def with_evidence(self, **changes: Any) -> FamilyPlan:
        return replace(self, evidence=replace(self.evidence, **changes))

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model_type": self.model_type,
            "architecture": self.architecture,
            "wide_architecture": self.wide_architecture,
            "goal": self.goal.as_json(),
            "base_config": dict(self.base_config),
            "wide_config": dict(self.wide_config),
            "plan": self.plan.as_json(),
            "evidence": {key: value for key, value in asdict(self.evidence).items() if value is not None},
            "small_config": dict(self.small_config),
            "small_goal": self.small_goal.as_json(),
            "powers": {n: {str(d): str(p) for d, p in by.items()} for n, by in self.powers.items()},
            "not_stored": list(self.not_stored),
            "stored": {name: part.as_json() for name, part in self.stored.items()},
            "reading": self.reading.as_json(),
            "notes": list(self.notes),
            "export": self.export,
            "exempt": self.exempt.as_json(),
            "declared": self.declared.as_json(),
            "new_blocks": list(self.new_blocks),
        }

    def to_json(self) -> str:
        return json.dumps(self.as_json(), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> FamilyPlan:
        with refuse_malformed("this is not a family plan", "plan.not_a_family_plan"):
            return FamilyPlan.of_json(json.loads(text))

    @staticmethod
    def of_json(values: Mapping[str, Any]) -> FamilyPlan:
        with refuse_malformed("this is not a family plan", "plan.not_a_family_plan"):
            entry = dict(values)
            if entry.pop("format") != FORMAT:
                raise MupscaleError(f"this is not a {FORMAT!r}", code="plan.not_a_family_plan")
            return FamilyPlan(
                **{
                    **entry,
                    "goal": Goal.of_json(entry["goal"]),
                    "small_goal": Goal.of_json(entry["small_goal"]),
                    "powers": {
                        name: {int(dim): Fraction(power) for dim, power in by.items()}
                        for name, by in entry["powers"].items()
                    },
                    "plan": Plan.of_json(entry["plan"]),
                    "evidence": Evidence(**entry["evidence"]),
                    "not_stored": tuple(entry["not_stored"]),
                    "stored": {name: Part.of_json(part) for name, part in entry["stored"].items()},
                    "reading": Reading.of_json(entry["reading"]),
                    "notes": tuple(entry["notes"]),
                    "exempt": Exempt.of_json(entry["exempt"]),
                    "declared": Declarations.of_json(entry["declared"]),
                    "new_blocks": tuple(entry["new_blocks"]),
                }
            )
