"""Memory for a model that was built on the meta device, and NaN for one whose loading failed.

Parameters remain the same objects, so optimizers that were built from them stay valid. Buffers that the model
computes itself are either present already, or computed by `init`, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..errors import Fault
from ..tensors.parts import is_sharded, local_of


def home_of(model: nn.Module) -> torch.device:
    """The device a sharded model trains on: that of its mesh, the current one of its kind."""
    for tensor in model.parameters():
        if is_sharded(tensor):
            kind = tensor.device_mesh.device_type  # type: ignore[attr-defined]
            if kind == "cpu":
                break
            index = torch.get_device_module(kind).current_device()
            return torch.device(kind, index)
    return torch.device("cpu")


def give_memory_(model: nn.Module, device: torch.device) -> None:
    """Give every parameter and buffer on the meta device uninitialised memory."""
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        # `_apply` instead of assignment, because FSDP2 updates its own records of parameters in it.
        model._apply(  # type: ignore[no-untyped-call]
            lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
        )
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def reshard_(model: nn.Module) -> None:
    """Make FSDP2 drop gathered copies, which are not the parameters that are trained."""
    for module in model.modules():
        if callable(reshard := getattr(module, "reshard", None)):
            reshard()


def poison_(model: nn.Module) -> None:
    """Fill a model with NaN, so that a partly loaded model cannot be mistaken for a trained one.

    Moving it to the meta device is not enough: FSDP2 gathers parameters on the meta device without an error.
    """
    reshard_(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta and tensor.is_floating_point():
                local_of(tensor).fill_(float("nan"))


def recompute_buffers_(
    model: nn.Module, empty: Iterable[str], init: Callable[[nn.Module], Any] | None
) -> list[Fault]:
    """Compute the buffers that had no memory and are in no checkpoint; a fault for each that stays uncomputed."""
    names = set(empty)
    before = {name: (b, b._version) for name, b in model.named_buffers() if name in names}
    if init is not None:
        with torch.no_grad():
            init(model)
    after = dict(model.named_buffers())
    return [
        Fault(
            "model.buffer_never_computed",
            name,
            "a buffer that is in no checkpoint and was built on the meta device, so it was never computed",
            "build with mu.plans.on_meta(make), which computes buffers, or pass init=, a function that computes it",
        )
        for name, (buffer, version) in before.items()
        if after[name] is buffer and buffer._version == version
    ]
