"""Where new units are cut off, so that waking them moves no output: where they are read, or where they are written.

A new unit works when one side of it is zero. A hidden unit reads and is not read: its row is awake, its column zero. A
channel of a stream that a norm averages over would change the norm, so it is read and not written. Norms that are modules
are known (`facts/padded_norms.py`); a norm that is written out in a forward is not, and is found here by waking the units
in float64 and looking at the loss. The same trial shows units that would never learn: behind RMSNorm and ReLU a channel that is
not written is zero, where ReLU has no gradient. Such a space grows by copies. Below, 4 units are brought to unit length before
they are read:

>>> import torch
>>> import mupscale as mu
>>> class Unit(nn.Module):
...     def __init__(self, n: int) -> None:
...         super().__init__()
...         self.a, self.b = nn.Linear(3, n), nn.Linear(n, 2)
...
...     def forward(self, x: torch.Tensor) -> torch.Tensor:
...         return self.b(nn.functional.normalize(self.a(x)))
>>> x = torch.randn(5, 3)
>>> plan = mu.infer_plan(Unit(4), Unit(8), loss=lambda model: model(x.to(model.a.weight)).square().sum(), by="units")
>>> plan["a.weight"].cut, plan["b.weight"].cut                     # cut where it is written, and not where it is read
((0,), ())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import hypot

import torch
from torch import Tensor, nn

from ..models.names import named_tensors, pattern_of, unwrap
from ..noise.kinds import NewUnits, Noise, SplitNoise
from ..noise.resolve import resolve_noise
from ..noise.where import exempt_of, pairing
from ..plans.direction import Direction
from ..plans.plan import Plan
from ..plans.tensor_plan import TensorPlan
from ..plans.wide_model import fill_model_
from ..proofs.identity import Evaluated
from ..tensors.differences import loss_gap
from .search.not_found import NoPlanError, Sizes

Place = tuple[str, int]
"""A dimension of a tensor, by the tensor's name."""
Measured = Callable[[nn.Module, Callable[[float], bool]], Evaluated]
"""Loss and gradients of a model in float64; gradients only where the value of the loss is wanted."""
_TOLERANCE = 1e-9
"""How far the loss may move in float64. Products with zeros are exact, and sums are rounded in another order; what is not
cut moves a loss by a thousandth or more."""
_STEP = 0.01
"""The length of the one step of gradient descent in the trial, over that of all weights: far above rounding, and small."""


def cut_for_waking(plan: Plan, base: nn.Module, wide: nn.Module, loss: Measured) -> tuple[Plan, Sizes]:
    """The plan with its zeros cut so that new units wake without a change of the loss, and learn; raises if no cut does that.

    Sizes at which they do not learn, and which are no whole multiples, so that copies are not possible either, are returned
    as well. The wide model is written over.
    """
    trial = _Trial(base, wide, loss)
    still: list[tuple[bool, Plan, Sizes]] = []
    for tried in _plans(plan, trial):
        stuck = _stuck(tried)
        if (stuck and still) or trial.gap(tried) > _TOLERANCE:
            continue
        if not (dead := trial.dead(tried) | stuck):
            return tried, dead
        if stuck and any(after % before for before, after in dead):
            continue  # nothing wakes, and no copies fit
        still.append((bool(stuck), tried, dead))
    if not still:
        error = NoPlanError("waking new units would change the loss", code="search.waking_moves_loss")
        error.sizes = _padded_sizes(plan)
        raise error
    _, tried, dead = min(still, key=lambda each: each[0])
    if all(after % before == 0 for before, after in dead):
        error = NoPlanError("new units would never get a gradient", code="search.new_units_never_learn")
        error.sizes = dead
        raise error
    return tried, dead


@dataclass(frozen=True)
class Woken:
    """Three losses of one batch, and the sizes of new units that get no gradient at once and none after a step."""

    base: float
    asleep: float
    awake: float
    dead: Sizes

    def moved(self, eps: float) -> bool:
        """Whether waking moved the loss by more than rounding in numbers of this precision.

        In float64 there is one bound for all. A coarser model is held to what it shows itself: between base and sleeping model
        only rounding lies, and between the sleeping model and the woken one it is of that size.

        >>> Woken(2.0, 2.0, 2.001, frozenset()).moved(2**-23), Woken(2.0, 2.001, 2.004, frozenset()).moved(2**-23)
        (True, False)
        """
        if eps <= torch.finfo(torch.float64).eps:
            return not loss_gap(self.asleep, self.awake) <= _TOLERANCE
        rounding = 8 * abs(self.asleep - self.base) + 2 * eps * abs(self.asleep)
        return not abs(self.awake - self.asleep) <= rounding


