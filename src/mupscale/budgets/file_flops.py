"""FLOPs of the model in a user's Python file, at any width.

Runs the file to get the two functions it needs, `build(width)` and `inputs()`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import MupscaleError, raise_faults
from .flops import Step, step_of
from .user_file import load_file, missing_functions


class FileModel:
    """The model of a Python file at any width: `build(width)`, on what `inputs()` returns."""

    def __init__(self, path: Path, width: int) -> None:
        self.width = width
        module = load_file(path)
        faults = missing_functions(module, build=("width",), inputs=())
        raise_faults(f"{path} lacks the functions that the cost is counted with", faults)
        self._build = module.build
        self._inputs = _called("inputs()", module.inputs)
        self._steps: dict[int, Step] = {}

    @property
    def tokens(self) -> int | None:
        """Tokens of one step, where the inputs start with rows of whole numbers."""
        tensors = [t for t in tree_leaves(self._inputs) if isinstance(t, Tensor)]
        words = tensors and tensors[0].dim() > 1 and not tensors[0].is_floating_point()
        return tensors[0].numel() if words else None

    def at(self, width: int) -> Step:
        if width not in self._steps:
            make = partial(_called, f"build({width})", partial(self._build, width))
            self._steps[width] = step_of(make, self._inputs, width)
        return self._steps[width]


def _called(name: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:  # user code: any exception is reported
        raise MupscaleError(
            f"{name} failed: {type(error).__name__}: {error}", code="proxy.function_failed"
        ) from error
