"""The product without what it carries and checks: the control that shows what carrying and checking are for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _no_faults(*_: Any, **__: Any) -> list[Any]:
    return []


OFF: dict[str, Callable[..., Any]] = {
    "plans.wide_model.carry_hooks_": _nothing,
    "training.grow.prove.refuse_hooks": _nothing,
    "plans.wide_model.carry_attributes_": _nothing,
    "plans.wide_model._copy_modes_": _nothing,
    "training.grow.carry.carry_clips_": _nothing,
    "training.grow.carry.refuse_readers": _no_faults,
    "training.grow.left_behind._carry_gradients_": _no_faults,
}
"""What carries or refuses something around the tensors, and what stands in its place; a name that is gone is an error."""


@contextmanager
def switched_off() -> Iterator[None]:
    """Plans are taken from shapes without a proof, and only tensors, groups and schedules are carried."""
    doors = [import_module(f"mupscale.training.grow.{name}") for name in ("grow", "upscale")]
    prove = doors[0].proved_plan

    def unproved(base: Any, built: Any, plan: Any, *_: Any, declared: Any = None) -> Any:
        return prove(base, built, plan, None, False, declared=declared)

    with ExitStack() as patches:
        for name, stand_in in OFF.items():
            module, _, leaf = f"mupscale.{name}".rpartition(".")
            patches.enter_context(patch.object(import_module(module), leaf, stand_in))
        for door in doors:
            patches.enter_context(patch.object(door, "proved_plan", unproved))
        yield
