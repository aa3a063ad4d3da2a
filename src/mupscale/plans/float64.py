"""Models in float64 to test hypotheses on: cast inputs, lifted casts, real memory for meta parameters.

Many models compute norms and softmax in float32 for weights of any dtype, which would limit a test of exactness to
1e-7. Inside `lifted_casts` a cast to float32 gives float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import MupscaleError


class lifted_casts(TorchFunctionMode):  # noqa: N801 - a context manager, used like a function
    """Inside this context, casts to float32 in a float64 model stay in float64.

    >>> with lifted_casts():
    ...     torch.ones(1, dtype=torch.float64).float().dtype
    torch.float64
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        lifted = tuple(torch.float64 if a is torch.float32 else a for a in args)
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*lifted, **named)


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> Any:
    """Let a model of another dtype take the caller's batches: floating inputs are cast on entry."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype)
        if type(value) in (list, tuple):
            return type(value)(map(cast, value))
        return {k: cast(v) for k, v in value.items()} if type(value) is dict else value

    return model.register_forward_pre_hook(
        lambda module, args, kwargs: (cast(args), cast(kwargs)), with_kwargs=True
    )


def cast_(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast every floating tensor of a model in place; complex ones go to the complex type of that precision."""
    wide = torch.complex128 if dtype == torch.float64 else torch.complex64
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.data = tensor.data.to(wide if tensor.is_complex() else dtype)
    return model


def prepare(base: nn.Module, wide: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Two float64 models to try hypotheses on: the base at random weights, the wide one empty, dropout off."""
    if any(p.is_meta for p in base.parameters()):
        raise MupscaleError(
            "the base model has parameters on the meta device, expected weights to take a loss of; build it without "
            "on_meta"
        )
    base = cast_(copy.deepcopy(base).cpu(), torch.float64)
    wide = copy.deepcopy(wide)
    fresh: dict[int, nn.Parameter] = {}
    for module in wide.modules():
        for name, old in list(module._parameters.items()):
            if old is not None and old.is_meta:
                new = nn.Parameter(torch.zeros(old.shape, dtype=old.dtype), old.requires_grad)
                setattr(module, name, fresh.setdefault(id(old), new))
    wide = cast_(wide.cpu(), torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in base.parameters():
            size = float(parameter.abs().square().mean().sqrt()) if parameter.numel() else 0.0
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise, alpha=0.3 * (size or 1.0))
    for model in (base, wide):
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        cast_inputs(model, torch.float64)
    return base, wide
