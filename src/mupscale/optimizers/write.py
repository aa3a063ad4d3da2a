"""Named optimizers written out: as a live optimizer, or as a state dict keyed by name or by position.

Files and shards take the carried values themselves (`checkpoints/trainer_state.py`, `sharded/fill.py`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import MupscaleError
from ..plans.names import named_tensors
from .named import NamedOptimizer
from .read import Names


def write_live(named: NamedOptimizer, like: Optimizer, model: nn.Module) -> Optimizer:
    """An optimizer of the parameters of `model`, of the class of `like` and with its defaults.

    Its groups have names, so that its state dict can be loaded into an optimizer of another process.
    """
    parameters = {n: t for n, k, t in named_tensors(model) if k == "parameter"}
    accepted = inspect.signature(type(like).__init__).parameters
    settings = {k: copy.deepcopy(v) for k, v in like.defaults.items() if k in accepted}
    built: list[dict[str, Any]] = []
    for group in named.groups:
        built.append({**group.settings, "params": [parameters[n] for n in group.names]})
    try:
        new = type(like)(built, **settings)
    except (TypeError, ValueError) as error:
        raise MupscaleError(
            f"{type(like).__name__} could not be built again from its defaults: {error}; carry its state dict with "
            "widen_optimizer_state_dict instead"
        ) from error
    for group, own in zip(named.groups, new.param_groups, strict=True):
        # Set here and not given as pairs: a class that looks at its parameters before torch does expects tensors.
        own["param_names"] = list(group.names)
    order = (name for group in named.groups for name in group.names)
    new.state.update({parameters[name]: named.state[name] for name in order if name in named.state})
    return new


def write_state_dict(named: NamedOptimizer, by_name: bool) -> dict[str, Any]:
    """A state dict whose groups hold names, keyed by them or by position."""
    order = [name for group in named.groups for name in group.names]
    keys: dict[str, Any] = {name: name if by_name else position for position, name in enumerate(order)}
    groups = [
        {**g.settings, "params": [keys[n] for n in g.names], "param_names": list(g.names)}
        for g in named.groups
    ]
    state = {key: named.state[name] for name, key in keys.items() if name in named.state}
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
