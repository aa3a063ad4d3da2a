"""What a device can hold. Apple's (MPS) has no float64: what is measured in float64 is measured on the CPU there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor


def has_float64(device: torch.device) -> bool:
    """True if tensors of float64 can be on this device.

    >>> has_float64(torch.device("cpu"))
    True
    """
    return device.type in ("cpu", "meta") or holds_float64(device.type)


@cache
def holds_float64(kind: str) -> bool:
    """True if one number of float64 fits on devices of this type: tried once."""
    # Not seen by `lifted_casts`, which would make it on the CPU.
    with torch._C.DisableTorchFunction():
        try:
            torch.empty(1, dtype=torch.float64, device=kind)
        except TypeError:
            return False
    return True


def default_device() -> torch.device:
    """Where torch makes tensors now. torch 2.9 cannot say after `torch.set_default_device(None)`, so one is made.

    >>> default_device()
    device(type='cpu')
    """
    return torch.empty(0, dtype=torch.uint8).device


@contextmanager
def on_cpu() -> Iterator[None]:
    """Inside, tensors are made on the CPU, whatever torch's default device is: for small models of our own."""
    with nullcontext() if default_device().type == "cpu" else torch.device("cpu"):
        yield


def exact(tensor: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor in float64, or complex128, on its device where that has float64, else on the CPU.

    >>> exact(torch.ones(1)).dtype
    torch.float64
    """
    return tensor.to(tensor.device if has_float64(tensor.device) else "cpu", dtype)
