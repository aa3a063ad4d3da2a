"""Tensor names as the plan has them, without the prefixes of wrappers.

Knows: the prefixes that compile, DDP, FSDP, checkpoint and averaging wrappers put into names.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

import torch
from torch import Tensor, nn

from ..errors import MupscaleError

# What torch.compile, FSDP1 and activation checkpointing insert into names.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Wrappers that hold the model as `module`, by class name: importing them would import distributed code.
_OUTER = ("DistributedDataParallel", "DataParallel", "AveragedModel", "FullyShardedDataParallel")


def strip_wrappers(name: str) -> str:
    """A name without the prefixes that wrappers put into it.

    >>> strip_wrappers("_orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    return _WRAPPERS.sub("", name)


def module_path(name: str) -> str:
    """The name of a module without the prefixes of wrappers: the path that names of its tensors begin with.

    >>> module_path("_orig_mod.layers.0._checkpoint_wrapped_module"), module_path("")
    ('layers.0', '')
    """
    return strip_wrappers(f"{name}.").rstrip(".")


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DDP, averaging and compile wrappers, whose names the plan uses."""
    while True:
        if isinstance(model, torch.jit.ScriptModule):
            raise MupscaleError(
                f"the model is a {type(model).__name__} of torch.jit, whose tensors cannot be replaced by larger ones; "
                "widen the module that it was made from, and script the result",
                code="model.scripted",
            )
        if type(model).__name__ in _OUTER and isinstance(model._modules.get("module"), nn.Module):
            model = model._modules["module"]  # type: ignore[assignment]
        elif isinstance(model._modules.get("_orig_mod"), nn.Module):
            model = model._modules["_orig_mod"]  # type: ignore[assignment]
        else:
            return model


def averaged(ema: nn.Module, known: Container[str]) -> nn.Module:
    """The module whose tensors have known names: an averaging wrapper of any class holds it as `module`."""
    inner = unwrap(ema)
    while list(inner._modules) == ["module"] and any(
        name not in known for name, _, _ in named_tensors(inner)
    ):
        inner = unwrap(inner._modules["module"])  # type: ignore[arg-type]
    return inner


def resolve(name: str, known: Container[str]) -> str | None:
    """The known name that `name` means: itself, or what is left without wrapper prefixes."""
    candidate = strip_wrappers(name)
    while candidate not in known and candidate.startswith("module."):
        candidate = candidate.removeprefix("module.")
    return name if name in known else candidate if candidate in known else None


def named_tensors(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Every parameter and buffer once per name: (name, "parameter" or "buffer", tensor). Ties repeat."""
    inner = unwrap(model)
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        yield strip_wrappers(name), "parameter", parameter
    for name, buffer in inner.named_buffers(remove_duplicate=False):
        yield strip_wrappers(name), "buffer", buffer


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The id of every parameter -> its name, the first where it has several.

    >>> layer = nn.Linear(2, 2)
    >>> parameter_names(nn.Sequential(layer, layer))[id(layer.weight)]
    '0.weight'
    """
    found: dict[int, str] = {}
    for name, kind, tensor in named_tensors(model):
        if kind == "parameter":
            found.setdefault(id(tensor), name)
    return found


def pattern_of(name: str) -> str:
    """A name with its layer numbers replaced, so that equal layers share one decision.

    >>> pattern_of("blocks.11.attn.q.weight")
    'blocks.*.attn.q.weight'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
