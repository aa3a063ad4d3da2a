"""Models in float64 to test hypotheses on: cast inputs, lifted casts, mixed operands, real memory for meta parameters.

Models are written for one dtype: they make initial states and masks in the default dtype, compute norms and softmax in
float32 for weights of any dtype, and meet class weights and targets in float32. Inside `lifted_casts` such a model
runs in float64: the default dtype is float64, a cast to float32 gives float64, and what meets a float64 tensor is
promoted. Models stay on their devices. A device without float64 is the exception: the copies of a model on it are on the CPU,
and what code and loss hold on the device is moved where it is used.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import MupscaleError
from ..tensors.devices import default_device, has_float64
from ..tensors.nested import replaced_in, tensors_in
from .calls import calling_module
from .clone import copied, rebind_
from .device_map import refuse_other_device_map
from .names import named_tensors, resolve

_WIDER: dict[Any, Any] = {
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
    torch.FloatTensor: torch.DoubleTensor,
    "torch.FloatTensor": "torch.DoubleTensor",
}
_WHOLE = {torch.float64, torch.complex128}
_OWN_DTYPES = ("torch.optim.", "torch.amp.")
"""torch's optimizers and its GradScaler require float32 for their counters and scales. Weights, gradients and moments
are float64 already, so nothing in them is lifted."""
_KEEP_OPERANDS = {
    "backward", "grad", "batch_norm", "instance_norm", "swap_tensors", "set_", "__deepcopy__",
}  # fmt: skip
"""Functions whose arguments must be the tensors themselves: autograd looks for them in its graph, norms write
their running statistics into them, and a deep copy notes in one of them all that was copied before."""
_KEEP_PLACES = {
    *_KEEP_OPERANDS, "__get__", "__set__", "requires_grad_", "detach", "detach_", "retain_grad", "register_hook",
    "register_post_accumulate_grad_hook",
}  # fmt: skip
"""Functions that are about a tensor itself and compute nothing: they are not called with a copy of it on the CPU."""
_DTYPE_ERROR = re.compile(r"dtype|scalar type|data type|must have the same type|(Float|Double)Tensor")


class lifted_casts(TorchFunctionMode):  # noqa: N801 - a context manager, used like a function
    """Inside this context, a float64 model stays in float64, whatever dtypes its code and its loss mention.

    `models` are those whose copies are measured. If their device has no float64, what is on it meets the copies on the CPU.

    >>> with lifted_casts():
    ...     torch.ones(1, dtype=torch.float64).float().dtype, torch.zeros(1).dtype
    (torch.float64, torch.float64)
    >>> weights, half = torch.ones(2, 2, dtype=torch.float64), torch.full((2,), 0.5)
    >>> with lifted_casts():
    ...     (weights @ half).dtype
    torch.float64
    """

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self._default = torch.get_default_dtype()
        self._inside = ExitStack()
        places = {tensor.device for model in models for _, _, tensor in named_tensors(model)}
        without = (place.type for place in (*places, default_device()) if not has_float64(place))
        self._left = next(without, None)
        """The type of the device without float64 that is used: tensors on it are moved to the CPU."""

    def __enter__(self) -> lifted_casts:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        # A compiled model would be compiled again for this context, at a cost of seconds: it runs as written.
        if "torch._dynamo" in sys.modules:
            self._inside.enter_context(torch.compiler.set_stance("force_eager"))
        if self._left is not None:  # before the default device, which may be that one
            self._inside.enter_context(torch.device("cpu"))
        self._inside.enter_context(self._in_backward())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        """Lift casts in a backward too: checkpoints compute their forward again in it, and torch calls it outside of modes."""
        autograd: Any = torch.autograd
        run_backward = autograd._engine_run_backward

        def lifted(*args: Any, **named: Any) -> Any:
            TorchFunctionMode.__enter__(self)  # type: ignore[no-untyped-call]
            try:
                return run_backward(*args, **named)
            finally:
                TorchFunctionMode.__exit__(self, None, None, None)  # type: ignore[no-untyped-call]

        autograd._engine_run_backward = lifted
        try:
            yield
        finally:
            autograd._engine_run_backward = run_backward

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._inside.close()
        torch.set_default_dtype(self._default)
        if isinstance(error, MupscaleError):  # it says what it means by its code
            return
        unsupported = isinstance(error, TypeError) and "float64" in str(error)
        if unsupported or (isinstance(error, (RuntimeError, ValueError)) and _DTYPE_ERROR.search(str(error))):
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
        name = getattr(func, "__name__", "")
        if self._left is not None and name not in _KEEP_PLACES and not name.startswith("_foreach"):
            args, named = _together(name, tuple(args), named, self._left)
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(_wider(a) for a in args)
        named = {key: _wider(value) for key, value in named.items()}
        if name in _KEEP_OPERANDS or name.startswith("_foreach"):
            return func(*args, **named)
        if _writes(name):
            target = args[0] if args else None
            # What is assigned may itself be what makes a tensor float64: x.data = x.data.double().
            narrow = name == "__set__" and isinstance(target, Tensor) and target.dtype not in _WHOLE
            if isinstance(target, Tensor) and not _is_exact(target) and not narrow:
                rest, named = _cast((args[1:], named), target.dtype)
                args = (target, *rest)
            return func(*args, **named)
        out = named.pop("out", None)
        found = {t.dtype for t in tensors_in((args, named)) if not _is_exact(t)}
        if len(found) > 1 and found & _WHOLE:
            args, named = _cast((args, named), torch.float64)
        return func(*args, **named) if out is None else func(*args, **named, out=out)


def _together(
    name: str, args: tuple[Any, ...], named: dict[str, Any], left: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments on one device: the CPU, or that of the tensor which is written to."""
    if _writes(name) and args and isinstance(args[0], Tensor) and args[0].device.type == left:
        target = args[0]
        # In a dtype that the device has.
        dtype = torch.float32 if _is_exact(target) else target.dtype
        rest = _moved((args[1:], named), left, target.device, dtype)
        return (target, *rest[0]), rest[1]
    moved: tuple[tuple[Any, ...], dict[str, Any]] = _moved((args, named), left, torch.device("cpu"))
    return moved


