"""Gradient clipping that is the same at every width.

A plain norm depends on the width, because copies add up: sum |G'|² is r/s times sum |G|². Weighted by s/r it
is the norm at the reference for every width, and clipping by it keeps a widened run exact. Sharded gradients
are measured on their ranks; one number is reduced over the ranks, and all of them clip by the same factor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from math import inf, nan, prod
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from ...arguments import shown, wrong_kind, wrong_number
from ...errors import Fault, MupscaleError, raise_faults
from ...models.names import named_tensors, parameter_names
from ...plans.ends import check_shapes
from ...plans.plan import Plan
from ...runs.run import Run, Since, model_of, since_of
from ...tensors.parts import is_sharded, local_of

Named = list[tuple[str, Tensor]]
Scales = Mapping[str, Tensor]
"""What gradients are still multiplied by, for the tensors of the plan whose gradients a scaler has scaled."""
_NO_BOUND = "gradients cannot be clipped by this bound"


def grad_norm(model: nn.Module, since: Since, *, p: float = 2.0) -> Tensor:
    """Measure the gradient norm in the units of the reference, which is comparable across widths.

    Args:
        model: The model, after `backward`.
        since: The run of `model`, or the plan from the reference to it.
        p: The power of the norm.

    Returns:
        The norm, a tensor with one number.

    Raises:
        MupscaleError: If the plan is not one to this model, or the power is none.

    >>> import mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> plan, base, x = mu.plans.plan_between(make, 4, 8), make(4).double(), torch.randn(5, 3).double()
    >>> wide = mu.grow(base, lambda: make(8), plan=plan).model
    >>> for model in (base, wide): model(x).sum().backward()
    >>> plain = torch.stack([q.grad.norm() for q in base.parameters()]).norm()
    >>> bool((grad_norm(wide, plan) - plain).abs() < 1e-12)
    True
    """
    raise_faults(_NO_BOUND, _wrong_power(p))
    named, plan = _parameters(model, since)
    return _norm(named, plan, p)


def clip_grad_norm_(model: nn.Module, since: Since, *, max_norm: float, p: float = 2.0) -> Tensor:
    """Scale all gradients in place so that their norm at the reference is at most `max_norm`.

    Args:
        model: The model, after `backward`.
        since: The run of `model`, or the plan from the reference to it.
        max_norm: The largest norm, written at the reference.
        p: The power of the norm.

    Returns:
        The norm before, a tensor with one number.

    Raises:
        MupscaleError: If the plan is not one to this model, or a bound is none.

    >>> import mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> plan, model = mu.plans.plan_between(make, 4, 8), make(8)                # the bound is written at width 4
    >>> model(torch.ones(1, 3)).sum().backward()
    >>> before = clip_grad_norm_(model, plan, max_norm=0.01)
    >>> round(float(grad_norm(model, plan)), 5), bool(before > 0.01)
    (0.01, True)
    """
    named, plan = _parameters(model, since)
    raise_faults(_NO_BOUND, [*_wrong_bound("max_norm", max_norm), *_wrong_power(p)])
    return _clip_norm(named, plan, max_norm, p)


Seen = list[tuple[TensorWeakRef | None, int]]
"""The gradients of an optimizer at one moment: the tensors, and how often each had been changed in place."""


@dataclass
class Clip:
    """A pre-hook that clips before every step. All optimizers of a model share it, so that there is one norm.

    Gradients that a step makes itself, by calling `closure`, are clipped after every call. The first optimizer that
    steps clips the gradients of all. One whose gradients were made anew since then steps in turn with the others, as in a
    GAN: from there on each optimizer clips its own gradients. Gradients that a scaler has still to unscale count unscaled.
    """

    plan: Plan
    names: dict[int, str]
    max_norm: float | None
    max_value: float | None
    p: float
    optimizers: list[Optimizer] = field(default_factory=list)
    in_turn: bool = False
    waiting: dict[int, Seen | None] = field(default_factory=dict)
    """The optimizers whose gradients were clipped with those of another one, by id; None if they changed since."""
    scaled: frozenset[int] = frozenset()
    """Those of them whose gradients a scaler had not unscaled."""
    last_norm: Tensor | None = None

    def __call__(self, optimizer: Optimizer, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if given.get("closure") is not None:
            return tuple(args), {**given, "closure": self._after(given["closure"], optimizer)}
        if len(args) > 1 and callable(args[1]):  # the first one is the optimizer
            return (args[0], self._after(args[1], optimizer), *args[2:]), given
        self._clip(optimizer)
        return None

    def _after(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        @wraps(closure)
        def clipped() -> Any:
            loss = closure()
            self._clip(optimizer)
            return loss

        return clipped

    def _clip(self, optimizer: Optimizer) -> None:
        for other in self.optimizers:
            if (seen := self.waiting.get(id(other))) is not None and not self._unchanged(other, seen):
                self.waiting[id(other)] = None
        if id(optimizer) in self.waiting:
            if self.waiting.pop(id(optimizer)) is not None:
                return  # clipped when the first optimizer of this step was stepped
            self.in_turn = True
        together = [optimizer] if self.in_turn else self.optimizers
        found = {
            id(o): [(self.names[id(p)], p) for g in o.param_groups for p in g["params"]] for o in together
        }
        by = _scales(optimizer, together)
        scales = {self.plan.planned(name): by[key] for key in by for name, _ in found[key]}
        named = [pair for pairs in found.values() for pair in pairs]
        if self.max_norm is not None:
            self.last_norm = _clip_norm(named, self.plan, self.max_norm, self.p, scales)
        if self.max_value is not None:
            _clip_value(named, self.plan, self.max_value, scales)
        self.waiting = {id(o): _seen(o) for o in together if o is not optimizer}
        self.scaled = frozenset(by)

    def _unchanged(self, optimizer: Optimizer, seen: Seen) -> bool:
        """Whether an optimizer has the gradients that were seen, and only a scaler has written into them."""
        now = _seen(optimizer)
        # A scaler changes scaled gradients once before their step: it unscales them, or looks for infinite ones.
        changes = 1 if id(optimizer) in self.scaled else 0
        return len(now) == len(seen) and all(
            a is b is None or (a is not None and b is not None and a() is b() and new - old <= changes)
            for (a, new), (b, old) in zip(now, seen, strict=True)
        )

    def stepped(self, *_: Any) -> None:
        """After a step, which may have changed gradients of others that lie in the same memory."""
        for other in self.optimizers:
            if self.waiting.get(id(other)) is not None:
                self.waiting[id(other)] = _seen(other)


def _scales(stepping: Optimizer, together: Iterable[Optimizer]) -> dict[int, Tensor]:
    """What the gradients of optimizers are still multiplied by, by the optimizer's id, where they are.

    Fused optimizers unscale in their step, by the attribute `grad_scale` that the scaler sets for it. Of the others the
    scaler unscales each when it comes to it, unless it was asked to before.
    """
    scales = {id(o): scale for o in together if (scale := getattr(o, "grad_scale", None)) is not None}
    others = [o for o in together if o is not stepping]
    scaler = _running_scaler() if others else None
    if scaler is not None and scaler.is_enabled():
        scale = scaler._scale
        assert scale is not None  # it has scaled a loss, or it would not step
        for other in others:
            if scaler._per_optimizer_states[id(other)]["stage"] is OptState.READY:
                scales[id(other)] = scale * scales.get(id(other), 1.0)
    return scales


def _running_scaler() -> GradScaler | None:
    """The scaler whose `step` is running. It alone knows what is unscaled, and an optimizer that it steps does not know it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not GradScaler.step.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def _seen(optimizer: Optimizer) -> Seen:
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return [(None, 0) if grad is None else (TensorWeakRef(grad), grad._version) for grad in grads]


