"""Whether two plain values are the same, and what it does to training if settings or state are not.

Knows: values and words. Does not know checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose
from typing import Any

from torch import Tensor

from .profiles import Profile

HOW = frozenset({"foreach", "fused", "capturable", "differentiable", "verbose"})
"""Settings that say how a step is computed, not what."""
CLASS = frozenset({"decoupled_weight_decay"})
"""Settings that newer versions of torch write for what the class is anyway; compared where both have them."""
NEEDED = ("lr", "initial_lr", "weight_decay", "eps", "betas", "momentum")
"""Settings whose absence is a difference."""
EFFECTS = {
    "lr": "every step has another size, unless a schedule sets the rate before the first one",
    "initial_lr": "schedules multiply initial_lr, so every later rate is off by the same factor",
    "weight_decay": "these tensors shrink at another speed",
    "eps": "entries with small gradients take steps of another size",
    "betas": "the moments forget at another speed",
    "momentum": "the moments forget at another speed",
}
SLOTS = {
    "exp_avg": "Adam starts empty: its first steps have about the size of the rate in every entry",
    "exp_avg_sq": "Adam starts empty: its first steps have about the size of the rate in every entry",
    "momentum_buffer": "the momentum starts empty: the first steps follow single gradients",
}
OTHER_SLOT = "the optimizer starts without it"
OTHER_SETTING = "the optimizer computes its steps with another value"


def alike(x: Any, y: Any, profile: Profile) -> bool:
    """Whether two values are the same, numbers as far as the profile asks.

    >>> from .profiles import STANDARD, STRICT
    >>> alike((0.9, 0.95), [0.9, 0.95], STRICT), alike(0.1, 0.1 + 1e-12, STRICT), alike(0.1, 0.1 + 1e-12, STANDARD)
    (True, False, True)
    """
    x, y = (value.tolist() if isinstance(value, Tensor) else value for value in (x, y))
    if isinstance(x, bool) or isinstance(y, bool):
        return x is y
    if isinstance(x, int | float) and isinstance(y, int | float):
        return x == y or (x != x and y != y) or isclose(x, y, rel_tol=profile.number, abs_tol=0)
    if isinstance(x, list | tuple) and isinstance(y, list | tuple):
        return len(x) == len(y) and all(alike(a, b, profile) for a, b in zip(x, y, strict=True))
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        return x.keys() == y.keys() and all(alike(x[key], y[key], profile) for key in x)
    return type(x) is type(y) and bool(x == y)


def few(names: list[str]) -> str:
    """Names in few words.

    >>> few(["a"]), few(["a", "b", "c"])
    ('a', 'a and 2 more')
    """
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
