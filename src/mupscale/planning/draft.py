"""A plan while it is being decided: shapes, roles, layouts and folds, some of them still open.

Made by comparing two models; completed by declarations and by the search; turned into a frozen `Plan`.

>>> def make(n: int) -> nn.Module:
...     model = nn.Sequential(nn.Linear(3, n))
...     model.register_parameter("gain", nn.Parameter(torch.ones(n)))
...     return model
>>> made, _ = draft(make(4), make(8), Ways(), None)
>>> made.entries["0.weight"].roles  # nn.Linear says so
{0: 'out', 1: 'in'}
>>> [entry.name for entry in made.open]  # nothing says what a raw parameter is
['gain']
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import nn

from ..errors import Fault, MupscaleError, raise_faults
from ..models.kinds import is_batch_norm
from ..models.names import Kind, module_paths, name_in, named_tensors, unique_tensors, unwrap
from ..plans.plan import Plan
from ..plans.tensor_plan import TensorPlan
from ..rules.axes import Axis, Layout, Role
from ..rules.products import Factor, Ways
from ..rules.scale import ONE, Scale
from ..tensors.making import Fill
from .facts import modules
from .facts.parametrized import parametrized, weight_norm_facts


@dataclass(frozen=True)
class DraftEntry:
    """One tensor of the draft."""

    name: str
    kind: Kind
    base_shape: tuple[int, ...]
    wide_shape: tuple[int, ...]
    module: tuple[nn.Module, nn.Module]
    roles: Mapping[int, Role] | None
    layouts: Mapping[int, Layout | tuple[Factor, ...]]
    fold: Scale = ONE
    fill: Fill = "zero"
    shift: int = 0
    declared_fold: Scale | None = None
    """The fold that the user declared for it, if one was."""
    declared_role: bool = False
    seen_roles: bool = False
    """Whether its roles were read from a recorded call, and not from its module."""
    declared_layouts: frozenset[int] = frozenset()
    """The dimensions whose layout the user declared."""
    fills: Mapping[int, Fraction] = field(default_factory=dict)
    """Dimension -> the power of its filled share that the tensor absorbs besides its fold."""
    stream: frozenset[int] | None = None
    """Its dimensions in spaces with zeros that a norm averages over; None where nothing was recorded."""
    gain: bool = False
    """Whether it is the gain of such a norm."""
    mean: frozenset[int] = frozenset()
    """Its dimensions whose new entries carry the mean of the others."""
    still: frozenset[int] = frozenset()
    """Its dimensions whose zeros stay because others carry a mean: of what reads it, and of the bias of a norm."""
    typical: bool = False
    """Whether it multiplies units of a space that no norm averages over."""

    @property
    def growing(self) -> list[int]:
        """The dimensions whose size differs."""
        return [d for d, (a, b) in enumerate(zip(self.base_shape, self.wide_shape, strict=True)) if a != b]

    @property
    def raw(self) -> bool:
        """Whether its module says nothing about it."""
        return self.roles is None or self.seen_roles

    def plan(self, ways: Ways) -> TensorPlan:
        """The frozen entry; raises if a layout does not fit the two sizes."""
        axes = []
        for dim, (a, b) in enumerate(zip(self.base_shape, self.wide_shape, strict=True)):
            role = (self.roles or {}).get(dim) if a != b else None
            layout = self.layouts.get(dim, 1)
            try:
                if not isinstance(layout, int) and layout and isinstance(layout[0], Factor):
                    axis = Axis.of(layout, role=role)  # type: ignore[arg-type]
                    if (axis.base, axis.wide) != (a, b):
                        raise MupscaleError(
                            f"layout {axis} takes {axis.base} to {axis.wide}, the models have {a} and {b}",
                            code="layout.other_sizes",
                        )
                else:
                    axis = Axis.between(a, b, role, layout, ways) if a != b else Axis.fixed(a)  # type: ignore[arg-type]
            except MupscaleError as error:
                raise MupscaleError(f"axis {dim}: {error.claim}", code=error.code) from None
            axes.append(axis)
        fold = self.fold
        for dim, power in self.fills.items():
            fold = fold * Scale.of(axes[dim].filled) ** power
        return TensorPlan(
            (self.name,),
            tuple(axes),
            fold,
            kind=self.kind,
            fill=self.fill,
            shift=self.shift,
            cut=self._cut(axes),
            mean=tuple(sorted(dim for dim in self.mean if axes[dim].padded)),
            gain=self.gain and axes[0].padded,
            typical=self._typical(axes),
        )

    def _typical(self, axes: list[Axis]) -> bool:
        padded = [axis for axis in axes if axis.padded]
        return self.typical and bool(padded) and all(axis.role == "out" for axis in padded)

    def _cut(self, axes: list[Axis]) -> tuple[int, ...]:
        """The dimensions whose zeros stay when noise wakes the others, so that each space is cut in one place.

        A space that a norm averages over is cut where it is written, any other where it is read.
        """
        if self.stream is None or self.kind != "parameter" or self.gain:
            return ()
        return tuple(
            dim
            for dim, axis in enumerate(axes)
            if axis.padded
            and dim not in self.mean
            and (dim in self.still or axis.role == ("out" if dim in self.stream else "in"))
        )


@dataclass(frozen=True)
class Draft:
    """All tensors of a plan that is being decided, with the two models they come from."""

    entries: Mapping[str, DraftEntry]
    ties: Mapping[str, str]
    conflicts: Mapping[str, str]
    """Tied tensors that one use wants as "in" and another as "out": name -> the reading use."""
    ways: Ways
    models: tuple[nn.Module, nn.Module]

    @property
    def open(self) -> list[DraftEntry]:
        """Tensors that grow and whose roles are neither known from their module nor declared."""
        return [e for e in self.entries.values() if e.growing and e.roles is None]

    def axis(self, entry: DraftEntry, dim: int) -> Axis | None:
        """One axis of a tensor as it is laid out so far; None if the layout does not fit the two sizes."""
        try:
            return entry.plan(self.ways).axes[dim]
        except MupscaleError:
            return None

    def padded(self, entry: DraftEntry, dim: int) -> bool:
        """True if an axis gets zeros, as it is laid out so far."""
        axis = self.axis(entry, dim)
        return axis is not None and axis.padded

    def planned(self, name: str) -> str:
        """The name under which a tensor is planned: its own, or that of the tensor it is tied to."""
        return self.ties.get(name, name)

    def with_entries(self, changes: Mapping[str, DraftEntry]) -> Draft:
        """The draft with some entries replaced."""
        return replace(self, entries={**self.entries, **changes})

    def _like_its_gain(self, entry: DraftEntry) -> DraftEntry:
        """Running statistics have the layout of the parameter of the same size in the same module."""
        if entry.kind != "buffer" or len(entry.growing) != 1 or entry.layouts:
            return entry
        owner = entry.name.rpartition(".")[0]
        for leaf in ("weight", "bias"):
            other = self.entries.get(name_in(owner, leaf))
            if other is not None and (other.base_shape, other.wide_shape) == (
                entry.base_shape,
                entry.wide_shape,
            ):
                return replace(entry, layouts=other.layouts)
        return entry

    def plan(self) -> Plan:
        """The frozen plan, or one error with every tensor whose axes cannot be built."""
        tensors: dict[str, TensorPlan] = {}
        faults: list[Fault] = []
        for name, entry in self.entries.items():
            try:
                tensors[name] = self._like_its_gain(entry).plan(self.ways)
            except MupscaleError as error:
                faults.append(Fault(error.code, name, error.claim))
        raise_faults("no plan fits these two models", faults)
        padded = any(tensor.padded for tensor in tensors.values())
        needs = modules.padding_needs(self.models[0]) if padded else set()
        return Plan(tensors, dict(self.ties), needs=frozenset(needs))


def draft(
    base: nn.Module, wide: nn.Module, ways: Ways, again: nn.Module | None, measured: bool = False
) -> tuple[Draft, list[Fault]]:
    """Compare two models: which axes grow, and what their modules say about them.

    `again` is the base built once more with another seed, if there is a factory: a buffer that differs
    between base and wide, but not between the two bases, is a constant that depends on the width. `measured` says that a
    loss will decide: then such a buffer is copied, which is right for state and for constants that are only used.
    """
    base, wide = unwrap(base), unwrap(wide)
    found, goal = ({n: (k, t) for n, k, t in named_tensors(model)} for model in (base, wide))
    ties = unique_tensors(wide)[1]
    faults = _unmatched(found.keys(), goal.keys()) + _tied_once(unique_tensors(base)[1], ties)
    owners = (dict(module_paths(base, shared=True)), dict(module_paths(wide, shared=True)))
    entries: dict[str, DraftEntry] = {}
    conflicts: dict[str, str] = {}
    others = {} if again is None else {n: t for n, _, t in named_tensors(again)}
    for path, module in owners[0].items():
        faults += modules.unsupported(module, owners[1][path], path, ways) if path in owners[1] else []
    for name, (kind, tensor) in goal.items():
        if name not in found:
            continue
        source = found[name][1]
        if source.dim() != tensor.dim():
            faults.append(
                Fault(
                    "model.other_dimensions",
                    name,
                    f"{source.dim()} dimensions in the base, {tensor.dim()} in the wide model",
                    "build both models the same way",
                )
            )
            continue
        entry, problems = _entry(name, kind, (source, tensor), owners, ways)
        if kind == "buffer" and not entry.growing:
            entry, problems = _fixed_buffer(entry, source, tensor, others.get(name))
            problems = [] if measured else problems
        faults += problems
        if (owner := ties.get(name)) is None:
            entries[name] = entry
        elif owner in entries and entry.growing and entry.roles and entries[owner].roles != entry.roles:
            # A table that is both embedding and readout is planned as the embedding (s = 1), whichever of
            # the two names comes first; the readout's 1/k is folded elsewhere (see fold_knobs.py).
            embeds = isinstance(entry.module[0], nn.Embedding)
            if embeds:
                entries[owner] = replace(entry, name=owner)
            conflicts[owner] = owner if embeds else name
    return Draft(entries, ties, conflicts, ways, (base, wide)), faults


def _entry(
    name: str,
    kind: Kind,
    tensors: tuple[torch.Tensor, torch.Tensor],
    owners: tuple[dict[str, nn.Module], ...],
    ways: Ways,
) -> tuple[DraftEntry, list[Fault]]:
    """One tensor with the roles that its module gives it, and the reasons why it cannot grow."""
    source, tensor = tensors
    path, _, leaf = name.rpartition(".")
    pair = (owners[0][path], owners[1][path])
    above = path.rpartition(".")[0]
    parents = (owners[0][above], owners[1][above]) if path else None
    entry = DraftEntry(name, kind, tuple(source.shape), tuple(tensor.shape), pair, None, {})
    kind_of = parametrized(name, owners[0]) if kind == "parameter" else None
    if kind_of == "WeightNorm":  # its gain may absorb a fold although it does not grow itself
        normed, problems = weight_norm_facts(name, owners, ways)
        return replace(entry, **vars(normed)) if normed else entry, problems
    if not entry.growing:
        return replace(entry, roles={}), []
    if kind == "buffer":
        return _growing_buffer(entry, source)
    if kind_of is not None:
        return entry, [
            Fault(
                "model.parametrized_weight",
                name,
                f"{kind_of} computes the weight from it in a way that depends on the width",
                "remove it first: torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')",
            )
        ]
    known = modules.facts(*pair, leaf, parents, ways)
    roles = known.roles
    if roles is not None and any(dim not in roles for dim in entry.growing):
        return entry, []  # a dimension that is no width, such as the rows of a table: what it means is open
    return replace(entry, roles=roles, layouts=known.layouts, fold=known.fold), []


def _growing_buffer(entry: DraftEntry, source: torch.Tensor) -> tuple[DraftEntry, list[Fault]]:
    """A growing buffer is copied, like running statistics. Integers are refused: they may be ids, not quantities."""
    if source.is_floating_point() or source.is_complex():
        return replace(entry, roles=dict.fromkeys(entry.growing, "out")), []
    return replace(entry, roles=dict.fromkeys(entry.growing, "out")), [
        Fault(
            "model.growing_integer_buffer",
            entry.name,
            f"a buffer of {source.dtype} grows, and whether copies of its numbers mean the same is not known",
            f'to copy its entries write declared=mu.Declared(layouts={{"{entry.name}": 1}}); '
            "otherwise do not register it as a buffer",
        )
    ]


def _fixed_buffer(
    entry: DraftEntry, source: torch.Tensor, tensor: torch.Tensor, again: torch.Tensor | None
) -> tuple[DraftEntry, list[Fault]]:
    """Decide whether a buffer is state of the base, which is copied, or a constant that each model computes itself.

    A buffer that holds 1/head_size differs between base and wide and is the same in every base; a random one
    differs between two bases as well.
    """
    known = not (source.is_meta or tensor.is_meta) and source.dtype == tensor.dtype
    statistics = is_batch_norm(entry.module[0])
    if not known or statistics or torch.equal(source.cpu(), tensor.cpu()):
        return entry, []
    if again is not None:
        own = torch.equal(source.cpu(), again.cpu())
        return replace(entry, fill="own" if own else "zero"), []
    return entry, [
        Fault(
            "model.unclear_buffer",
            entry.name,
            "a buffer of equal shape and other values: is it state of the base, or a constant of the width?",
            "infer the plan from two factories, with a loss: plan_between(make, base, wide, loss=loss)",
        )
    ]


def _tied_once(found: Mapping[str, str], goal: Mapping[str, str]) -> list[Fault]:
    """A fault for tensors that are tied in one model only: they would train differently."""
    groups = [
        {(owner, *(name for name in ties if ties[name] == owner)) for owner in ties.values()}
        for ties in (found, goal)
    ]
    return [
        Fault(
            "model.tied_once",
            " = ".join(names),
            f"tied in the {'base' if names in groups[0] else 'wide'} model only",
            "tie (or untie) it in both",
        )
        for names in sorted(groups[0] ^ groups[1])
    ]


def _unmatched(found: Set[str], goal: Set[str]) -> list[Fault]:
    """Tensors that one of the two models does not have."""
    missing = [
        Fault("model.tensor_only_in_base", n, "in the base model only", "build both models the same way")
        for n in found
        if n not in goal
    ]
    extra = [
        Fault(
            "model.tensor_only_in_wide",
            n,
            "in the wide model only: no base tensor feeds it",
            "build both models the same way",
        )
        for n in goal
        if n not in found
    ]
    return missing + extra
