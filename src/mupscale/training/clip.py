"""Gradient clipping that is the same at every width.

A plain norm depends on the width, because copies add up: sum |G'|² is r/s times sum |G|². Weighted by s/r it
is the norm at the reference, whatever the width, and clipping by it keeps a widened run exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..errors import MupscaleError
from ..plans.names import named_tensors
from ..plans.plan import Plan

Named = list[tuple[str, Tensor]]


def grad_norm(model: nn.Module, plan: Plan, p: float = 2.0) -> Tensor:
    """The gradient norm that the model would show at the plan's reference: equal curves at every width.

    >>> import mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> plan, base, x = mu.infer_plan(make, 4, 8), make(4).double(), torch.randn(5, 3).double()
    >>> wide = mu.widen(base, lambda: make(8), plan).model
    >>> for model in (base, wide): model(x).sum().backward()
    >>> plain = torch.stack([q.grad.norm() for q in base.parameters()]).norm()
    >>> bool((grad_norm(wide, plan) - plain).abs() < 1e-12)
    True
    """
    return _norm(_parameters(model), plan, p)


def clip_grad_norm_(model: nn.Module, plan: Plan, max_norm: float, p: float = 2.0) -> Tensor:
    """Scale all gradients so that their reference norm is at most `max_norm`; returns the norm before."""
    return _clip_norm(_parameters(model), plan, max_norm, p)


def clip_grad_value_(model: nn.Module, plan: Plan, value: float) -> None:
    """Clamp every gradient entry to `value` as written at the reference: r · value here."""
    _clip_value(_parameters(model), plan, value)


@dataclass
class Clip:
    """A step pre-hook; several optimizers of one model share one, so that their norm is one norm."""

    plan: Plan
    names: dict[int, str]
    max_norm: float | None
    max_value: float | None
    p: float
    optimizers: list[Optimizer] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    last_norm: Tensor | None = None

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) in self.waiting:  # clipped when the first optimizer of this step was stepped
            self.waiting.discard(id(optimizer))
            return
        self.waiting = {id(o) for o in self.optimizers if o is not optimizer}
        named = [(self.names[id(p)], p) for o in self.optimizers for g in o.param_groups for p in g["params"]]
        if self.max_norm is not None:
            self.last_norm = _clip_norm(named, self.plan, self.max_norm, self.p)
        if self.max_value is not None:
            _clip_value(named, self.plan, self.max_value)


def clip_(
    optimizers: Optimizer | Sequence[Optimizer],
    plan: Plan,
    model: nn.Module,
    *,
    max_norm: float | None = None,
    max_value: float | None = None,
    p: float = 2.0,
) -> list[RemovableHandle]:
    """Clip before every optimizer step, by a norm or a value written at the reference.

    A pre-hook: it sees the gradients that are stepped, so it works with gradient accumulation and inside
    other people's trainers. Turn their own clipping off. `widen` and `upscale` carry it along.
    """
    several = tuple(optimizers) if isinstance(optimizers, Sequence) else (optimizers,)
    if max_norm is None and max_value is None:
        raise MupscaleError("clip_ needs max_norm= or max_value=")
    names = {id(t): n for n, t in reversed(_parameters(model))}
    hook = Clip(plan, names, max_norm, max_value, p, list(several))
    unknown = [p for o in several for g in o.param_groups for p in g["params"] if id(p) not in names]
    if unknown:
        raise MupscaleError(f"{len(unknown)} parameters of the optimizer do not belong to the model")
    return [optimizer.register_step_pre_hook(hook) for optimizer in several]


def _parameters(model: nn.Module) -> Named:
    return [(name, t) for name, kind, t in named_tensors(model) if kind == "parameter"]


def _with_grad(named: Iterable[tuple[str, Tensor]], plan: Plan) -> list[tuple[str, Tensor]]:
    found: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in named:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # so that its values can be changed in place
        if parameter.grad is not None and id(parameter) not in found:
            found[id(parameter)] = (plan.ties.get(name, name), parameter.grad)
    return list(found.values())


def _norm(named: Named, plan: Plan, p: float) -> Tensor:
    parts = []
    for name, grad in _with_grad(named, plan):
        change = plan[name].change
        values = grad._values() if grad.is_sparse else grad
        size = torch.linalg.vector_norm(values, p)
        parts.append(
            size / float(change.r) if p == float("inf") else size * float(change.norm_weight_root(p))
        )
    if not parts:
        return torch.zeros(())
    first = parts[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([part.to(first) for part in parts]), p)
    return total


def _clip_norm(named: Named, plan: Plan, max_norm: float, p: float) -> Tensor:
    total = _norm(named, plan, p)
    factor = (max_norm / (total + 1e-6)).clamp(
        max=1.0
    )  # torch's own formula, so both clip alike at the reference
    with torch.no_grad():
        for _, grad in _with_grad(named, plan):
            grad.mul_(factor.to(grad.device, grad.dtype))
    return total


def _clip_value(named: Named, plan: Plan, value: float) -> None:
    with torch.no_grad():
        for name, grad in _with_grad(named, plan):
            bound = value * float(plan[name].change.r)
            (grad._values() if grad.is_sparse else grad).clamp_(-bound, bound)
