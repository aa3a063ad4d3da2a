"""Initialise a model at any width from its sizes at the reference.

Entries that the model draws one by one are drawn again from the counter-based generator, so the result depends on
(seed, name, index) and not on sharding. Their size is std(reference) · q, with q from `rules/sizes.py`; at the reference,
where q = 1, the distribution is the model's own: normal stays normal, uniform stays uniform. What has a structure of its
own (constants, an identity, an orthogonal matrix, padding rows) keeps it; `structure.py` finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...arguments import shown, wrong_number, wrong_whole
from ...errors import Fault, MupscaleError, raise_faults
from ...models.kinds import padding_rows
from ...models.names import named_tensors, unique_tensors
from ...plans.ends import check_end
from ...plans.plan import Plan
from ...plans.tensor_plan import TensorPlan
from ...rules.sizes import noise_size
from ...runs.run import Since, since_of
from ...tensors.devices import exact
from ...tensors.noise import rectangle
from ...tensors.parts import Rectangle, is_sharded, local_of, local_rectangle
from ...tensors.philox import Stream, normals, uniforms
from .drawn import alike, builds_of, fixed_entries, stretched, whole

_UNIFORM_BELOW = -0.9  # excess kurtosis: -1.2 for a uniform, 0 for a normal, about -0.3 for a cut normal
_ENOUGH = 64  # fewer entries cannot tell one distribution from another


@dataclass(frozen=True)
class Shape:
    """How one tensor is distributed at the reference."""

    mean: float
    std: float
    uniform: bool = False

    @staticmethod
    def measured(tensor: Tensor) -> Shape:
        """Measure a tensor. Constants have std 0; a tensor that is neither constant nor centred is refused later."""
        values = exact(tensor).flatten()
        if values.numel() == 0 or bool((values == values[0]).all()):
            return Shape(float(values[0]) if values.numel() else 0.0, 0.0)
        rms, mean = float(values.square().mean().sqrt()), float(values.mean())
        kurtosis = float((values / rms).pow(4).mean()) - 3
        off_centre = values.numel() >= _ENOUGH and abs(mean) > 0.5 * rms
        return Shape(
            mean if off_centre else 0.0, rms, values.numel() >= _ENOUGH and kurtosis < _UNIFORM_BELOW
        )


@dataclass(frozen=True)
class KeptEntries:
    """The entries of a wide tensor that are not drawn."""

    mask: Tensor
    values: Tensor | None
    """Their values as the reference has them; None for those with which the wide model was built."""


Reference = nn.Module | Callable[[], nn.Module]
Std = Reference | Mapping[str, float | Reference | None] | None


def init_weights_(
    model: nn.Module,
    since: Since,
    *,
    std: Std = None,
    seed: int = 0,
) -> nn.Module:
    """Initialise every parameter of a model in place, with the size that μP gives it.

    Only entries that the model draws one by one are drawn. What is not drawn keeps its value, times a fold: that of the
    reference where all units have the same (gains of one, a forget gate's bias), otherwise that with which `model` was built (an
    identity, an orthogonal matrix). A (1 + w) gain keeps (1 + w) times its fold; tied tensors are drawn once. In a sharded
    model every rank draws its shards, with the same bits as in one process; the reference model must be the same on all ranks.

    Args:
        model: The model. Its parameters are written over.
        since: The run of `model`, or the plan from the reference to it.
        std: A function that builds the model at the reference, or such a model: its tensors are measured. A function is built
            several times, and entries that are equal each time are not random; one model shows less. Or a mapping from name
            patterns to sizes, to None for tensors that are left as they are, or to the reference:
            `{"*.dt_bias": None, "*": make_reference}`. By default `model` itself is measured, which is right only at the
            reference.
        seed: The number on which all draws depend.

    Returns:
        The same model.

    Raises:
        MupscaleError: If a parameter has no memory, or its size at the reference is not known.

    >>> import mupscale as mu
    >>> make = lambda n: nn.Linear(n, n, bias=False)
    >>> model = init_weights_(make(256), mu.plans.plan_between(make, 64, 256), std={"weight": 1.0})
    >>> round(float(model.weight.detach().std()), 2)
    0.5
    """
    plan = since_of(since, model)
    check_end(plan, model, "wide")
    raise_faults(
        "initialisation needs sizes at the reference", [*_wrong_std(std), *wrong_whole("seed", seed)]
    )
    empty = [name for name, kind, t in named_tensors(model) if kind == "parameter" and t.is_meta]
    remedy = "give it some first: model.to_empty(device=…)"
    raise_faults(
        "nothing can be drawn into these",
        [Fault("init.no_memory", n, "it has no memory", remedy) for n in empty],
    )
    shapes, kept = _shapes(model, plan, std)
    _agree([t for _, _, t in named_tensors(model)], shapes, kept)
    with torch.no_grad():
        for name, (kind, tensor) in unique_tensors(model)[0].items():
            planned = plan.planned(name)
            if kind == "parameter" and (shape := shapes[planned]) is not None:
                stream = Stream(seed, f"init {planned}")
                local_of(tensor).copy_(_draw(shape, plan[planned], stream, tensor, kept.get(planned)))
    return model


def _wrong_std(std: object) -> list[Fault]:
    """Faults unless `std` is a model with weights or a function, or a mapping from name patterns to these or numbers."""
    if std is None or not isinstance(std, Mapping):
        return [] if std is None else _wrong_reference("std", std)
    faults: list[Fault] = []
    for pattern, size in std.items():
        where = f"std, {pattern}"
        if isinstance(size, nn.Module) or callable(size):
            faults += _wrong_reference(where, size)
        elif size is not None:
            faults += wrong_number(where, size, "write a size, or None to leave it as built")
    return faults


def _wrong_reference(where: str, reference: object) -> list[Fault]:
    if isinstance(reference, nn.Module):
        empty = [name for name, kind, t in named_tensors(reference) if kind == "parameter" and t.is_meta]
        remedy = "build the reference with its weights, without on_meta"
        what = "it is on the meta device and has no numbers"
        return [Fault("model.on_meta_device", f"{where}, {name}", what, remedy) for name in empty]
    if callable(reference):
        return []
    what = f"it is {shown(reference)}, expected a model or sizes by name"
    return [
        Fault("argument.wrong_type", where, what, 'write std=make(reference), or std={"*.weight": 0.02, …}')
    ]


def _draw(
    shape: Shape, entry: TensorPlan, stream: Stream, tensor: Tensor, kept: KeptEntries | None
) -> Tensor:
    """The values of this process's part of a tensor."""
    fold, like, part = float(entry.fold), local_of(tensor), local_rectangle(tensor)
    if kept is not None:
        mask = _cut(kept.mask, part).to(like.device)
        own = like if kept.values is None else _cut(kept.values, part).to(like)
        own = own if fold == 1 else (own + entry.shift) * fold - entry.shift
        drawn = like if shape.std == 0 else _draw(shape, entry, stream, tensor, None)
        return torch.where(mask, own, drawn.to(own.dtype))
    if shape.std == 0:
        return torch.full_like(like, (shape.mean + entry.shift) * fold - entry.shift)
    size = shape.std * float(noise_size(entry.axes, entry.fold))
    draw = uniforms if shape.uniform else normals
    z = rectangle(stream, entry.wide_shape, part.start, part.shape, like.device, draw)
    if shape.uniform:
        z = (z * 2 - 1) * sqrt(3)
    return z.to(torch.promote_types(like.dtype, torch.float32)) * size + (fold - 1) * entry.shift


