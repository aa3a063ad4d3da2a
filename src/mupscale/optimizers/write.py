"""Named optimizers written out: as a live optimizer, or as a state dict keyed by name or by position.

Files and shards take the carried values themselves (`checkpoints/state/trainer_state.py`, `sharded/fill.py`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..errors import MupscaleError
from ..models.names import named_tensors
from .named import NamedOptimizer
from .read import Names
from .rows import stacked


def write_live(named: NamedOptimizer, like: Optimizer, model: nn.Module) -> Optimizer:
    """An optimizer of the parameters of `model`, of the class of `like` and with its defaults.

    Its groups have names, so that its state dict can be loaded into an optimizer of another process.
    """
    parameters = {n: t for n, k, t in named_tensors(model) if k == "parameter"}
    accepted = inspect.signature(type(like).__init__).parameters
    settings = {k: copy.deepcopy(v) for k, v in like.defaults.items() if k in accepted}
    built = [{**group.settings, "params": [parameters[n] for n in group.names]} for group in named.groups]
    new = _built(like, built, settings)
    for group, own in zip(named.groups, new.param_groups, strict=True):
        # Set here and not given as pairs: a class that looks at its parameters before torch does expects tensors. Some
        # classes sort their parameters.
        own["params"], own["param_names"] = [parameters[n] for n in group.names], list(group.names)
    state = stacked(named.groups, named.state)
    order = (name for group in named.groups for name in group.names)
    new.state.update({parameters[name]: state[name] for name in order if name in state})
    return new


def _built(like: Optimizer, groups: list[dict[str, Any]], settings: dict[str, Any]) -> Optimizer:
    """An optimizer of the class of `like`, with the attributes that its constructor set and that are plain values.

    A class whose constructor takes something else than groups is built by torch's own constructor.
    """
    try:
        new = type(like)(groups, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        new = object.__new__(type(like))
        Optimizer.__init__(new, groups, copy.deepcopy(like.defaults))
        lost = [key for key in vars(like).keys() - vars(new).keys() if not _plain(vars(like)[key])]
        if lost:
            raise MupscaleError(
                f"{type(like).__name__} could not be built again from its defaults: {error}; carry its state dict with "
                "grow_optimizer_state_dict instead",
                code="optimizer.cannot_be_rebuilt",
            ) from error
    for key, value in vars(like).items():
        if key not in _torchs_own() and _plain(value):
            setattr(new, key, copy.deepcopy(value))
    return new


@cache
def _torchs_own() -> frozenset[str]:
    """Attributes that torch's constructor sets: groups, state, defaults and hooks.

    Not a constant, because the first optimizer of a process imports torch._dynamo, which takes as long as torch itself.
    """
    return frozenset(vars(SGD([nn.Parameter(torch.zeros(1, device="cpu"))])))


def _plain(value: Any, depth: int = 3) -> bool:
    """True for numbers, texts, types, single-number tensors, and containers and objects of them."""
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device, Enum)):
        return True
    if isinstance(value, Tensor):
        return not value.requires_grad and value.numel() == 1
    if not depth or callable(value):
        return False
    if isinstance(value, Mapping):
        return all(_plain(part, depth - 1) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_plain(part, depth - 1) for part in value)
    return hasattr(value, "__dict__") and all(_plain(part, depth - 1) for part in vars(value).values())


def write_state_dict(named: NamedOptimizer, by_name: bool) -> dict[str, Any]:
    """A state dict whose groups hold names, keyed by them or by position."""
    order = [name for group in named.groups for name in group.names]
    keys: dict[str, Any] = {name: name if by_name else position for position, name in enumerate(order)}
    groups = [
        {**g.settings, "params": [keys[n] for n in g.names], "param_names": list(g.names)}
        for g in named.groups
    ]
    kept = stacked(named.groups, named.state)
    state = {key: kept[name] for name, key in keys.items() if name in kept}
    return {"state": state, "param_groups": groups}


def write_positions(
    named: NamedOptimizer, groups: Sequence[Mapping[str, Any]], order: Names
) -> dict[str, Any]:
    """A trainer's state dict with the settings of its groups unchanged, and its parameters in this order."""
    names = [name for of in order for name in of]
    kept, first = [], 0
    for group, of in zip(groups, order, strict=True):
        members = {"param_names": list(of)} if "param_names" in group else {}
        kept.append({**group, **members, "params": list(range(first, first + len(of)))})
        first += len(of)
    state = {position: named.state[name] for position, name in enumerate(names) if name in named.state}
    return {"state": state, "param_groups": kept}
