"""Tensor names as the plan has them, without the prefixes of wrappers.

Knows: the prefixes that compile, DDP, FSDP, checkpoint and averaging wrappers put into names.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import MupscaleError

Kind = Literal["parameter", "buffer"]

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


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DDP, averaging and compile wrappers, whose names the plan uses."""
    while True:
        if isinstance(model, torch.jit.ScriptModule):
            raise MupscaleError(
                f"the model is a {type(model).__name__} of torch.jit, whose tensors cannot be replaced by larger ones; "
                "grow the module that it was made from, and script the result",
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


def name_in(path: str, leaf: str) -> str:
    """The name of what the module at a path holds.

    >>> name_in("blocks.0", "weight"), name_in("", "weight")
    ('blocks.0.weight', 'weight')
    """
    return f"{path}.{leaf}" if path else leaf


def module_paths(model: nn.Module, shared: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its path, which names of its tensors begin with; with `shared` under each of its paths.

    A wrapper inside the model and what it wraps have one path, and the latter comes last, so a dict keeps it.

    >>> model = nn.Sequential(*[nn.ReLU()] * 2)
    >>> [path for path, _ in module_paths(model)], [path for path, _ in module_paths(model, shared=True)]
    (['', '0'], ['', '0', '1'])
    """
    for name, module in unwrap(model).named_modules(remove_duplicate=not shared):
        yield strip_wrappers(f"{name}.").rstrip("."), module


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Kind, Tensor]]:
    """Every parameter and buffer once per name: (name, "parameter" or "buffer", tensor). Ties repeat."""
    inner = unwrap(model)
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        yield strip_wrappers(name), "parameter", parameter
    for name, buffer in inner.named_buffers(remove_duplicate=False):
        yield strip_wrappers(name), "buffer", buffer


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Every further name of a tensor that has several -> its first."""
    first: dict[int, str] = {}
    return {n: owner for n, tensor in tensors.items() if (owner := first.setdefault(id(tensor), n)) != n}


def unique_tensors(model: nn.Module) -> tuple[dict[str, tuple[Kind, Tensor]], dict[str, str]]:
    """Every parameter and buffer under its first name, as (kind, tensor); and its other names -> the first.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> tensors, ties = unique_tensors(nn.Sequential(layer, nn.ReLU(), layer))
    >>> list(tensors), ties
    (['0.weight'], {'2.weight': '0.weight'})
    """
    named = list(named_tensors(model))
    ties = tied_names({name: tensor for name, _, tensor in named})
    return {name: (kind, tensor) for name, kind, tensor in named if name not in ties}, ties


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The id of every parameter -> its name, the first where it has several."""
    return {id(t): name for name, (kind, t) in unique_tensors(model)[0].items() if kind == "parameter"}


def pattern_of(name: str) -> str:
    """A name with its layer numbers replaced, so that equal layers share one decision.

    >>> pattern_of("blocks.11.attn.q.weight")
    'blocks.*.attn.q.weight'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
