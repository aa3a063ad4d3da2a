"""The gradient identity: r · dup(G) on the image, zero off it, zero on new tensors.

Equal outputs are not enough: a wrong layout can give equal logits and unequal training. This test sees
it. Works on live modules of any size; tolerances are float64's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import shown, wrong_function
from ..errors import MupscaleError, raise_faults
from ..tensors.expand import expand, expand_
from .fits import check_end
from .names import named_tensors
from .plan import Plan

Loss = Callable[[nn.Module], Tensor]

GRADIENT_TOLERANCE = 1e-9
LOSS_FLOOR = 1e-6  # a loss that is zero by nature has no relative error
SILENT = 1e-13  # a gradient this far below the model's largest is rounding, not signal


def load_wide_(wide: nn.Module, base: nn.Module, plan: Plan) -> None:
    """Write s · dup(W) into every tensor of a wide model whose tensors already exist."""
    tensors = {name: tensor for name, _, tensor in named_tensors(base)}
    with torch.no_grad():
        for name, _, target in named_tensors(wide):
            entry = plan[name]
            if entry.sources and entry.fill != "own":
                expand_(target, entry.source(tensors), entry.making())


@contextmanager
def keeping_buffers(model: nn.Module) -> Iterator[None]:
    """A measurement must not move running statistics: buffers are put back afterwards."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _refuse_value(value: Any, parameters: list[Tensor]) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
        raise MupscaleError(
            f"loss(model) returned {found}, expected a tensor of one number; return its mean, say"
        )
    if not parameters or not value.requires_grad:
        raise MupscaleError(
            "the loss does not depend on any trainable parameter of the model; unfreeze one, or return the loss "
            "without detaching it"
        )


def gradients(model: nn.Module, loss: Loss, seed: int = 0) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss and the gradient of every trainable tensor, by name, under a fixed random state."""
    raise_faults("no gradient can be taken", wrong_function("loss", loss, "model"))
    named = {name: t for name, kind, t in named_tensors(model) if kind == "parameter" and t.requires_grad}
    with torch.random.fork_rng(), keeping_buffers(model):
        torch.manual_seed(seed)
        with torch.enable_grad():
            value = loss(model)
            unique = list({id(t): t for t in named.values()}.values())
            _refuse_value(value, unique)
            found = torch.autograd.grad(value, unique, allow_unused=True)
    grads = {id(t): g for t, g in zip(unique, found, strict=True)}
    return value.detach(), {
        name: None if (g := grads[id(t)]) is None else g.detach().to_dense() if g.is_sparse else g.detach()
        for name, t in named.items()
    }


@dataclass(frozen=True)
class Identity:
    """The gradient identity measured: an error for every tensor, and the tensors it could not test."""

    errors: dict[str, float]
    untested: tuple[str, ...]
    ratios: dict[str, float]
    """The least-squares factor between the found gradient and the expected one: 1 when they agree."""

    @property
    def worst(self) -> tuple[str, float]:
        """The tensor that is farthest off, and by how much."""
        name = max(self.errors, key=lambda n: self.errors[n], default="")
        return name, self.errors.get(name, 0.0)


def compare_gradients(base: dict[str, Tensor | None], wide: dict[str, Tensor | None], plan: Plan) -> Identity:
    """Hold every wide gradient against r · dup(G)."""
    largest = max((float(g.abs().max()) for g in base.values() if g is not None and g.numel()), default=0.0)
    errors: dict[str, float] = {}
    ratios: dict[str, float] = {}
    untested: list[str] = []
    for name, found in wide.items():
        if name in plan.ties:
            continue
        entry = plan[name]
        sources = [base.get(source) for source in entry.sources]
        if found is None and all(g is None for g in sources):
            untested.append(name)
            continue
        got = found if found is not None else torch.zeros(entry.wide_shape)
        if not sources:
            errors[name] = float(got.abs().max()) / (largest or 1.0)
            continue
        known = {
            s: g if g is not None else got.new_zeros(entry.base_shape)
            for s, g in zip(entry.sources, sources, strict=True)
        }
        r = entry.change.r
        want = expand(entry.source(known), entry.gradient_making())
        size = float(want.abs().max()) if want.numel() else 0.0
        if size <= SILENT * largest * float(r):
            untested.append(name)
            size = largest * float(r) or 1.0
        gap = float((got - want).abs().max()) if want.numel() else 0.0
        errors[name] = gap / size if gap == gap else float("inf")
        norm = float((want * want).sum())
        ratios[name] = float((got * want).sum()) / norm if norm else 1.0
    return Identity(errors, tuple(untested), ratios)


def gradient_identity(base: nn.Module, wide: nn.Module, plan: Plan, loss: Loss) -> Identity:
    """Measure the identity on two live models that hold corresponding weights.

    `loss(model)` returns a scalar and must see the same data both times.

    >>> import mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> plan, base, x = mu.infer_plan(make, 4, 8), make(4).double(), torch.ones(2, 3).double()
    >>> wide = mu.widen(base, lambda: make(8), plan).model
    >>> name, error = gradient_identity(base, wide, plan, lambda model: model(x).sum()).worst
    >>> error < 1e-12
    True
    """
    check_end(plan, base, "base")
    check_end(plan, wide, "wide")
    _, base_grads = gradients(base, loss)
    _, wide_grads = gradients(wide, loss)
    return compare_gradients(base_grads, wide_grads, plan)