def _cut(whole: Tensor, part: Rectangle) -> Tensor:
    for dim, (start, length) in enumerate(zip(part.start, part.shape, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


def _agree(
    tensors: Iterable[Any], shapes: Mapping[str, Shape | None], kept: Mapping[str, KeptEntries]
) -> None:
    """Raise on every rank of a sharded model unless all ranks have the same sizes."""
    differ = False
    described = repr((sorted(shapes.items()), sorted((name, int(k.mask.sum())) for name, k in kept.items())))
    for mesh in dict.fromkeys(t.device_mesh for t in tensors if is_sharded(t)):
        digest = int.from_bytes(blake2b(described.encode(), digest_size=7).digest(), "big")
        ends = torch.tensor([digest, -digest], device=mesh.device_type)
        for group in mesh.get_all_groups():  # all groups before any rank raises, or other ranks would hang
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
        differ |= int(ends[0]) != -int(ends[1])
    if differ:
        raise MupscaleError(
            "the ranks measured different sizes at the reference, and their shards would not fit together; build "
            "the reference after torch.manual_seed with one seed for all, or pass sizes by name, std={…}",
            code="init.ranks_differ",
        )


def _shapes(model: nn.Module, plan: Plan, std: Std) -> tuple[dict[str, Shape | None], dict[str, KeptEntries]]:
    """The distribution of every parameter at the reference, None for those that are left as built, and what is kept."""
    given: Mapping[str, Any] = {} if std is None else std if isinstance(std, Mapping) else {"*": std}
    unused = [p for p in given if not any(n == p or fnmatchcase(n, p) for n in plan.tensors)]
    remedy = "write the name of a parameter, or a pattern such as *.weight"
    faults = [
        Fault(
            "argument.pattern_matches_nothing", p, "declared in std, but no parameter has such a name", remedy
        )
        for p in unused
    ]
    references = {id(value): _Reference(value, plan) for value in given.values() if callable(value)}
    itself: _Reference | None = None
    own = {plan.planned(name): t for name, kind, t in named_tensors(model) if kind == "parameter"}
    found: dict[str, Shape | None] = {}
    kept: dict[str, KeptEntries] = {}
    for name, entry in plan.tensors.items():
        if entry.kind != "parameter":
            continue
        values = [value for pattern, value in given.items() if name == pattern or fnmatchcase(name, pattern)]
        if values and not callable(values[0]):
            found[name] = None if values[0] is None else Shape(0.0, float(values[0]))
            if values[0] and name in (rows := padding_rows(model)):
                zeros = torch.zeros(entry.wide_shape, device="cpu")
                kept[name] = KeptEntries(
                    zeros.index_fill(0, torch.tensor(rows[name], device="cpu"), 1).bool(), zeros
                )
            continue
        if values:
            found[name], held, fault = references[id(values[0])].shape_of(name, entry, own[name])
        else:
            itself = itself or _Reference(model)
            found[name], held, fault = itself.shape_of(name, entry, own[name])
            shape = found[name]
            if entry.grows and shape is not None and shape.std:
                what = "it grows from the reference, and its size there is not known"
                fault = fault or Fault(
                    "init.size_unknown", name, what, f'pass std=make(reference), or std={{"{name}": …}}'
                )
        faults += [] if fault is None else [fault]
        if held is not None:
            kept[name] = held
    raise_faults("initialisation needs sizes at the reference", faults)
    return found, kept


class _Reference:
    """A model that is measured, with the entries that it does not draw. Without a plan it is the model itself."""

    def __init__(self, given: Reference, plan: Plan | None = None) -> None:
        builds = [given] if isinstance(given, nn.Module) else builds_of(given)
        if plan is not None:
            check_end(plan, builds[0], "base")
        self._is_model = plan is None
        self._tensors = {name: t for name, kind, t in named_tensors(builds[0]) if kind == "parameter"}
        self._fixed = fixed_entries(builds)

    def shape_of(
        self, name: str, entry: TensorPlan, own: Tensor
    ) -> tuple[Shape | None, KeptEntries | None, Fault | None]:
        """How a tensor is distributed, what of it is kept, and why it cannot be drawn, if it cannot."""
        source = name if self._is_model else entry.sources[0] if entry.like is None else entry.like
        tensor, fixed = whole(self._tensors[source]), self._fixed[source]
        if not fixed.any() or bool((tensor == tensor.flatten()[0]).all()):
            shape = Shape.measured(tensor)
            return shape, None, _off_centre(name, shape)
        shape = Shape(0.0, 0.0) if fixed.all() else Shape.measured(tensor[~fixed])
        if self._is_model:
            return shape, KeptEntries(fixed, None), _off_centre(name, shape)
        kept = _kept(tensor, fixed, entry, own)
        if kept is None:
            what = "parts of it are random and parts are not, and the model has them elsewhere than the reference"
            return None, None, Fault("init.fixed_parts_elsewhere", name, what, _left(name))
        return shape, kept, _off_centre(name, shape)


def _kept(tensor: Tensor, fixed: Tensor, entry: TensorPlan, own: Tensor) -> KeptEntries | None:
    """The entries of the wide tensor that are not drawn; None if they cannot be known."""
    values = alike(torch.where(fixed, tensor, torch.zeros_like(tensor)), entry)
    mask = alike(fixed, entry)
    if mask is not None and (values is not None or bool(mask.all())):
        return KeptEntries(mask, values)
    if bool(fixed.all()):
        return KeptEntries(torch.ones(entry.wide_shape, dtype=torch.bool, device=fixed.device), None)
    mask, values = stretched(fixed, entry), stretched(tensor, entry)
    there = whole(own).to(values)
    return KeptEntries(mask, None) if torch.equal(there[mask], values[mask]) else None


def _left(name: str) -> str:
    return f'give its size, or leave it as built: std={{"{name}": None, "*": make(reference)}}'


def _off_centre(name: str, shape: Shape) -> Fault | None:
    if not (shape.mean and shape.std):
        return None
    what = f"neither constant nor centred (mean {shape.mean:.3g}, size {shape.std:.3g})"
    return Fault("init.off_centre", name, what, _left(name))
