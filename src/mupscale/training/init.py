"""Initialise a model at any width from its sizes at the reference.

Every tensor is drawn from the counter-based generator, so the result depends on (seed, name, index) and
not on sharding. Its size is std(reference) · q, with q from `rules/sizes.py`; at the reference, where q = 1, the
distribution is the model's own: normal stays normal, uniform stays uniform, constants stay constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..arguments import shown, wrong_number, wrong_whole
from ..errors import Fault, MupscaleError, raise_faults
from ..plans.fits import check_end
from ..plans.names import named_tensors
from ..plans.plan import Plan, TensorPlan
from ..rules.sizes import noise_size
from ..runs.run import Since, since_of
from ..tensors.noise import rectangle
from ..tensors.parts import is_sharded, local_of, local_rectangle
from ..tensors.philox import Stream, normals, uniforms

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
        """Measure a tensor. Constants have std 0; a tensor that is neither constant nor centred is refused later.

        A sharded tensor is gathered, so that its size has the same bits as in one process.
        """
        whole: Tensor = tensor.detach()
        if is_sharded(whole):
            whole = whole.full_tensor()  # type: ignore[attr-defined]
        values = whole.double().flatten()
        if values.numel() == 0 or bool((values == values[0]).all()):
            return Shape(float(values[0]) if values.numel() else 0.0, 0.0)
        rms, mean = float(values.square().mean().sqrt()), float(values.mean())
        kurtosis = float((values / rms).pow(4).mean()) - 3
        off_centre = values.numel() >= _ENOUGH and abs(mean) > 0.5 * rms
        return Shape(
            mean if off_centre else 0.0, rms, values.numel() >= _ENOUGH and kurtosis < _UNIFORM_BELOW
        )


def init_(
    model: nn.Module,
    since: Since,
    *,
    std: nn.Module | Mapping[str, float | None] | None = None,
    seed: int = 0,
) -> nn.Module:
    """Initialise every parameter of `model` in place with the size that μP gives it, and return the model.

    `since` is the run of `model`, or the plan from the reference to it. `std` is either the model freshly built at the
    reference, whose tensors are measured, or a mapping from name patterns to sizes. Without it `model` itself is
    measured, which is right only at the reference. A pattern with None leaves its tensors as they were built.
    Constants (gains of one, biases of zero) keep their value, times a fold; a (1 + w) gain keeps (1 + w) times its
    fold; tied tensors are drawn once. In a sharded model every rank draws its shards, with the same bits as in one
    process; the reference model must be the same on all ranks.

    >>> import mupscale as mu
    >>> make = lambda n: nn.Linear(n, n, bias=False)
    >>> model = init_(make(256), mu.plan_between(make, 64, 256), std={"weight": 1.0})
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
    raise_faults("nothing can be drawn into these", [Fault(n, "it has no memory", remedy) for n in empty])
    shapes = _shapes(model, plan, std)
    _agree([t for _, _, t in named_tensors(model)], shapes)
    with torch.no_grad():
        seen: set[int] = set()
        for name, kind, tensor in named_tensors(model):
            if kind == "buffer" or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            planned = plan.planned(name)
            if (shape := shapes[planned]) is not None:
                local_of(tensor).copy_(_draw(shape, plan[planned], Stream(seed, f"init {planned}"), tensor))
    return model


def _wrong_std(std: object) -> list[Fault]:
    """Faults unless `std` is a model with weights, or a mapping from name patterns to numbers."""
    if std is None:
        return []
    if isinstance(std, nn.Module):
        empty = [name for name, kind, t in named_tensors(std) if kind == "parameter" and t.is_meta]
        remedy = "build the reference with its weights, without on_meta"
        return [
            Fault(f"std, {name}", "it is on the meta device and has no numbers", remedy) for name in empty
        ]
    if not isinstance(std, Mapping):
        what = f"it is {shown(std)}, expected a model or sizes by name"
        return [Fault("std", what, 'write std=make(reference), or std={"*.weight": 0.02, …}')]
    given = [(pattern, size) for pattern, size in std.items() if size is not None]
    remedy = "write a size, or None to leave it as built"
    return [fault for pattern, size in given for fault in wrong_number(f"std, {pattern}", size, remedy)]


def _draw(shape: Shape, entry: TensorPlan, stream: Stream, tensor: Tensor) -> Tensor:
    """The values of this process's part of a tensor."""
    fold, like = float(entry.fold), local_of(tensor)
    if shape.std == 0:
        return torch.full_like(like, (shape.mean + entry.shift) * fold - entry.shift)
    size = shape.std * float(noise_size(entry.axes, entry.fold))
    part, draw = local_rectangle(tensor), uniforms if shape.uniform else normals
    z = rectangle(stream, entry.wide_shape, part.start, part.shape, like.device, draw)
    if shape.uniform:
        z = (z * 2 - 1) * sqrt(3)
    return z.to(torch.promote_types(like.dtype, torch.float32)) * size + (fold - 1) * entry.shift


def _agree(tensors: Iterable[Any], shapes: Mapping[str, Shape | None]) -> None:
    """Raise on every rank of a sharded model unless all ranks have the same sizes."""
    differ = False
    for mesh in dict.fromkeys(t.device_mesh for t in tensors if is_sharded(t)):
        digest = int.from_bytes(blake2b(repr(sorted(shapes.items())).encode(), digest_size=7).digest(), "big")
        ends = torch.tensor([digest, -digest], device=mesh.device_type)
        for group in mesh.get_all_groups():  # all groups before any rank raises, or other ranks would hang
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
        differ |= int(ends[0]) != -int(ends[1])
    if differ:
        raise MupscaleError(
            "the ranks measured different sizes at the reference, and their shards would not fit together; build "
            "the reference after torch.manual_seed with one seed for all, or pass sizes by name, std={…}"
        )


def _shapes(
    model: nn.Module, plan: Plan, std: nn.Module | Mapping[str, float | None] | None
) -> dict[str, Shape | None]:
    """The distribution of every parameter at the reference; None for those that are left as built."""
    own = {name: t for name, kind, t in named_tensors(model) if kind == "parameter"}
    built: Mapping[str, Tensor] | None = None
    if isinstance(std, nn.Module):
        check_end(plan, std, "base")
        built = {name: t for name, _, t in named_tensors(std)}
    given = {} if std is None or isinstance(std, nn.Module) else std
    found: dict[str, Shape | None] = {}
    unused = [p for p in given if not any(n == p or fnmatchcase(n, p) for n in plan.tensors)]
    remedy = "write the name of a parameter, or a pattern such as *.weight"
    faults = [Fault(p, "declared in std, but no parameter has such a name", remedy) for p in unused]
    for name, entry in plan.tensors.items():
        if entry.kind != "parameter":
            continue
        sizes = [value for pattern, value in given.items() if name == pattern or fnmatchcase(name, pattern)]
        if sizes:
            found[name] = None if sizes[0] is None else Shape(0.0, float(sizes[0]))
            continue
        measured = Shape.measured(built[entry.sources[0]] if built is not None else own[name])
        found[name] = measured
        if measured.mean and measured.std:
            faults.append(
                Fault(
                    name,
                    f"neither constant nor centred (mean {measured.mean:.3g}, size {measured.std:.3g})",
                    f'give its size, or leave it as built with std={{"{name}": None}}',
                )
            )
        elif built is None and entry.grows and measured.std:
            faults.append(
                Fault(
                    name,
                    "it grows from the reference, and its size there is not known",
                    f'pass std=make(reference), or std={{"{name}": …}}',
                )
            )
    raise_faults("initialisation needs sizes at the reference", faults)
    return found
