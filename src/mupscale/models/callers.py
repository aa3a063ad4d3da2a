"""Who called a torch function, seen from inside a TorchFunctionMode: modes are stacked, and the caller is above them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def callers() -> Iterator[FrameType]:
    """The frames that led to a torch function, innermost first, without those of the modes it passes through."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name != "__torch_function__":
            yield frame
        frame = frame.f_back


def calling_module() -> str:
    """The module whose code called the torch function that a mode is handling."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame is not None else ""