def woken(plan: Plan, base: nn.Module, wide: nn.Module, loss: Measured, noise: Noise) -> Woken:
    """What waking does to a sleeping wide model, which is written over."""
    trial = _Trial(base, wide, loss, noise)
    asleep = loss(wide, lambda value: False).value
    trial.wake_(plan)
    awake = loss(wide, lambda value: False).value
    return Woken(trial.before.value, asleep, awake, trial.dead(plan))


@dataclass(frozen=True)
class _Trial:
    """Two models on which plans are woken. Noise is drawn in float32 here, while `loss` may compute in float64."""

    base: nn.Module
    wide: nn.Module
    loss: Measured
    noise: Noise = field(default_factory=NewUnits)

    @cached_property
    def before(self) -> Evaluated:
        return self.loss(self.base, lambda value: True)

    def gap(self, plan: Plan, only: Callable[[str], bool] = lambda name: True) -> float:
        """How far the loss moves when the tensors that are wanted wake."""
        self.wake_(plan, only)
        return loss_gap(self.before.value, self.loss(self.wide, lambda value: False).value)

    def wake_(self, plan: Plan, only: Callable[[str], bool] = lambda name: True) -> None:
        """Write what the base becomes, with the noise of the tensors that are wanted, into the wide model."""
        base = unwrap(self.base)
        tensors = {name: tensor for name, _, tensor in named_tensors(base)}
        noise = resolve_noise(tensors, self.noise, plan=plan, exempt=exempt_of(base, plan, "base"))
        noise = replace(noise, tensors={name: one for name, one in noise.tensors.items() if only(name)})
        fill_model_(self.wide, base, Direction(plan, noise=noise), in_place=True)

    def dead(self, plan: Plan) -> Sizes:
        """The sizes of new units that get no gradient at once and none after a step, in the wide model that was woken last.

        What the loss does not reach in the base, an expert that no example chooses, does not count.
        """
        quiet = {(name, dim) for places in _places(plan).values() for name, dim in places}
        quiet = {place for place in quiet if len(plan[place[0]].axes) > 1 and self.is_reached(plan, place[0])}
        for _ in range(2 if quiet else 0):
            grads = self.loss(self.wide, lambda value: True).grads
            quiet = {
                (name, dim)
                for name, dim in quiet
                if (grad := grads.get(name)) is None or not bool(_new(plan[name], dim, grad).any())
            }
            if not quiet:
                return frozenset()
            self._step_(grads)
        return frozenset((plan[n].axes[dim].base, plan[n].axes[dim].wide) for n, dim in quiet)

    def is_reached(self, plan: Plan, name: str) -> bool:
        grads = [self.before.grads.get(source) for source in plan[name].sources]
        return any(grad is not None and bool(grad.any()) for grad in grads)

    @torch.no_grad()
    def _step_(self, grads: Mapping[str, Tensor | None]) -> None:
        tensors = {name: t for name, _, t in named_tensors(self.wide) if grads.get(name) is not None}
        weights, slopes = (
            hypot(*(float(torch.linalg.vector_norm(t, dtype=_summed(t.dtype))) for t in every))
            for every in (tensors.values(), [g for g in grads.values() if g is not None])
        )
        for name, tensor in tensors.items():
            grad = grads[name]
            assert grad is not None
            tensor -= _STEP * weights / slopes * grad


