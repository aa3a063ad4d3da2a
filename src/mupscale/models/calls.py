"""Record every torch function that a loss calls: its inputs, its outputs, and where in the model it was called.

The two models of a plan call the same functions in the same order, so call i of the base can be compared with call i
of the wide model. Calls without a tensor as a result (shapes, sizes) are left out.

>>> layer, x = nn.Linear(2, 3), torch.ones(1, 2)
>>> trace = traced(layer, lambda: layer(x).tanh().sum())[1]
>>> [(call.name, call.path) for call in trace.calls]
[('linear', ''), ('tanh', ''), ('sum', '')]
>>> trace.calls[0].leaves, trace.calls[1].parents
((None, 'weight', 'bias'), (0,))
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..tensors.nested import replaced_in, tensors_in
from ..tensors.random_states import forked
from .names import module_paths, unique_tensors

T = TypeVar("T")
_OWN = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Call:
    """One call of a torch function."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[Tensor, ...]
    """The tensors among its arguments, each once, in the order in which they stand."""
    parents: tuple[int | None, ...]
    """For every input, the call that made it."""
    leaves: tuple[str | None, ...]
    """For every input, the parameter or buffer that it is."""
    outputs: tuple[Tensor, ...]
    path: str
    """The module that called it."""
    line: str
    """Where it stands in the code: "model.py:12"."""
    drawn: bool
    """Whether the loss itself made a tensor from none: a batch that it draws."""

    @property
    def value(self) -> Tensor | None:
        """Its first floating output."""
        return next((t for t in self.outputs if t.is_floating_point()), None)

    @property
    def takes_expert(self) -> bool:
        """Whether it takes what stands for one expert, or matrices from a stack of them, as `experts[i]` does."""
        if self.name != "__getitem__" or not self.inputs or self.inputs[0] is not self.args[0]:
            return False
        stack = self.inputs[0]
        return all(
            out.shape == stack.shape[1:] or (stack.dim() > 2 and out.shape[-2:] == stack.shape[-2:])
            for out in self.outputs
        )

    def again(self, inputs: dict[int, Tensor]) -> Tensor | None:
        """The first floating output of the same call with some inputs replaced, by their position.

        Inputs are copied, because a call may write them: one in place, or a batch norm its running statistics.
        """
        swap = {id(old): inputs.get(i, old) for i, old in enumerate(self.inputs)}
        copied = {key: t.detach().clone() for key, t in swap.items()}
        args, kwargs = replaced_in((self.args, self.kwargs), lambda part: copied.get(id(part), part))
        with torch.no_grad(), forked(*self.inputs):
            found = self.func(*args, **kwargs)
        if self.name == "__setitem__":
            found = args[0]
        return next((t for t in tensors_in(found) if t.is_floating_point()), None)


@dataclass
class Trace:
    """All calls of one evaluation of a loss, in order."""

    calls: list[Call] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)
    """Paths of modules in the order in which they returned."""

    @cached_property
    def batch(self) -> list[bool]:
        """For every call, whether the batch is behind it: a tensor that neither the model nor a call made, or that the loss draws.

        An expert that the batch chooses from a stack of matrices is one of the model's matrices still.
        """
        found: list[bool] = []
        for call in self.calls:
            known = list(zip(call.leaves, call.parents, strict=True))[: 1 if call.takes_expert else None]
            found.append(
                call.drawn
                or any(leaf is None and (parent is None or found[parent]) for leaf, parent in known)
            )
        return found

    def weight(self, call: Call, position: int) -> bool:
        """True for an input made from parameters alone, without the batch."""
        parent = call.parents[position]
        return call.leaves[position] is not None or (parent is not None and not self.batch[parent])


def traced(model: nn.Module, go: Callable[[], T]) -> tuple[T, Trace]:
    """What `go` returns, and every torch function that was called meanwhile."""
    trace = Trace()
    stack: list[str] = [""]
    with _stacked(model, stack, trace.returned), _Recorder(model, trace, stack):
        result = go()
    return result, trace


@contextmanager
def _stacked(model: nn.Module, stack: list[str], returned: list[str]) -> Iterator[None]:
    """Keep the path of the running module on top of `stack`."""

    def entered(path: str) -> Any:
        return lambda module, args: stack.append(path)

    def left(path: str) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            stack.pop()
            returned.append(path)

        return note

    handles = []
    for path, module in module_paths(model):
        handles.append(module.register_forward_pre_hook(entered(path), prepend=True))
        handles.append(module.register_forward_hook(left(path)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module, trace: Trace, stack: list[str]) -> None:
        super().__init__()
        self.trace, self.stack = trace, stack
        self.leaves = {id(tensor): name for name, (_, tensor) in unique_tensors(model)[0].items()}
        self.made: dict[int, int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        outputs = tuple(tensors_in(found))
        name = _name(func)
        if name == "__setitem__":
            outputs = (args[0],)
        if not outputs or name in ("detach", "requires_grad_", "backward"):
            for out in outputs:
                self._same(args[0] if args else None, out)
            return found
        inputs = tuple({id(t): t for t in tensors_in((args, kwargs or {}))}.values())
        call = Call(
            name,
            func,
            tuple(args),
            dict(kwargs or {}),
            inputs,
            tuple(None if id(t) in self.leaves else self.made.get(id(t)) for t in inputs),
            tuple(self.leaves.get(id(t)) for t in inputs),
            outputs,
            self.stack[-1],
            _line(),
            not inputs and len(self.stack) == 1,
        )
        self.trace.calls.append(call)
        for out in outputs:
            if id(out) not in self.leaves:
                self.made[id(out)] = len(self.trace.calls) - 1
        return found

    def _same(self, source: Any, out: Tensor) -> None:
        """A detached tensor is known by the name of its source."""
        if id(source) in self.leaves:
            self.leaves[id(out)] = self.leaves[id(source)]
        elif id(source) in self.made:
            self.made[id(out)] = self.made[id(source)]


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else name


def _line() -> str:
    """The innermost line of code outside torch and this package."""
    for frame in callers():
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _OWN)):
            return f"{Path(name).name}:{frame.f_lineno}"
    return ""


def callers() -> Iterator[FrameType]:
    """The frames that led to a torch function, innermost first, without those of the modes it passes through.

    Seen from inside a TorchFunctionMode: modes are stacked, and the caller is above them.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name != "__torch_function__":
            yield frame
        frame = frame.f_back


def calling_module() -> str:
    """The module whose code called the torch function that a mode is handling."""
    frame = next(islice(callers(), 1, None), None)  # behind this function itself
    return frame.f_globals.get("__name__", "") if frame is not None else ""
