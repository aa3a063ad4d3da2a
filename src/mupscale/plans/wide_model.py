"""The one way to make a wide model: proofs, the search, chosen noise and growing itself all fill models here.

A filled model has everything of the other end of a plan: weights and buffers, which of them train, ties, the hooks of
gradients, the modes of modules, gradient checkpointing, and settings that are no tensors. Tensors are made in new memory, on
the devices and in the dtypes of the source, so a model may be built on the meta device. The search fills one
model hundreds of times: `in_place` writes into the tensors that are there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import MupscaleError
from ..models.class_code import code_of, of_library
from ..models.clone import rebind_
from ..models.names import module_paths, named_tensors, unique_tensors, unwrap
from .attributes import CHECKPOINT, CHECKPOINTING, carry_attributes_, compare_attributes
from .block_order import base_path, moved_blocks
from .direction import Direction
from .gradient_hooks import carry_hooks_
from .plan import Plan


def fill_model_(
    model: nn.Module,
    source: nn.Module,
    direction: Direction,
    *,
    settings: bool = True,
    hooks: bool = True,
    in_place: bool = False,
) -> nn.Module:
    """Put what `source` holds, at the other end of the plan, into a model that was built for it, and return the model.

    With `settings` attributes that are not tensors are carried, with `hooks` those on gradients, which models that are not
    trained do without. `in_place` is for copies to measure on: tensors are written where they are, settings were carried
    before the copies were made, and copies have no hooks on gradients.

    >>> from mupscale.plans import plan_between
    >>> def make(n): return nn.Sequential(nn.Linear(3, n), nn.Linear(n, 1))
    >>> base, wide = make(2), make(4)
    >>> _ = base[1].bias.requires_grad_(False)
    >>> filled = fill_model_(wide, base, Direction(plan_between(make, 2, 4)))
    >>> filled[1].bias.requires_grad, bool((filled[1].weight[:, ::2] == base[1].weight / 2).all())
    (False, True)
    """
    inner, outer = unwrap(model), unwrap(source)
    tensors = {name: tensor for name, _, tensor in named_tensors(outer)}
    first = unique_tensors(inner)[0]
    make = _write_ if in_place else _new
    with torch.no_grad():
        made = {id(old): make(name, kind, old, tensors, direction) for name, (kind, old) in first.items()}
    plan = None if direction.back else direction.plan
    if not in_place:
        _replace_(inner, made)
        if hooks:
            renewed = {name: (old, made[id(old)]) for name, (_, old) in first.items()}
            carry_hooks_(inner, outer, direction, renewed)
        if settings:
            carry_attributes_(inner, compare_attributes(outer, inner, plan))
            _carry_checkpointing_(inner, outer, plan)
    _copy_modes_(inner, outer, plan)
    return model


def _write_(
    name: str, kind: str, target: Tensor, tensors: Mapping[str, Tensor], direction: Direction
) -> Tensor:
    """Write a weight or buffer into the tensor that is there, and return it; what the model computes itself stays."""
    if direction.planned(name)[1].fill != "own":
        direction.tensor(tensors, name, out=target)
    return target.requires_grad_(_trains(name, tensors, direction)) if kind == "parameter" else target


def _new(name: str, kind: str, old: Tensor, tensors: Mapping[str, Tensor], direction: Direction) -> Tensor:
    """A weight or buffer in new memory, where the tensor is that it is made from or like; else where the first one is."""
    start = direction.origin(name)
    like = None if start is None else tensors[start]
    place = next((t.device for t in (like, *tensors.values()) if t is not None), old.device)
    if direction.planned(name)[1].fill == "own":
        if old.is_meta:
            raise MupscaleError(
                "a tensor that the wide model computes itself was built on the meta device; compute it in a factory "
                "that is not under torch.device",
                code="model.computed_on_meta_device",
            )
        value = old.detach().to(place, old.dtype if like is None else like.dtype, copy=True)
    else:
        out = torch.empty(old.shape, dtype=old.dtype, device=place) if like is None else None
        value = direction.tensor(tensors, name, out=out)
    if kind == "parameter":
        value = nn.Parameter(value, requires_grad=_trains(name, tensors, direction))
    value.__dict__.update(old.__dict__)
    return value


def _trains(name: str, tensors: Mapping[str, Tensor], direction: Direction) -> bool:
    """True if the parameter that it is made from, or like, trains; one that is like none does."""
    start = direction.origin(name)
    return direction.planned(name)[1].trainable and (start is None or tensors[start].requires_grad)


def _replace_(model: nn.Module, made: Mapping[int, Tensor]) -> None:
    """Put new tensors in place of old ones, given by the ids of the old; ties stay ties."""
    for module in model.modules():
        for leaf, old in [*module._parameters.items(), *module._buffers.items()]:
            if id(old) in made:
                # Not through the dicts: recurrent layers keep a list of their weights up to date here.
                setattr(module, leaf, made[id(old)])
    rebind_(model, made)


def _copy_modes_(model: nn.Module, source: nn.Module, plan: Plan | None) -> None:
    """Give every module the mode that it has in the source; new blocks get that of the whole model."""
    modes = {path: module.training for path, module in module_paths(source)}
    moved = {} if plan is None else moved_blocks(plan)
    for path, module in module_paths(model):
        origin = base_path(path, moved)
        module.training = source.training if origin is None else modes.get(origin, module.training)


def _carry_checkpointing_(model: nn.Module, source: nn.Module, plan: Plan | None) -> None:
    """Switch on the gradient checkpointing of transformers where the source has it: a flag, and the function that it calls.

    A function of the user's own may hold the source, so it is not shared. A flag that `__init__` takes is the factory's.
    """
    modules = dict(module_paths(source))
    alike = {type(module): module for module in modules.values()}
    moved = {} if plan is None else moved_blocks(plan)
    for path, module in module_paths(model):
        origin = base_path(path, moved)
        found = alike.get(type(module)) if origin is None else modules.get(origin)
        held = {} if found is None else vars(found)
        if not held.get(CHECKPOINTING) or CHECKPOINTING in code_of(type(module)).settings:
            continue
        if of_library(held.get(CHECKPOINT, checkpoint)):
            vars(module).update({key: held[key] for key in (CHECKPOINTING, CHECKPOINT) if key in held})
