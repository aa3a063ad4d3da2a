"""The plan: for every tensor of the wide model, where it comes from and how its units change.

A frozen value keyed by the wide name, with JSON, a hash and exact composition. The entry of one tensor is in
`tensor_plan.py`. Nothing here reads a model or moves a tensor: `infer.py` makes plans, `training/` and
`checkpoints/` apply them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import Any, Literal, get_args

from ..errors import Fault, MupscaleError, raise_faults
from ..files import typed
from ..files.strict import parse_json, refuse_malformed
from ..frozen import FrozenDict, freeze_mappings
from ..models.names import Kind, resolve
from ..models.need import NEED_KINDS, Need
from ..rules.axes import Axis
from ..rules.scale import Exact, Scale
from .tensor_plan import TensorPlan

FORMAT = "mupscale plan 1"
OUTPUTS_ALONE = (
    "outputs, not in training: new channels carry the mean of the others, and norms subtract that of all"
)
"""What a plan with means says of itself, and what proves it."""
KEPT_TOKENS = "for the tokens that keep their experts: copies of an expert share its tokens"
"""What a plan with copied experts, and as few of them for each token as before, says of itself."""
_EXACT = "dynamic"  # 0.2.0 also had plans that were "static"
_MALFORMED = "this is not a plan, expected what to_json wrote"
_MOST_OBJECTS = 3_000_000  # of JSON; a plan has one per tensor
Proof = Literal["none", "copy", "outputs", "modules", "loss"]
"""How a plan was proved, the weakest first: not at all, on a small copy of the model's type, by the gradients of a
projection of the outputs, by torch's own modules in containers whose forward is known, by the gradients of a loss."""
_PROOFS: tuple[Proof, ...] = get_args(Proof)
_NO_IDENTITY = ("needs", "need_kinds", "proof")


