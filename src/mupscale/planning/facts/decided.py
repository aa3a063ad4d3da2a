"""Which plans are decided by torch's own modules: what runs in containers whose forward is known.

The shapes of a `Linear` do not show what a user's forward does with its output: it may be cut into heads, summed,
or divided by a root of the width. An `nn.Sequential` does nothing of that kind. Here the growing features are followed
through such a container, from module to module, and compared with the axes of the plan:

    Conv2d(1, n, 3)     writes channels     4x2             (4 channels, each twice)
    Flatten()           9 pixels a channel  4x2 · 9
    Linear(9n, 2)       reads               4x2 · 9         as the plan has it: decided

Anything else, a class with a forward of its own among it, is not decided here, and needs a measurement.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from ...arguments import shown
from ...models.class_code import of_library
from ...models.names import module_paths, name_in
from ...plans.plan import Plan
from ...rules.axes import Axis
from ...rules.products import Factor
from .modules import ModuleFacts, row_of

# What torch's own transformer encoder consists of.
_ENCODER = (
    nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.ModuleList, nn.MultiheadAttention, nn.Linear, nn.LayerNorm,
    nn.Dropout, nn.modules.linear.NonDynamicallyQuantizableLinear,
)  # fmt: skip
_GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
)  # fmt: skip

Place = Literal["anywhere", "last", "channels", "flattened"]


@dataclass(frozen=True)
class _Features:
    """The axis that grows in an activation, and the dimension it is; none while nothing grows."""

    axis: Axis | None = None
    place: Place = "anywhere"
    spatial: int = 0
    """How many dimensions follow the channels."""


class _UnknownError(Exception):
    """A module whose use of the growing features is not known; the message says which, and why."""


def why_undecided(base: nn.Module, wide: nn.Module, plan: Plan) -> str | None:
    """The first reason why modules alone do not decide a plan, or None if they do.

    >>> from mupscale.planning.draft import draft
    >>> from mupscale.rules.products import Ways
    >>> def reason(make: Callable[[int], nn.Module]) -> str | None:
    ...     return why_undecided(make(4), make(8), draft(make(4), make(8), Ways(), None)[0].plan())
    >>> reason(lambda n: nn.Sequential(nn.Linear(3, n), nn.ReLU(), nn.Linear(n, 2)))
    >>> reason(lambda n: nn.Sequential(nn.Linear(3, n), nn.Softmax(-1), nn.Linear(n, 2)))
    'what Softmax (1) does with a growing axis is not known'
    """
    try:
        _same_modules(base, wide)
        if _own(base) and row_of(base).roles:
            return None
        if _through(base, "", _Features(), plan).axis is not None:
            raise _UnknownError("its output grows, and what a loss does with the copies is not known")
    except _UnknownError as reason:
        return str(reason)
    return None


def _same_modules(base: nn.Module, wide: nn.Module) -> None:
    """Raise unless both models consist of the same modules."""
    others = dict(module_paths(wide))
    if any(getattr(nn.modules.module, hooks) for hooks in _GLOBAL_HOOKS):
        raise _UnknownError("a hook is registered for all modules of torch, which is code")
    for path, module in dict(module_paths(base)).items():
        other = others.pop(path, None)
        if other is None or type(other) is not type(module):
            raise _UnknownError(f"the wide model has another module in the place of {_named(module, path)}")
        if _hooked(module) or _hooked(other):
            raise _UnknownError(f"{_named(module, path)} has hooks or a forward of its own, which are code")
        if _own(module):
            if not all(of_library(getattr(type(module), name)) for name in ("forward", "__call__")):
                raise _UnknownError(f"the forward of {type(module).__name__}, a class of torch, was replaced")
            for key in sorted({*vars(module), *vars(other)} - {*row_of(module).sizes, *vars(nn.Module())}):
                if key.startswith(("_flat_weight", "_compile")):
                    continue  # tensors of recurrent layers, and what torch.compile keeps
                mine, its = vars(module).get(key), vars(other).get(key)
                if not _same_setting(mine, its):
                    what = f"{key} of {_named(module, path)} is {shown(mine)} in the base and {shown(its)} in the wide model"
                    raise _UnknownError(f"{what}, and shapes do not show what that does")
    for path, module in others.items():
        raise _UnknownError(f"the base has no module in the place of {_named(module, path)}")


def _same_setting(base: object, wide: object) -> bool:
    """True if two settings are equal, or are not settings: modules and tensors are compared elsewhere."""
    held = (nn.Module, Tensor)
    if any(
        isinstance(value, held)
        for side in (base, wide)
        for value in (side if isinstance(side, list) else [side])
    ):
        return True
    return callable(base) == callable(wide) and bool(base == wide)


def _own(module: nn.Module) -> bool:
    """True for a class of torch; a subclass of a user may have any forward."""
    return type(module).__module__.startswith("torch.nn.modules.")


def _hooked(module: nn.Module) -> bool:
    """True if code was attached to a module: hooks on it or on its parameters, or a forward of this very object."""
    on_module = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_tensor = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return (
        "forward" in vars(module)
        or any(getattr(module, key) for key in on_module)
        or any(getattr(p, key, None) for p in module.parameters(recurse=False) for key in on_tensor)
    )


def _named(module: nn.Module, path: str) -> str:
    return f"{type(module).__name__} ({path})" if path else type(module).__name__


def _through(module: nn.Module, path: str, features: _Features, plan: Plan) -> _Features:
    """The features behind a module; raises where they are not known."""
    kind = type(module)
    row = row_of(module) if _own(module) else ModuleFacts()
    for wrapped in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"):
        if (inner := module._modules.get(wrapped)) is not None:
            return _through(inner, path, features, plan)
    if kind is nn.Sequential:
        for name, child in module._modules.items():
            assert child is not None
            features = _through(child, name_in(path, name), features, plan)
        return features
    if row.features == "entrywise":
        if features.axis is not None and features.axis.padded and not _keeps_zero(module):
            raise _UnknownError(
                f"{_named(module, path)} turns the zeros of a padded axis into something else"
            )
        return features
    if kind in (nn.TransformerEncoder, nn.TransformerEncoderLayer):
        return _encoder(module, path, features, plan)
    if kind is nn.Flatten and features.axis is None:
        return features
    if (
        isinstance(module, nn.Flatten)
        and kind is nn.Flatten
        and [module.start_dim, module.end_dim] == [1, -1]
    ):
        return _Features(features.axis, "flattened" if features.place == "channels" else "last")
    if row.features == "per channel":
        return _at(features, "channels", module, path, _spatial(kind))
    if kind is nn.Linear:
        return _layer(module, path, features, plan, "last")
    if row.roles and isinstance(module, _ConvNd) and module.groups == 1:
        return _layer(module, path, features, plan, "channels")
    if kind is nn.Embedding and features.axis is None:
        return _Features(_grown(plan, name_in(path, "weight"), 1), "last")
    if row.roles and isinstance(module, (_NormBase, nn.GroupNorm)):
        # A BatchNorm1d behind a Linear has its features in dimension 1, which is the last one.
        last = features.place == "last" and kind in (nn.BatchNorm1d, nn.SyncBatchNorm)
        if not last and kind not in (nn.GroupNorm, nn.SyncBatchNorm):
            _at(features, "channels", module, path, _spatial(kind))
        return _norm(module, path, features, plan, "last" if last else "channels")
    if kind in (nn.LayerNorm, nn.RMSNorm) and len(module.normalized_shape) == 1:  # type: ignore[arg-type]
        return _norm(module, path, features, plan, "last")
    if not any(True for _ in module.parameters()) or _own(module):
        raise _UnknownError(f"what {_named(module, path)} does with a growing axis is not known")
    raise _UnknownError(
        f"{_named(module, path)} has a forward of its own, and shapes do not show what it does"
    )


def _keeps_zero(module: nn.Module) -> bool:
    """True for a function of one entry that maps 0 to 0."""
    return row_of(module).keeps_zero and bool(
        (copy.deepcopy(module).eval()(torch.zeros(1, device="cpu")) == 0).all()
    )


def _spatial(kind: type[nn.Module]) -> int:
    """How many dimensions after the channels a class expects, from its name.

    >>> _spatial(nn.AvgPool2d), _spatial(nn.Conv1d)
    (2, 1)
    """
    return int(kind.__name__[-2])


def _at(
    features: _Features, place: Place, module: nn.Module, path: str, spatial: int | None = None
) -> _Features:
    """The features, if they are where a module expects them, before `spatial` other dimensions."""
    elsewhere = features.place != place or spatial not in (None, features.spatial)
    if features.axis is not None and elsewhere:
        raise _UnknownError(f"{_named(module, path)} is applied along a growing axis that it does not name")
    return features


def _grown(plan: Plan, name: str, dim: int) -> Axis | None:
    axis = plan[name].axes[dim]
    return axis if axis.grows else None


def _layer(module: nn.Module, path: str, features: _Features, plan: Plan, place: Place) -> _Features:
    """A linear layer or a convolution: it reads the features that came, in the layout of the plan, and writes others."""
    name = name_in(path, "weight")
    inward, outward = (1, 0) if not getattr(module, "transposed", False) else (0, 1)
    reads = _grown(plan, name, inward)
    came = features.axis
    if came is not None and features.place == "flattened" and place == "last" and reads is not None:
        times, rest = divmod(reads.base, came.base)
        if rest == 0 and len(came.segments) == 1:
            came = Axis.of((*came.segments[0], Factor(times)), role="in")
        features = _Features(came, "last")
    _at(features, place, module, path, _spatial(type(module)) if place == "channels" else None)
    first = came is None and features.place == "anywhere"
    if not first and (came.segments if came else None) != (reads.segments if reads else None):
        raise _UnknownError(f"the order in which {_named(module, path)} reads a growing axis is not known")
    writes = _grown(plan, name, outward)
    bias = name_in(path, "bias")
    if bias in plan and plan[bias].axes[0].segments != plan[name].axes[outward].segments:
        raise _UnknownError(f"bias and weight of {_named(module, path)} have different layouts")
    return _Features(writes, place, _spatial(type(module)) if place == "channels" else 0)


def _norm(module: nn.Module, path: str, features: _Features, plan: Plan, place: Place) -> _Features:
    _at(features, place, module, path)
    for name, _ in (*module.named_parameters(), *module.named_buffers()):
        entry = plan[name_in(path, name)]
        grown = entry.axes[0] if entry.axes and entry.axes[0].grows else None
        came = features.axis
        if entry.axes and (grown.segments if grown else None) != (came.segments if came else None):
            if came is None and features.place == "anywhere":
                continue
            raise _UnknownError(f"{_named(module, path)} has another layout than the features that reach it")
    return features


def _encoder(module: nn.Module, path: str, features: _Features, plan: Plan) -> _Features:
    """torch's own transformer encoder, or one of its layers: plain features in, the same features out."""
    _at(features, "last", module, path)
    for name, child in module.named_modules():
        inner = f"{path}.{name}" if path and name else path or name
        if type(child) not in _ENCODER:
            raise _UnknownError(f"what {_named(child, inner)} does in a transformer encoder is not known")
        if type(child) is nn.TransformerEncoderLayer:
            if type(child.norm1) is not nn.LayerNorm or type(child.norm2) is not nn.LayerNorm:
                raise _UnknownError(f"the norms of {_named(child, inner)} are not torch's")
            if child.activation_relu_or_gelu == 0:
                raise _UnknownError(f"the activation of {_named(child, inner)} is a user's function")
            ends = [_grown(plan, name_in(inner, f"{leaf}.weight"), dim)
                    for leaf, dim in (("linear1", 1), ("linear2", 0), ("self_attn.out_proj", 0), ("norm1", 0))]  # fmt: skip
            middle = [_grown(plan, name_in(inner, f"{leaf}.weight"), dim)
                      for leaf, dim in (("linear1", 0), ("linear2", 1))]  # fmt: skip
            came = features.axis if features.place != "anywhere" else ends[0]
            for group in ([came, *ends], middle):
                if len({axis.segments if axis else None for axis in group}) > 1:
                    raise _UnknownError(f"the layouts inside {_named(child, inner)} differ")
            features = _Features(came, "last")
    return features
