"""Faults that are planted in the loaded library, to show that the cases see them. Each is what a hurried line of code does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_PREPARATION = "mupscale.models.float64"


class _Torch:
    """The module torch for one module of the library, with one function that ignores `device=`, and so does its form `…_like`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name == f"{self._name}_like":
            return lambda like, **named: getattr(torch, self._name)(like.shape, dtype=like.dtype)
        if name != self._name:
            return found

        def without_device(*args: Any, **named: Any) -> Any:
            named.pop("device", None)
            return found(*args, **named)

        return without_device


def _ignoring_device(module: str, function: str) -> Callable[[], None]:
    def plant() -> None:
        vars(importlib.import_module(module))["torch"] = _Torch(function)

    return plant


def _proofs_on_the_cpu() -> None:
    """`.cpu()` on both models that a proof is made with, in every module that prepares them."""
    original = vars(importlib.import_module(_PREPARATION))["prepare"]

    def prepare(*args: Any, **named: Any) -> Any:
        return tuple(m.cpu() if isinstance(m, nn.Module) else m for m in original(*args, **named))

    for name, module in list(sys.modules.items()):
        if name.startswith("mupscale.") and vars(module).get("prepare") is original:
            vars(module)["prepare"] = prepare


CONTROLS: dict[str, tuple[Callable[[], None], str]] = {
    "cpu-in-proofs": (_proofs_on_the_cpu, "growth: grow with loss"),
    "empty-in-diagnostic": (
        _ignoring_device("mupscale.training.check.symmetry", "empty"),
        "diagnostics: noise shares of a deeper model",
    ),
    "cpu-generator-in-norms": (
        _ignoring_device("mupscale.tensors.spectral", "randn"),
        "default device: upscale with signal noise",
    ),
}
"""What plants a fault, and the case that must fail with it and pass without."""
