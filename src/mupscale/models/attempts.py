"""Call a function that may refuse what it is given. A refusal is an answer; an error of a device or of memory is not.

Norms and functions are tried with inputs they were not written for: a norm that needs a second argument raises TypeError, one
for images ValueError or RuntimeError, a function that checks its range AssertionError, one that looks a shape up LookupError.
torch raises RuntimeError for tensors on two devices too, for a kernel that is missing and for memory that is full. Such an
error says nothing about a hypothesis, and with it swallowed a search would continue and find another plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_OF_DEVICES = (torch.OutOfMemoryError, torch.AcceleratorError)
_ABOUT_DEVICES = re.compile(
    r"same device|device type|expected it to be on|indices should be|torch\.\w+\.\w+Tensor|from the '\w+' backend|"
    r"(CUDA|HIP|MPS|XPU) error|framework doesn't support|out of memory|not enough memory|can't allocate memory"
)
"""What torch says of devices: operands on two of them, a generator, an index or a weight (torch.cuda.FloatTensor) of another, a
missing kernel, a failed launch, a dtype that it does not have, memory that is full."""


def attempted(call: Callable[[], T]) -> T | None:
    """What a call returns; None if the function refuses what it is given.

    >>> attempted(lambda: torch.nn.LayerNorm(3)(torch.ones(2))) is None
    True
    """
    try:
        return call()
    except _REFUSALS as error:
        if is_of_device(error):
            raise
        return None


def is_of_device(error: BaseException) -> bool:
    """True for an error of a device or of memory.

    >>> is_of_device(RuntimeError("Expected all tensors to be on the same device"))
    True
    """
    return isinstance(error, _OF_DEVICES) or bool(
        isinstance(error, (RuntimeError, TypeError)) and _ABOUT_DEVICES.search(str(error))
    )