def clip_before_step_(
    optimizers: Optimizer | Sequence[Optimizer],
    since: Since,
    *,
    model: nn.Module | None = None,
    max_norm: float | None = None,
    max_value: float | None = None,
    p: float = 2.0,
) -> list[RemovableHandle]:
    """Clip before every optimizer step, by a norm or a value written at the reference.

    Clipping happens in a step pre-hook, so it works with gradient accumulation and inside trainers, whose own clipping must be
    turned off. With `optimizer.step(closure)` it happens after every call of the closure. With a `GradScaler`, whether or not
    `scaler.unscale_` is called, bounds are those of unscaled gradients. `grow` and `upscale` carry it to the wide optimizers.

    Args:
        optimizers: One optimizer, or several. Those that step one after another on the same gradients are clipped by one norm.
            Those that step in turn, each on new gradients, by their own; write one `clip_before_step_` for each to have this in the first
            step too.
        since: The run that the optimizers train, or, with `model`, the plan from the reference to it.
        model: The model, where `since` is a plan.
        max_norm: The largest gradient norm, written at the reference. Give this or `max_value`.
        max_value: The largest gradient entry, written at the reference.
        p: The power of the norm.

    Returns:
        The handles of the hooks; `remove()` ends the clipping.

    Raises:
        MupscaleError: If there is no bound, or an optimizer has parameters that are not the model's.

    >>> import mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> plan, model = mu.plans.plan_between(make, 4, 8), make(8)
    >>> optimizer = torch.optim.AdamW(mu.param_groups(model, plan, torch.optim.AdamW, lr=1e-3))
    >>> _ = clip_before_step_(optimizer, plan, model=model, max_norm=0.01)
    >>> model(torch.ones(1, 3)).sum().backward()
    >>> optimizer.step()
    >>> round(float(grad_norm(model, plan)), 5)
    0.01
    """
    several = tuple(optimizers) if isinstance(optimizers, Sequence) else (optimizers,)
    if max_norm is None and max_value is None:
        raise MupscaleError(
            "clip_before_step_ needs a bound; pass max_norm= or max_value=", code="clip.no_bound"
        )
    faults = [
        f for o in several for f in wrong_kind("optimizers", o, Optimizer, "hand over the optimizers first")
    ]
    faults += [*_wrong_bound("max_norm", max_norm), *_wrong_bound("max_value", max_value), *_wrong_power(p)]
    raise_faults(_NO_BOUND, faults)
    target = model_of(since, model, "clip_before_step_")
    named, plan = _parameters(target, since)
    check_shapes(plan, {name: tuple(t.shape) for name, t in named}, "wide", complete=False)
    names = parameter_names(target)
    hook = Clip(plan, names, max_norm, max_value, p, list(several))
    unknown = [p for o in several for g in o.param_groups for p in g["params"] if id(p) not in names]
    if unknown:
        raise MupscaleError(
            f"{len(unknown)} parameters of the optimizer do not belong to the model; build the optimizer from this "
            "model's parameters",
            code="optimizer.foreign_parameters",
        )
    before = [optimizer.register_step_pre_hook(hook) for optimizer in several]
    return before + [optimizer.register_step_post_hook(hook.stepped) for optimizer in several[1:] and several]


