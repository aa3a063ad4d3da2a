"""Models that accelerate spreads over devices (`dispatch_model`, `device_map=`): its hooks take inputs to the weights.

Weights of a grown model are where the base has them, so both models need the same map, or neither has one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import Fault, raise_faults
from .names import unwrap


def refuse_other_device_map(base: nn.Module, wide: nn.Module) -> None:
    """Raise if accelerate moves inputs in one of two models and not in the other, or to another device."""
    there, here = _device_map(base), _device_map(wide)
    if there is None and here is None:
        return
    if there is None:
        what = "accelerate spreads the wide model over devices, and the base not"
        remedy = (
            "return the model without device_map or dispatch_model: its weights go where the base has them"
        )
    elif here is None:
        what = "accelerate spreads the base over devices, and not the wide model, whose weights go to the same places"
        remedy = "return accelerate.dispatch_model(model, device_map=base.hf_device_map)"
    else:
        others = [name for name, place in there.items() if here.get(name, place) != place]
        if not others:
            return
        what = f"{others[0]} is on {here[others[0]]}, in the base on {there[others[0]]}"
        remedy = "pass device_map=base.hf_device_map: weights go where the base has them"
    raise_faults(
        "the wide model would look for weights on other devices",
        [Fault("factory.other_device_map", "device_map", what, remedy)],
    )


def _device_map(model: nn.Module) -> dict[str, str] | None:
    """The devices of modules by name, if accelerate's hooks are on the model; a model on one device has none."""
    if not any(hasattr(module, "_hf_hook") for module in model.modules()):
        return None
    found: dict[str, Any] = getattr(unwrap(model), "hf_device_map", {})
    return {name: str(torch.device(at) if isinstance(at, int) else at) for name, at in found.items()}
