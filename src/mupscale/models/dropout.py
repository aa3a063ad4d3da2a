"""Dropout switched off for a proof, and a record of where it was met.

Dropout draws a separate mask for every copy of a unit, so a wide model with dropout does not compute what the base
computes. What is proved is the model without it, and the record says so. All forms are met where they are computed:
modules, `F.dropout`, attention and recurrent layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .calls import callers
from .names import module_paths, pattern_of
from .need import Need

EVERY_COPY = "with dropout each copy draws its own mask, and training is equal only on average"

_MASKS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_,
    torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
}  # fmt: skip
"""Functions of (input, p, training) that return the input when they do not drop."""
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
# Where multi_head_attention_forward takes dropout_p and training, if they are passed by position.
_ATTENTION = (10, 13)


class without_dropout(TorchFunctionMode):  # noqa: N801 - a context manager, used like a function
    """Inside this context nothing is dropped; `dropout` lists where it would have been.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    >>> with without_dropout(model) as observed:
    ...     same = torch.equal(model(torch.ones(1, 2)), model[0](torch.ones(1, 2)))
    >>> same, list(observed.dropout)
    (True, ['1'])
    """

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self._paths = {id(module): path for model in models for path, module in module_paths(model)}
        self.dropout: dict[str, None] = {}
        """Paths of dropout modules, and "a functional dropout in <path>" for dropout in a module's own code."""

    @property
    def needs(self) -> frozenset[Need]:
        """What a plan that was measured in this context assumes."""
        return dropout_needs(self.dropout)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in _MASKS:
            p = args[1] if len(args) > 1 else named.get("p", 0.5)
            if p > 0 and _training(func, args, named):
                self._meet()
                return args[0] if args else named["input"]
        elif func is F.scaled_dot_product_attention:
            args, named = self._off(args, named, 4, "dropout_p", True)
        elif func is F.multi_head_attention_forward:
            at, mode = _ATTENTION
            training = args[mode] if len(args) > mode else named.get("training", True)
            args, named = self._off(args, named, at, "dropout_p", training)
        elif func in _RECURRENT:
            packed = isinstance(args[1], Tensor) and not args[1].is_floating_point()
            args, named = self._off(args, named, 5 + packed, "dropout", args[6 + packed])
        return func(*args, **named)

    def _off(
        self, args: Any, named: dict[str, Any], at: int, word: str, training: bool
    ) -> tuple[Any, dict[str, Any]]:
        """The arguments with a dropout rate of zero."""
        rate = args[at] if len(args) > at else named.get(word, 0.0)
        if not (training and rate > 0):
            return args, named
        self._meet()
        if len(args) > at:
            return (*args[:at], 0.0, *args[at + 1 :]), named
        return args, {**named, word: 0.0}

    def _meet(self) -> None:
        """Note the module whose code asked for dropout: the innermost one that is running."""
        for frame in callers():
            code = frame.f_code
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if isinstance(owner, nn.Module) and id(owner) in self._paths:
                path = self._paths[id(owner)] or "the model"
                stock = type(owner).__module__.startswith("torch.nn.modules")
                self.dropout[path if stock else f"a functional dropout in {path}"] = None
                return
        self.dropout["a functional dropout outside the model"] = None


def dropout_needs(places: Iterable[str]) -> frozenset[Need]:
    """What a proof without dropout assumes, by the places where it was met."""
    patterns = ", ".join(dict.fromkeys(map(pattern_of, places)))
    return frozenset({Need(f"no dropout ({patterns}): {EVERY_COPY}", "dropout")} if patterns else ())


def _training(func: Callable[..., Any], args: Any, named: dict[str, Any]) -> bool:
    if len(args) > 2:
        return bool(args[2])
    # The functions of torch.nn.functional drop by default, except those whose default is not to.
    default = func in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
    return bool(named.get("training", named.get("train", default)))