def _moved(values: Any, left: str, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Values whose tensors are on `device`, and which name it where they named one of the type that is left."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.device.type not in (left, "cpu") or value.device == device:
                return value
            return (value if dtype is None else _cast(value, dtype)).to(device)
        if isinstance(value, torch.device):
            return device if value.type == left else value
        return str(device) if isinstance(value, str) and value.partition(":")[0] == left else value

    return replaced_in(values, moved)


def _wider(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, (torch.dtype, type, str)) else value


def _writes(name: str) -> bool:
    """True for functions that write into their first argument: add_, __iadd__, __setitem__, the setter of .grad."""
    return name.startswith(("__i", "__set")) or (name.endswith("_") and not name.startswith("__"))


def _is_exact(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Values whose real tensors have this dtype and whose complex ones have the complex dtype of its precision."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_complex():
            return value.to(torch.complex128 if dtype in _WHOLE else torch.complex64)
        return value.to(dtype.to_real()) if isinstance(value, Tensor) and value.is_floating_point() else value

    return replaced_in(values, cast)


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
    """Two float64 models to try hypotheses on: the base at random weights, the wide one empty, both where the base is."""
    if any(p.is_meta for p in base.parameters()):
        raise MupscaleError(
            "the base model has parameters on the meta device, expected weights to take a loss of; build it without "
            "on_meta",
            code="model.on_meta_device",
        )
    refuse_other_device_map(base, wide)
    base, wide = copied(base, hooks=False), copied(wide, hooks=False)
    leave_without_float64_(base)
    _place_(wide, base)
    for model in (base, wide):
        cast_(model, torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in base.parameters():
            size = float(parameter.abs().square().mean().sqrt()) if parameter.numel() else 0.0
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype, device="cpu")
            parameter.add_(noise.to(parameter.device), alpha=0.3 * (size or 1.0))
    for model in (base, wide):
        cast_inputs(model, torch.float64)
    return base, wide


def without_float64(model: nn.Module) -> bool:
    """True if a tensor of a model is on a device without float64."""
    return any(not has_float64(tensor.device) for tensor in (*model.parameters(), *model.buffers()))


def leave_without_float64_(model: nn.Module) -> None:
    """Move a model to the CPU if a tensor of it is on a device without float64."""
    if without_float64(model):
        model.cpu()


def _place_(wide: nn.Module, base: nn.Module) -> None:
    """Put every tensor of a model on the device of the base's of that name, a new one on that of the first parameter."""
    places = {name: tensor.device for name, _, tensor in named_tensors(base)}
    first = next((parameter.device for parameter in base.parameters()), torch.device("cpu"))
    fresh: dict[int, Tensor] = {}
    for path, module in wide.named_modules():
        for name, old in [*module._parameters.items(), *module._buffers.items()]:
            known = resolve(f"{path}.{name}" if path else name, places)
            place = first if known is None else places[known]
            if old is None or old.device == place:
                continue
            empty = isinstance(old, nn.Parameter) and old.is_meta
            new = torch.zeros(old.shape, dtype=old.dtype, device=place) if empty else old.detach().to(place)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, old.requires_grad)
            # Not through the dicts: recurrent layers keep a list of their weights up to date here.
            setattr(module, name, fresh.setdefault(id(old), new))
    rebind_(wide, fresh)
