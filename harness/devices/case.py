"""One case: a function of a device whose results on the CPU and on another device must be the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch

Work = Callable[[torch.device], Any]
F = TypeVar("F", bound=Callable[[torch.device], Any])
BOUND = 1e-6
"""The largest relative difference that counts as the same: kernels may add in another order, and float32 has seven digits."""


@dataclass(frozen=True)
class Case:
    """What runs, on which device, and what may differ there, each exception with its reason."""

    name: str
    work: Work
    device: str = "pretend"
    bound: float = BOUND
    differs: str = ""
    """Why the results may differ by more than `BOUND`; empty where they may not."""
    on_cpu: tuple[str, ...] = ()
    """Patterns of the names of tensors that belong on the CPU; a `step` of an optimizer may always be there."""
    asks_float64: str = ""
    """Why the case itself asks for float64, and is refused where the device has none; empty where it does not."""
    quick: bool = False

    def __post_init__(self) -> None:
        assert (self.bound > BOUND) == bool(self.differs), (
            f"{self.name}: a larger bound and its reason go together"
        )


class Group:
    """The cases of one file, in order: `case = Group("growth")`, then `@case` or `@case(quick=True)` on each function."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cases: list[Case] = []

    @overload
    def __call__(self, work: F, /) -> F: ...
    @overload
    def __call__(self, work: None = None, /, *, name: str = "", **options: Any) -> Callable[[F], F]: ...
    def __call__(self, work: Work | None = None, /, *, name: str = "", **options: Any) -> Any:
        def added(work: Work) -> Work:
            self.cases.append(
                Case(f"{self.name}: {name or work.__name__.replace('_', ' ')}", work, **options)
            )
            return work

        return added(work) if work is not None else added