def with_split_stacks(plan: Plan, base: nn.Module, wide: nn.Module, loss: Measured) -> Plan:
    """The plan where stacks of matrices, as experts are, are split over their copies if the outputs of copies are summed.

    An expert with a copy is chosen with it, and their outputs are added, each with half of the weight. So every entry of the
    last matrix of an expert can go whole to one of its copies, as along an axis that is summed over, and the copies part when
    they wake. Such an axis is an `in` axis, whose 1/k is part of the routing already, so the fold has a factor of k: units are
    those of before. Which stacks these are is tried. The wide model is written over.
    """
    names: dict[str, list[str]] = {}
    for name, entry in plan.tensors.items():
        stack = entry.axes[0] if len(entry.axes) == 3 and entry.kind == "parameter" else None
        if stack is None or pairing(entry) is not None:
            continue
        if stack.k > 1 and stack.role == "out" and not stack.padded:
            names.setdefault(pattern_of(name), []).append(name)
    trial = _Trial(base, wide, loss, SplitNoise())
    for stacks in names.values():
        split = plan.with_tensors({name: plan[name].summed_over(0) for name in stacks})
        reached = any(trial.is_reached(plan, name) for name in stacks)
        if reached and trial.gap(split, lambda name, wanted=stacks: name in wanted) <= _TOLERANCE:  # type: ignore[misc]
            plan = split
    return plan


def _summed(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which squares of a tensor are summed: in 16 bits they overflow."""
    return torch.promote_types(dtype, torch.float32)


def _new(entry: TensorPlan, dim: int, grad: Tensor) -> Tensor:
    """The part of a gradient that belongs to the new units of a dimension."""
    return grad.index_select(dim, torch.tensor(entry.axes[dim].new, device=grad.device))


def _plans(plan: Plan, trial: _Trial) -> Iterator[Plan]:
    """The plan, and the plan with its zeros cut elsewhere; last, where a tensor moves the loss that wakes alone."""
    for turned in _sides(plan):
        yield _with_turned(plan, turned) if turned else plan
    every = {place for places in _places(plan).values() for place in places}
    moving: set[str] = set()
    for pattern in sorted({pattern_of(name) for name, _ in every}):
        if trial.gap(plan, lambda name, wanted=pattern: pattern_of(name) == wanted) > _TOLERANCE:  # type: ignore[misc]
            moving.add(pattern)
    yield _with_turned(plan, {(name, dim) for name, dim in every if pattern_of(name) in moving})


def _with_turned(plan: Plan, turned: set[Place]) -> Plan:
    return plan.with_tensors({n: _turned(n, entry, turned) for n, entry in plan.tensors.items()})


def _padded_sizes(plan: Plan) -> Sizes:
    return frozenset((a.base, a.wide) for entry in plan.tensors.values() for a in entry.axes if a.padded)


def _places(plan: Plan) -> dict[tuple[int, int], set[Place]]:
    """The dimensions with zeros that noise would wake, by the sizes of their space."""
    found: dict[tuple[int, int], set[Place]] = {}
    for name, entry in plan.tensors.items():
        if entry.kind == "parameter" and not entry.gain and not entry.typical:
            for dim, axis in enumerate(entry.axes):
                if axis.padded:
                    found.setdefault((axis.base, axis.wide), set()).add((name, dim))
    return found


def _sides(plan: Plan) -> Iterator[set[Place]]:
    """Places to be cut, or not, other than in the plan: none; all of a space; all; single ones, for products of two tables."""
    spaces = sorted(_places(plan).items())
    yield set()
    for _, places in spaces:
        yield places
    if len(spaces) > 1:
        yield set().union(*(places for _, places in spaces))
    for _, places in spaces:
        alike: dict[str, set[Place]] = {}
        for name, dim in sorted(places):
            alike.setdefault(f"{pattern_of(name)} {dim}", set()).add((name, dim))
        yield from alike.values()


def _turned(name: str, entry: TensorPlan, places: set[Place]) -> TensorPlan:
    """The entry with some of its dimensions cut that were not, and not cut that were."""
    cut = set(entry.cut) ^ {dim for other, dim in places if other == name and dim not in entry.mean}
    return replace(entry, cut=tuple(sorted(cut)))


def _stuck(plan: Plan) -> Sizes:
    """The spaces that are written and of which no matrix has zeros that wake: zeros that meet only zeros never get a gradient."""
    found = set()
    for size, places in _places(plan).items():
        matrices = [(plan[name], dim) for name, dim in places if len(plan[name].axes) > 1]
        written = any(entry.axes[dim].role == "out" for entry, dim in matrices)
        if written and all(dim in entry.sleep.cut for entry, dim in matrices):
            found.add(size)
    return frozenset(found)