def _parameters(model: nn.Module, since: Since) -> tuple[Named, Plan]:
    if not isinstance(since, Plan | Run):  # torch's own function takes the norm second
        raise MupscaleError(
            f"the second argument is {shown(since)}, expected the run, or the plan since its reference; write run "
            "there, and the bound as max_norm=",
            code="argument.wrong_type",
        )
    plan = since_of(since, model)
    named = [(name, t) for name, kind, t in named_tensors(model) if kind == "parameter"]
    remedy = "pass the run of this model, or the plan from the reference to it"
    unknown = [name for name, _ in named if name not in plan]
    raise_faults(
        "the plan is not of this model",
        [Fault("plan.unknown_tensor", n, "it is not in the plan", remedy) for n in unknown],
    )
    return named, plan


def _wrong_bound(where: str, bound: object) -> list[Fault]:
    """A fault unless a bound is absent, a tensor, or a number. An infinite bound measures without clipping."""
    if bound is None or isinstance(bound, Tensor):
        return []
    return wrong_number(where, bound, f"write {where}=1.0, for example", infinite=True)


def _wrong_power(p: object) -> list[Fault]:
    return wrong_number("p", p, "write p=2.0, or math.inf for the largest entry", above=True, infinite=True)


def _with_grad(named: Iterable[tuple[str, Tensor]], plan: Plan) -> list[tuple[str, Tensor]]:
    found: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in named:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()  # so that its values can be changed in place
        if parameter.grad is not None and is_sharded(parameter.grad):
            parameter.grad = _summed(parameter.grad)
        if parameter.grad is not None and id(parameter) not in found:
            found[id(parameter)] = (plan.planned(name), parameter.grad)
    return list(found.values())


def _summed(grad: Any) -> Tensor:
    """The gradient with its partial sums reduced: the norm or clamp of a partial sum would be wrong."""
    from torch.distributed.tensor import Replicate

    if not any(placement.is_partial() for placement in grad.placements):
        return grad  # type: ignore[no-any-return]
    whole = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
    return grad.redistribute(placements=whole)  # type: ignore[no-any-return]


def _norm(named: Named, plan: Plan, p: float, scales: Scales | None = None) -> Tensor:
    meshes = _Meshes(t for _, t in named)
    grads = _with_grad(named, plan)
    if meshes.outer:
        return _sharded_norm(grads, plan, p, meshes, scales)
    parts = [_size(name, grad, plan, p, scales) for name, grad in grads]
    if not parts:
        return torch.zeros((), device=named[0][1].device if named else "cpu")
    first = parts[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([part.to(first) for part in parts]), p)
    return total


