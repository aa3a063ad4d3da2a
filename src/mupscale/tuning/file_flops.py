"""FLOPs of the model in a user's Python file, at any width.

Knows the two functions that it needs, `build(width)` and `inputs()`, and runs the file to get them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import Fault, MupscaleError, raise_faults
from .flops import Step, step_of
from .proxy import load_file


class FileModel:
    """The model of a Python file at any width: `build(width)`, on what `inputs()` returns."""

    def __init__(self, path: Path, width: int) -> None:
        self.width = width
        functions = _functions(path, ("build", "inputs"))
        self._build = functions["build"]
        self._inputs = _called("inputs()", functions["inputs"])
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
    except Exception as error:  # the user's own code: whatever it raises is its answer
        raise MupscaleError(f"{name} failed: {type(error).__name__}: {error}") from error


def _functions(path: Path, names: tuple[str, ...]) -> dict[str, Callable[..., Any]]:
    """Functions of a Python file, which is run."""
    space = vars(load_file(path))
    faults = [
        Fault(name, "no such function", "define it: def build(width): … and def inputs(): …")
        for name in names
        if not callable(space.get(name))
    ]
    raise_faults(f"{path} lacks what the cost is counted on", faults)
    return {name: space[name] for name in names}