@dataclass(frozen=True)
class Plan:
    """How every tensor of the wide model is made from the base: a frozen value, which can be saved, compared and hashed.

    `plan[name]` and `name in plan` know tied names too, and so does iteration over `plan.names`; `plan.tensors` holds
    each tensor once.

    >>> plan = Plan({"w": TensorPlan(("w",), (Axis.parse("out: 4x2"),))})
    >>> plan == Plan.from_json(plan.to_json()), plan["w"].wide_shape
    (True, (8,))
    """

    tensors: Mapping[str, TensorPlan]
    """Every tensor of the wide model, by name, and how it is made."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Other names of a tensor, each with the name under which the tensor is planned."""
    needs: frozenset[Need] = field(default=frozenset(), compare=False)
    """Assumptions that the plan cannot check: sentences, each with a kind. They are not part of its identity."""
    proof: Proof = field(default="none", compare=False)
    """What showed that the plan is exact for the models' code. It says how the plan was made, not what it does, so it is
    not part of its identity."""
    code: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The fingerprint of the code that it was measured on, by class (`code_fingerprint`); empty if it was not. Stored by `to_json`, and
    part of neither the plan's identity nor that of a job."""

    later: bool = field(default=False, compare=False, repr=False)
    """Whether a run was grown by it that had grown before, so that it does not begin at the run's reference. Not stored."""

    def __post_init__(self) -> None:
        freeze_mappings(self)
        object.__setattr__(self, "needs", frozenset(map(Need, self.needs)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read pickles of 0.2.0 too, which lack the later fields."""
        _refuse_static(state.pop("exact", _EXACT))
        needs = (n if isinstance(n, Need) else Need.stored_without_kind(n) for n in state.pop("needs"))
        self.__dict__.update({"code": {}, "later": False, "needs": frozenset(needs), **state})
        self.__post_init__()

    @property
    def proved(self) -> bool:
        """True when the plan is known to be exact for the code of its models, and not for their shapes alone."""
        return self.proof != "none"

    @property
    def carries_mean(self) -> bool:
        """True where new channels are the mean of the others: outputs are exact, and training is not the base's."""
        return any(tensor.mean for tensor in self.tensors.values())

    @property
    def parts_tokens(self) -> bool:
        """True where experts are copied and each token goes to as few as before: a copy gets a part of its expert's tokens."""
        return any(tensor.chosen is not None for tensor in self.tensors.values())

    def planned(self, name: str) -> str:
        """The name under which a tensor is planned: the first name of a tied tensor, otherwise `name` itself.

        Args:
            name: The name of a tensor of the wide model.
        """
        return self.ties.get(name, name)

    def __getitem__(self, name: str) -> TensorPlan:
        return self.tensors[self.planned(name)]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors or name in self.ties

    # Without this Python would iterate by plan[0], plan[1], … and end in a KeyError.
    __iter__ = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that the plan knows: of its tensors first, then their other names."""
        return (*self.tensors, *self.ties)

    def __hash__(self) -> int:
        return hash(self.hash)

    @cached_property
    def sources(self) -> Mapping[str, tuple[str, ...]]:
        """Base name -> the wide names made from it."""
        found: dict[str, list[str]] = {}
        for name, tensor in self.tensors.items():
            for source in tensor.sources:
                found.setdefault(source, []).append(name)
        return FrozenDict({source: tuple(names) for source, names in found.items()})

    def parameters(self, end: Literal["base", "wide"]) -> int:
        """How many parameters the model at one end has.

        Args:
            end: "base" or "wide".
        """
        planned = [t for t in self.tensors.values() if t.kind == "parameter"]
        if end == "wide":
            return sum(prod(t.wide_shape) for t in planned)
        # A base tensor from which several wide ones are made counts once.
        return sum({t.sources: prod(t.base_shape) for t in planned if not t.new}.values())

    def with_tensors(self, changes: Mapping[str, TensorPlan]) -> Plan:
        """The plan with some tensors replaced or added. Nothing has proved the result.

        Args:
            changes: The tensors by name.
        """
        return replace(self, tensors={**self.tensors, **changes}, proof="none", code={})

    def matching(self, pattern: str) -> list[str]:
        """Planned names that match a shell pattern; a tied name stands for its planned name.

        Args:
            pattern: A name, or a pattern such as "*.weight". One that matches nothing is refused.
        """
        found = [self.planned(n) for n in self.names if n == pattern or fnmatchcase(n, pattern)]
        if not found:
            raise MupscaleError(
                f"no tensor of the plan matches {pattern!r}; plan.names lists them",
                code="argument.pattern_matches_nothing",
            )
        return list(dict.fromkeys(found))

    def fold(self, pattern: str, factor: Exact) -> Plan:
        """Make the matching tensors absorb a constant; lr, eps, decay and state follow.

        This is the paper's symmetry: a multiplier θ taken out of the model's code is a fold of θ here.

        Args:
            pattern: A name, or a pattern of names.
            factor: The constant, exact: a fraction or a root as text, as "1/2".
        """
        scale = Scale.of(factor)
        return self.with_tensors(
            {
                name: replace(self.tensors[name], fold=self.tensors[name].fold * scale)
                for name in self.matching(pattern)
            }
        )

    def rename(self, names: Mapping[str, str] | Callable[[str], str]) -> Plan:
        """The same plan with other tensor names at both ends, for a framework that names them differently.

        Args:
            names: The new name of each tensor, by its old one, or a function that returns it.
        """
        new = names if callable(names) else lambda name: names.get(name, name)
        tensors = {
            new(name): replace(
                tensor,
                sources=tuple(map(new, tensor.sources)),
                like=None if tensor.like is None else new(tensor.like),
            )
            for name, tensor in self.tensors.items()
        }
        if len(tensors) != len(self.tensors):
            names_after = [new(name) for name in self.tensors]
            double = [name for name in self.tensors if names_after.count(new(name)) > 1]
            raise MupscaleError(
                "the name map gives two tensors the same name",
                [
                    Fault(
                        "plan.name_taken_twice",
                        name,
                        f"becomes {new(name)!r}",
                        "map every tensor to a different name",
                    )
                    for name in double
                ],
            )
        ties = {new(alias): new(name) for alias, name in self.ties.items()}
        # Another framework has other code.
        return replace(self, tensors=tensors, ties=ties, code={})

    def then(self, other: Plan) -> Plan:
        """The plan a -> c from the plans a -> b and b -> c, exactly.

        Args:
            other: The plan that begins where this one ends.
        """
        tensors: dict[str, TensorPlan] = {}
        faults: list[Fault] = []
        for name, late in other.tensors.items():
            try:
                tensors[name] = self._composed(late)
            except MupscaleError as error:
                faults.append(Fault(error.code, name, error.claim))
        raise_faults("the two plans do not compose", faults)
        ties = {**self.ties, **other.ties}
        proof = min(self.proof, other.proof, key=_PROOFS.index)
        if any(self[t.sources[0]].mixes_experts(t) for t in other.tensors.values() if t.sources):
            proof = _PROOFS[0]
        code = {**self.code, **other.code} if self.code and other.code else {}
        return Plan(tensors, ties, self.needs | other.needs, proof, code)

    def _composed(self, late: TensorPlan) -> TensorPlan:
        if not late.sources:
            return late if late.like is None else self._new(late, late.like)
        unknown = [source for source in late.sources if source not in self]
        if unknown:
            raise MupscaleError(
                f"its source {unknown[0]!r} is not made by the first plan; use plans that meet at one model",
                code="plan.source_not_made",
            )
        return self[late.sources[0]].then(late)

    def _new(self, late: TensorPlan, like: str) -> TensorPlan:
        """A tensor that is new in the second plan, in the units of the tensor it is like."""
        early = self[like]
        return replace(
            early.then(replace(late, sources=(like,))),
            sources=(),
            cat=None,
            fill=late.fill,
            like=early.sources[0] if early.sources else early.like,
            quiet=late.quiet,
            # Joined from several tensors, or new and no copy itself, there is no one tensor to copy.
            repeats=late.repeats and (early.repeats if early.new else len(early.sources) == 1),
        )

    def to_json(self) -> str:
        """The plan as JSON text, which `from_json` reads back."""
        code = {"code": dict(self.code)} if self.code else {}
        return json.dumps({**self.as_json(), **code}, indent=1, sort_keys=True)

    def as_json(self) -> dict[str, Any]:
        """The plan as plain values, in the form of its JSON, without the fingerprint of code."""
        needs = sorted(self.needs)
        kinds = [need.kind for need in needs]
        return {
            "format": FORMAT,
            "tensors": {name: tensor.as_json() for name, tensor in self.tensors.items()},
            "ties": dict(self.ties),
            "edits": [],  # once constants of the model's code; part of every hash
            "exact": _EXACT,  # part of every hash
            "needs": list(map(str, needs)),
            **({"need_kinds": kinds} if set(kinds) - {"assumption"} else {}),
            "proof": self.proof,
        }

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote; anything else is refused.

        Args:
            text: The JSON text.
        """
        with refuse_malformed(_MALFORMED, "plan.malformed_record"):
            return Plan.of_json(parse_json(text.encode(), f"{_MALFORMED}; its JSON", objects=_MOST_OBJECTS))

    @staticmethod
    def of_json(values: Mapping[str, Any]) -> Plan:
        """The plan that `as_json` gave; anything else is refused.

        Args:
            values: The plain values.
        """
        with refuse_malformed(_MALFORMED, "plan.malformed_record"):
            if values["format"] != FORMAT:
                raise MupscaleError(
                    f"this is not a plan: format {values['format']!r}, expected {FORMAT!r}",
                    code="plan.wrong_format",
                )
            _refuse_edits([typed.text(path) for path, *_ in typed.many(values["edits"])])
            _refuse_static(values["exact"])
            return Plan(
                tensors={name: TensorPlan.of_json(t) for name, t in typed.named(values["tensors"]).items()},
                ties={alias: typed.text(name) for alias, name in typed.named(values["ties"]).items()},
                needs=_needs(typed.texts(values["needs"]), values.get("need_kinds")),
                proof=_PROOFS[_PROOFS.index(values["proof"])],
                code={
                    name: typed.text(digest) for name, digest in typed.named(values.get("code", {})).items()
                },
            )

    @cached_property
    def hash(self) -> str:
        """The identity of the plan: equal plans have equal hashes."""
        identity = {key: value for key, value in self.as_json().items() if key not in _NO_IDENTITY}
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def explain(self, name: str) -> str:
        """A description of how one tensor grows.

        Args:
            name: Its name. One that is not in the plan is refused.
        """
        found = resolve(name, self)
        if found is None:
            raise MupscaleError(
                f"the plan has no tensor {name!r}; plan.names lists them", code="plan.no_such_name"
            )
        from .explain import explain

        return explain(found, self.planned(found), self[found])

    def __str__(self) -> str:
        from .explain import table

        lines = table(self.tensors)
        lines += [f"tied: {alias} = {name}" for alias, name in self.ties.items()]
        lines += [f"exact in {OUTPUTS_ALONE}"] if self.carries_mean else []
        lines += [f"exact {KEPT_TOKENS}"] if self.parts_tokens else []
        lines += [f"needs: {need}" for need in sorted(self.needs)]
        lines.append(f"proof: {self.proof}   hash: {self.hash[:16]}")
        return "\n".join(lines)

    @staticmethod
    def identity(shapes: Iterable[tuple[str, Kind, tuple[int, ...]]]) -> Plan:
        """The plan that changes nothing: a run copied by it is the same run.

        Args:
            shapes: Every tensor of the model: its name, "parameter" or "buffer", and its shape.
        """
        return Plan(
            {
                name: TensorPlan((name,), tuple(map(Axis.fixed, shape)), kind=kind)
                for name, kind, shape in shapes
            },
            proof="modules",
        )


def _needs(sentences: tuple[str, ...], kinds: Any) -> frozenset[Need]:
    """What a stored plan assumes; where it has no kinds, every one is an assumption or the plan is older than they are."""
    if kinds is None:
        return frozenset(map(Need.stored_without_kind, sentences))
    known = [NEED_KINDS[NEED_KINDS.index(kind)] for kind in typed.texts(kinds)]
    return frozenset(Need(sentence, kind) for sentence, kind in zip(sentences, known, strict=True))


def _refuse_static(exact: Any) -> None:
    """Raise for a plan of 0.2.0 that keeps the outputs alone."""
    if exact != _EXACT:
        raise MupscaleError(
            f"this plan keeps the outputs and not the training (exact: {exact!r}); "
            "grow the base again without --export untie",
            code="plan.static",
        )


def _refuse_edits(paths: Iterable[str]) -> None:
    """Raise for a plan of 0.2.0 that changes constants of the model's code, as the eps of a norm over zeros."""
    what = "the plan changes this constant of the model's code; plans now fold such constants into weights"
    remedy = "grow the base by a new plan: mu.infer_plan(base, wide, loss=loss, by='units')"
    faults = [Fault("plan.edits_constants", path, what, remedy) for path in paths]
    raise_faults("this plan was made by mupscale 0.2.0", faults)
