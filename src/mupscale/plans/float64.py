"""Models in float64 to test hypotheses on: cast inputs, lifted casts, mixed operands, real memory for meta parameters.

Models are written for one dtype: they make initial states and masks in the default dtype, compute norms and softmax in
float32 for weights of any dtype, and meet class weights and targets in float32. Inside `lifted_casts` such a model
runs in float64: the default dtype is float64, a cast to float32 gives float64, and what meets a float64 tensor is
promoted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import MupscaleError
from .callers import calling_module
from .copied import copied, rebind_
from .names import strip_wrappers

_WIDER: dict[Any, Any] = {
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
    torch.FloatTensor: torch.DoubleTensor,
    "torch.FloatTensor": "torch.DoubleTensor",
}
_LIFTED: dict[Any, Callable[[Tensor], Tensor]] = {
    torch.Tensor.float: torch.Tensor.double,
}
_WHOLE = {torch.float64, torch.complex128}
_OWN_DTYPES = ("torch.optim.", "torch.amp.")
"""torch's optimizers and its GradScaler require float32 for their counters and scales. Weights, gradients and moments
are float64 already, so nothing in them is lifted."""
_KEEP_OPERANDS = {
    "backward", "grad", "batch_norm", "instance_norm", "swap_tensors", "set_",
}  # fmt: skip
"""Functions whose arguments must be the tensors themselves: autograd looks for them in its graph, and norms write
their running statistics into them."""
_DTYPE_ERROR = re.compile(r"dtype|scalar type|data type|must have the same type|(Float|Double)Tensor")


class lifted_casts(TorchFunctionMode):  # noqa: N801 - a context manager, used like a function
    """Inside this context, a float64 model stays in float64, whatever dtypes its code and its loss mention.

    >>> with lifted_casts():
    ...     torch.ones(1, dtype=torch.float64).float().dtype, torch.zeros(1).dtype
    (torch.float64, torch.float64)
    >>> weights, half = torch.ones(2, 2, dtype=torch.float64), torch.full((2,), 0.5)
    >>> with lifted_casts():
    ...     (weights @ half).dtype
    torch.float64
    """

    def __init__(self) -> None:
        super().__init__()
        self._default = torch.get_default_dtype()
        self._stance: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> lifted_casts:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        # A compiled model would be compiled again for this context, at a cost of seconds: it runs as written.
        compiles = "torch._dynamo" in sys.modules
        self._stance = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
        self._stance.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._stance.__exit__(kind, error, trace)
        torch.set_default_dtype(self._default)
        if isinstance(error, (RuntimeError, ValueError)) and _DTYPE_ERROR.search(str(error)):
            raise MupscaleError(
                f"the model or its loss cannot be computed in float64: {error}; where it makes a tensor of another dtype, "
                "write dtype=x.dtype, with x a tensor that it meets",
                code="model.not_in_float64",
            ) from error

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if calling_module().startswith(_OWN_DTYPES):
            return func(*args, **named)
        if func in _LIFTED:
            return _LIFTED[func](args[0])
        args = tuple(_wider(a) for a in args)
        named = {key: _wider(value) for key, value in named.items()}
        name = getattr(func, "__name__", "")
        if name in _KEEP_OPERANDS or name.startswith("_foreach"):
            return func(*args, **named)
        if _writes(name):
            target = args[0] if args else None
            # What is assigned may itself be what makes a tensor float64: x.data = x.data.double().
            narrow = name == "__set__" and isinstance(target, Tensor) and target.dtype not in _WHOLE
            if isinstance(target, Tensor) and not _is_exact(target) and not narrow:
                args = (target, *(_cast(a, target.dtype) for a in args[1:]))
                named = {key: _cast(value, target.dtype) for key, value in named.items()}
            return func(*args, **named)
        out = named.pop("out", None)
        found = {t.dtype for t in _tensors((args, tuple(named.values()))) if not _is_exact(t)}
        if len(found) > 1 and found & _WHOLE:
            args = _cast(args, torch.float64)
            named = {key: _cast(value, torch.float64) for key, value in named.items()}
        return func(*args, **named) if out is None else func(*args, **named, out=out)


def _wider(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, (torch.dtype, type, str)) else value


def _writes(name: str) -> bool:
    """True for functions that write into their first argument: add_, __iadd__, __setitem__, the setter of .grad."""
    return name.startswith(("__i", "__set")) or (name.endswith("_") and not name.startswith("__"))


def _is_exact(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (list, tuple):
        for part in value:
            yield from _tensors(part)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """A value whose real tensors have this dtype and whose complex ones have the complex dtype of its precision."""
    if isinstance(value, Tensor):
        if value.is_complex():
            return value.to(torch.complex128 if dtype in _WHOLE else torch.complex64)
        return value.to(dtype.to_real()) if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(_cast(part, dtype) for part in value)
    return {k: _cast(v, dtype) for k, v in value.items()} if type(value) is dict else value


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Let a model of another dtype take the caller's batches: floating inputs are cast on entry.

    Recurrent layers compare dtypes themselves before they compute, so they cast their inputs too.
    """
    for module in model.modules():
        if module is model or isinstance(module, nn.RNNBase):
            module.register_forward_pre_hook(
                lambda module, args, kwargs: (_cast(args, dtype), _cast(kwargs, dtype)), with_kwargs=True
            )


def cast_(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast every floating tensor of a model in place; complex ones go to the complex type of that precision."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = _cast(tensor.data, dtype)
    return model


def prepare(base: nn.Module, wide: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Two float64 models to try hypotheses on: the base at random weights, the wide one empty."""
    if any(p.is_meta for p in base.parameters()):
        raise MupscaleError(
            "the base model has parameters on the meta device, expected weights to take a loss of; build it without "
            "on_meta",
            code="model.on_meta_device",
        )
    base = cast_(copied(base).cpu(), torch.float64)
    wide = copied(wide)
    fresh: dict[int, nn.Parameter] = {}
    for module in wide.modules():
        for name, old in list(module._parameters.items()):
            if old is not None and old.is_meta:
                new = nn.Parameter(torch.zeros(old.shape, dtype=old.dtype), old.requires_grad)
                setattr(module, name, fresh.setdefault(id(old), new))
    rebind_(wide, fresh)
    wide = cast_(wide.cpu(), torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in base.parameters():
            size = float(parameter.abs().square().mean().sqrt()) if parameter.numel() else 0.0
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype, device="cpu")
            parameter.add_(noise, alpha=0.3 * (size or 1.0))
    modes = {strip_wrappers(f"{name}."): module.training for name, module in base.named_modules()}
    for name, module in wide.named_modules():
        module.training = modes.get(strip_wrappers(f"{name}."), module.training)
    for model in (base, wide):
        cast_inputs(model, torch.float64)
    return base, wide
