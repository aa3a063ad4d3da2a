"""Which experts each token goes to, read from the calls of `topk` that a loss makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Call = Callable[[nn.Module], object]


class _Recorded(TorchFunctionMode):
    """Keeps what `topk` chose among so many scores."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.found: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "topk" and args[0].shape[-1] == self.count:
            self.found.append(result[1].detach().reshape(-1, result[1].shape[-1]))
        return result


def chosen_experts(model: nn.Module, call: Call, experts: int) -> list[Tensor]:
    """The experts of every token, in every call that chooses among so many; a row for each token.

    >>> router = nn.Linear(2, 3, bias=False)
    >>> _ = router.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]))
    >>> x = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    >>> [found.tolist() for found in chosen_experts(router, lambda model: model(x).topk(1), 3)]
    [[[0], [1]]]
    """
    with torch.no_grad(), _Recorded(experts) as recorded:
        call(model)
    found: list[Tensor] = recorded.found
    return found


def kept_experts(base: nn.Module, wide: nn.Module, call: Call, experts: int, copies: int) -> float | None:
    """The share of tokens that go to copies of the experts that they went to, over all calls; None where none was seen.

    Copies of expert e of the base are experts k·e to k·e + k-1.
    """
    before, after = chosen_experts(base, call, experts), chosen_experts(wide, call, experts * copies)
    if not before or [one.shape for one in before] != [one.shape for one in after]:
        return None
    pairs = zip(before, after, strict=True)
    same = [(a.sort().values == (b // copies).sort().values).all(-1) for a, b in pairs]
    return float(torch.cat(same).double().mean())
