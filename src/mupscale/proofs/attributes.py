"""What differs between a base and a wide model beside their weights: constants, flags, plain tensors, buffers, hooks.

A factory builds the wide model anew, so that what was set on the base afterwards is missing in it. A difference is
named only after it was tried: with the base's values in the wide model, the first loss agrees.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import shown
from ..models.names import module_paths
from ..tensors.differences import loss_gap
from .causes import attribute_cause
from .identity import Loss
from .trial import Step, Trial, go

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def attributes(trial: Trial, step: Step | None, loss: Loss | None) -> str | None:
    """The cause, if the two models of a fresh trial differ in an attribute and agree once it is set."""
    base, wide = (dict(module_paths(side.model)) for side in (trial.base, trial.wide))
    found: list[str] = []
    for path, module in base.items():
        if path in wide:
            found += _set_(module, wide[path], path)
    if not found:
        return None
    gap = loss_gap(go(trial.base, step, loss), go(trial.wide, step, loss))
    return attribute_cause(found[0]) if gap <= trial.tolerance else None


def _set_(base: nn.Module, wide: nn.Module, path: str) -> list[str]:
    """Set what differs in the wide module to the base's, and say what it was."""
    found: list[str] = []
    ends = f"{path}." if path else ""
    for name, old in vars(base).items():
        new: Any = vars(wide).get(name)
        if name in _HOOKS:
            if len(old) > len(new):
                found.append(
                    f"{path or 'the model'} has {len(old)} forward hooks in the base and {len(new)} in the wide model"
                )
                vars(wide)[name] = old
        elif not name.startswith("_") and name in vars(wide) and _differ(old, new):
            found.append(_described(f"{ends}{name}", old, new))
            setattr(wide, name, old)
    for name, buffer in base._buffers.items():
        other = wide._buffers.get(name)
        if buffer is not None and other is not None and _differ(buffer, other):
            found.append(_described(f"{ends}{name}", buffer, other))
            wide._buffers[name] = buffer.clone()
    return found


def _differ(old: Any, new: Any) -> bool:
    """True for flags, numbers and tensors of one shape that differ; a whole number that is a multiple is a size."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        same = old.shape == new.shape and old.dtype == new.dtype
        return same and not torch.equal(old, new)
    if isinstance(old, (bool, str, float)):
        return type(old) is type(new) and old != new
    if isinstance(old, int) and isinstance(new, int):
        return old != new and (old <= 0 or new % old != 0)
    return False


def _described(where: str, old: Any, new: Any) -> str:
    if isinstance(old, Tensor):
        return f"{where} has other values in the wide model than in the base"
    return f"{where} is {shown(old)} in the base and {shown(new)} in the wide model"