def _size(
    name: str, grad: Tensor, plan: Plan, p: float, scales: Scales | None, dtype: torch.dtype | None = None
) -> Tensor:
    """The norm of what this process holds of a gradient, in the units of the reference."""
    change, values = plan[name].change, local_of(grad.detach())
    if values.is_sparse:
        values = values._values()
    if not values.numel():
        return values.new_zeros(())  # torch refuses to take the largest of nothing
    if scales and name in scales:  # their norm may be too large for 16 bits
        wider = torch.promote_types(torch.float32, values.dtype)
        size: Tensor = torch.linalg.vector_norm(values, p, dtype=wider) / scales[name].to(values.device)
    else:
        size = torch.linalg.vector_norm(values, p, dtype=dtype)
    return size / float(change.r) if p == inf else size * float(change.norm_weight_root(p))


class _Meshes:
    """The device meshes of some parameters, each mapped to the outer mesh whose ranks contain its own.

    A model that was sharded as a whole has one outer mesh: tensors without tensor parallelism lie on a part of
    it, with a replica on every other part.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        meshes = dict.fromkeys(p.device_mesh for p in parameters if is_sharded(p))
        ranks = {mesh: frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes}
        self.outer: list[Any] = []
        self.home: dict[Any, int] = {}
        for mesh in sorted(meshes, key=lambda mesh: -mesh.size()):
            within = [i for i, other in enumerate(self.outer) if ranks[mesh] <= ranks[other]]
            if not within:
                self.outer.append(mesh)
            self.home[mesh] = within[0] if within else len(self.outer) - 1

    def place(self, grad: Any) -> tuple[int, float]:
        """The outer mesh of a gradient, and how many of its ranks hold the same entries; all, if it is plain."""
        if not is_sharded(grad):
            return 0, self.outer[0].size()
        at, cuts = self.home[grad.device_mesh], zip(grad.device_mesh.shape, grad.placements, strict=True)
        return at, self.outer[at].size() / prod(n for n, placement in cuts if not placement.is_replicate())


def _sharded_norm(grads: Named, plan: Plan, p: float, meshes: _Meshes, scales: Scales | None) -> Tensor:
    """The norm over all ranks, with the same bits on every rank. Replicated entries count once.

    Each rank sums the powers of its local entries, divided by the number of ranks that hold the same entries, and
    one number per outer mesh is reduced.
    """
    sums = [torch.zeros((), dtype=torch.float64, device=mesh.device_type) for mesh in meshes.outer]
    dtype = torch.float32
    for name, grad in grads:
        dtype = torch.promote_types(dtype, grad.dtype)
        at, holders = meshes.place(grad)
        wider = torch.promote_types(
            torch.float32, grad.dtype
        )  # partial norms in 16 bits would be too coarse to add
        size = _size(name, grad, plan, p, scales, wider).to(sums[at])
        sums[at] = torch.maximum(sums[at], size) if p == inf else sums[at] + size**p / holders
    reduced = [_over_ranks(part, mesh, p) for part, mesh in zip(sums, meshes.outer, strict=True)]
    parts = torch.stack([part.to(sums[0].device) for part in reduced])
    total: Tensor = parts.max() if p == inf else parts.sum() ** (1 / p)
    return total.to(dtype)


def _over_ranks(part: Tensor, mesh: Any, p: float) -> Tensor:
    """The sum or the maximum of all ranks' numbers; nan if any is nan, which a maximum alone may miss."""
    values = torch.stack([part.nan_to_num(nan=inf), part.isnan().to(part)]) if p == inf else part
    everyone = mesh.size() == dist.get_world_size()
    for group in (None,) if everyone else mesh.get_all_groups():
        dist.all_reduce(values, dist.ReduceOp.MAX if p == inf else dist.ReduceOp.SUM, group=group)
    return torch.where(values[1] > 0, nan, values[0]) if p == inf else values


def _clip_norm(
    named: Named, plan: Plan, max_norm: float | Tensor, p: float, scales: Scales | None = None
) -> Tensor:
    total = _norm(named, plan, p, scales)
    if not isinstance(max_norm, Tensor) and max_norm == inf:
        return total  # where the norm overflows, the factor would be inf / inf
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's formula: both clip alike at the reference
    with torch.no_grad():
        for _, grad in _with_grad(named, plan):
            local_of(grad).mul_(factor.to(grad.device, grad.dtype))
    return total


def _clip_value(named: Named, plan: Plan, value: float, scales: Scales | None = None) -> None:
    with torch.no_grad():
        for name, grad in _with_grad(named, plan):
            bound: Any = value * float(plan[name].change.r)
            if scales and name in scales:
                bound = bound * scales[name].to(grad.device)
            (grad._values() if grad.is_sparse else local_of(grad)).clamp_(-bound, bound)
