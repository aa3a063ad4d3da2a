"""The gradient identity: r · dup(G) on the image, zero off it, zero on new tensors.

Equal outputs are not enough: a wrong layout can give equal logits and unequal training. This test detects
it. Works on live modules of any size; tolerances are those of float64.

Where new channels carry the mean of the others, the loss is exact and training is not: norms subtract the mean over all
channels in their backward too. There the gradient is pulled back through the map before it is compared: what new channels
get goes to those whose mean they are, and what zeros get is left out. It is the base's if the loss is, to first order,
the base's at every weight that the map can reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..arguments import shown, wrong_function
from ..errors import MupscaleError, raise_faults
from ..models.class_code import code_of
from ..models.names import named_tensors
from ..plans.ends import check_end
from ..plans.plan import Plan
from ..plans.tensor_plan import TensorPlan
from ..rules.axes import Axis
from ..tensors.collapse import collapse
from ..tensors.differences import Difference, difference, loss_gap, relative, whole
from ..tensors.expand import expand
from ..tensors.making import Making
from ..tensors.parts import is_sharded, local_of, local_rectangle
from ..tensors.random_states import forked

Loss = Callable[[nn.Module], Tensor]
Gather = Callable[[Any], list[Any]]
"""Collects the values of all ranks, in the order of ranks, on every rank."""

GRADIENT_TOLERANCE = 1e-9
"""In float64. The worst of 99 exact stock model types, five AdamW steps included, is 1.5e-11."""
DRAWS = (
    "the loss is not a function of the model: two calls on one model under one seed differ, as when it draws a batch; "
    "draw it before, and write loss=lambda model: f(model, batch)"
)
SILENT = 1e-13  # a gradient this far below the model's largest is rounding, not signal


def alone(mine: Any) -> list[Any]:
    """The gathering of a single process: the case of one rank."""
    return [mine]


def merged(ranks: list[Mapping[str, Difference]]) -> dict[str, Difference]:
    """The differences of whole tensors from those that every rank measured on its parts."""
    return {name: whole([rank[name] for rank in ranks]) for name in ranks[0]}


def expected_weight(entry: TensorPlan, base: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """s · dup(W) of a weight or a buffer, as far as this process holds `like`."""
    return _expected(entry, base, like, entry.making())


def expected_gradient(entry: TensorPlan, base: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """r · dup(G) of a parameter, as far as this process holds `like`."""
    return _expected(entry, base, like, entry.gradient_making())


def _expected(entry: TensorPlan, base: Mapping[str, Tensor], like: Tensor, making: Making) -> Tensor:
    # Gathering a sharded base tensor is collective, so it comes before the question what this rank holds.
    held: dict[str, Any] = {name: base[name] for name in entry.sources}
    gathered = {name: t.full_tensor() if is_sharded(t) else t for name, t in held.items()}
    part, local = local_rectangle(like), local_of(like)
    want = torch.empty(part.shape, dtype=local.dtype, device=local.device)
    if part.numel:
        entry.write_(want, gathered, making, part.start)
    return want


@contextmanager
def keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Restore buffers after the block, because a measurement must not change running statistics.

    Frozen parameters too: some models average weights into a frozen copy inside their forward. And numbers and flags that the
    methods of a user's module write, such as a count of calls. And the modes, which a loss may set.
    """
    modes = [(module, module.training) for module in model.modules()]
    codes = {kind: code_of(kind) for kind in {type(module) for module in model.modules()}}
    written = {kind: code.counted | code.assigned for kind, code in codes.items()}
    counts = [
        (module, {n: v for n, v in vars(module).items() if n in written[type(module)] and _is_plain(v)})
        for module in model.modules()
    ]
    # A forward may write into a buffer, or put another tensor in its place.
    slots = [
        (module._buffers, leaf, buffer)
        for module in model.modules()
        for leaf, buffer in module._buffers.items()
        if buffer is not None
    ]
    frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
    before = [(tensor, tensor.detach().clone()) for tensor in (*model.buffers(), *frozen)]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module, values in counts:
            vars(module).update(values)
        for buffers, leaf, buffer in slots:
            buffers[leaf] = buffer
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)


class UntilBackward(TorchFunctionMode):
    """Inside this context a call of backward raises what `reached(loss)` returns."""

    def __init__(self, reached: Callable[[Tensor], BaseException]) -> None:
        super().__init__()
        self.reached = reached

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            raise self.reached(args[0])
        return func(*args, **(kwargs or {}))


def _refused_backward(loss: Tensor) -> MupscaleError:
    return MupscaleError(
        "the loss calls backward(): a proof takes the gradients itself, and a training step would change the "
        "models; return the loss without calling it, as in loss=lambda model: f(model(x), y)",
        code="argument.loss_calls_backward",
    )


class _CheckpointFunction:
    """Stands for torch's reentrant checkpoints, whose gradients torch.autograd.grad cannot take."""

    @staticmethod
    def apply(function: Callable[..., Any], keep_random: bool, *args: Any) -> Any:
        checkpoint = torch.utils.checkpoint.checkpoint
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=keep_random)


def loss_value(model: nn.Module, loss: Loss) -> Any:
    """What `loss(model)` returns, with a graph of which torch.autograd.grad can take gradients.

    Inside it `torch.utils.checkpoint` with use_reentrant=True does what it does with use_reentrant=False: the same values,
    computed again in the backward. A loss that calls backward() is refused.
    """
    module = torch.utils.checkpoint
    stock = module.CheckpointFunction
    module.CheckpointFunction = _CheckpointFunction  # type: ignore[misc,assignment]
    try:
        with torch.enable_grad(), UntilBackward(_refused_backward):
            return loss(model)
    finally:
        module.CheckpointFunction = stock  # type: ignore[misc]


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None)))


def _refuse_value(value: Any, parameters: list[Tensor]) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
        raise MupscaleError(
            f"loss(model) returned {found}, expected a tensor of one number; for example, return its mean",
            code="argument.loss_not_one_number",
        )
    if not parameters or not value.requires_grad:
        raise MupscaleError(
            "the loss does not depend on any trainable parameter of the model; unfreeze one, or return the loss "
            "without detaching it",
            code="argument.loss_without_gradient",
        )


def _refuse_unreached(gradients: tuple[Tensor | None, ...]) -> None:
    if not any(gradient is not None and bool(gradient.any()) for gradient in gradients):
        raise MupscaleError(
            "the gradient of every parameter is zero: the loss does not depend on the model that it is called with; "
            "compute it from its argument, as in loss=lambda model: f(model(x), y), and from no model around it",
            code="argument.loss_without_gradient",
        )


class Evaluated(NamedTuple):
    """One loss of a model: its value, the gradient of every trainable tensor, and the buffers as the loss left them."""

    value: float
    grads: Mapping[str, Tensor | None] = {}
    buffers: Mapping[str, Tensor] = {}


def evaluated(
    model: nn.Module, loss: Loss, wanted: Callable[[float], bool] = lambda value: True
) -> Evaluated:
    """Call `loss(model)` under a fixed random state; where `wanted(value)` is false, no gradient is taken."""
    raise_faults("no gradient can be taken", wrong_function("loss", loss, "model"))
    named = {name: t for name, kind, t in named_tensors(model) if kind == "parameter" and t.requires_grad}
    with forked(model, seed=0), keeping_buffers(model):
        value = loss_value(model, loss)
        unique = list({id(t): t for t in named.values()}.values())
        _refuse_value(value, unique)
        number = float(value.detach())
        if not wanted(number):
            return Evaluated(number)
        found = torch.autograd.grad(value, unique, allow_unused=True)
        _refuse_unreached(found)
        buffers = {n: t.detach().clone() for n, kind, t in named_tensors(model) if kind == "buffer"}
    grads = {id(t): g for t, g in zip(unique, found, strict=True)}
    dense = {
        name: None if (g := grads[id(t)]) is None else g.detach().to_dense() if g.is_sparse else g.detach()
        for name, t in named.items()
    }
    return Evaluated(number, dense, buffers)


@dataclass(frozen=True)
class Identity:
    """A measurement of the gradient identity: an error per tensor, and the tensors that it could not test."""

    errors: Mapping[str, float] = field(default_factory=dict)
    untested: tuple[str, ...] = ()
    ratios: Mapping[str, float] = field(default_factory=dict)
    """The least-squares factor between the found gradient and the expected one: 1 when they agree."""
    rounding: tuple[str, ...] = ()
    """Of the untested, those whose gradient is rounding: an optimizer may turn it into steps that differ."""
    spreads: Mapping[str, float] = field(default_factory=dict)
    """The root mean square of the difference of the found gradient from the expected one, relative to the latter's."""

    @property
    def worst(self) -> tuple[str, float]:
        """The tensor that is farthest off, and by how much."""
        name = max(self.errors, key=lambda n: self.errors[n], default="")
        return name, self.errors.get(name, 0.0)


def compare_gradients(
    base: Mapping[str, Tensor | None],
    wide: Mapping[str, Tensor | None],
    plan: Plan,
    gather: Gather = alone,
) -> Identity:
    """Compare every wide gradient with r · dup(G), pulled back where the plan has means; of sharded ones every rank compares its part."""
    mine: dict[str, Difference] = {}
    untested: list[str] = []
    known = {plan.planned(name): gradient for name, gradient in wide.items()}
    summed = plan.carries_mean or plan.parts_tokens
    for name, entry in plan.tensors.items():
        if entry.kind != "parameter" or (name not in known and not any(s in base for s in entry.sources)):
            continue
        found, sources = known.get(name), [base.get(source) for source in entry.sources]
        if found is None and all(g is None for g in sources):
            untested.append(name)
        else:
            mine[name] = _gradient_difference(found, sources, entry, summed)
    measured = merged(gather(mine))
    largest = max((d.size / float(plan[n].change.r) for n, d in measured.items()), default=0.0) or 1.0
    errors: dict[str, float] = {}
    rounding: list[str] = []
    for name, apart in measured.items():
        unit = largest * float(plan[name].change.r) if plan[name].sources else largest
        silent = apart.size <= SILENT * unit
        # What should be zero is compared with the unit: its own size is rounding.
        errors[name] = relative(apart.gap, unit if silent else apart.size, unit)
        # Where the wide gradient is not zero, it is tested, and fails.
        if silent and plan[name].sources and errors[name] <= GRADIENT_TOLERANCE:
            untested.append(name)
            rounding += [name] if apart.size or apart.gap else []
    ratios = {name: apart.ratio for name, apart in measured.items() if plan[name].sources}
    spreads = {name: apart.spread for name, apart in measured.items()}
    return Identity(errors, tuple(untested), ratios, tuple(rounding), spreads)


def compare_buffers(base: Mapping[str, Tensor], wide: Mapping[str, Tensor], plan: Plan) -> dict[str, float]:
    """How far each buffer is from s · dup of the base's after both models computed a loss, relative to its size.

    A forward may write buffers that its next call reads: running statistics, a scale. They must follow the base's. A
    buffer that has another shape than the plan's is a cache and is left out.
    """
    errors: dict[str, float] = {}
    for name, entry in plan.tensors.items():
        if entry.kind != "buffer" or not entry.sources or entry.fill == "own" or name not in wide:
            continue
        found = wide[name]
        shapes = (tuple(base[entry.sources[0]].shape), tuple(found.shape))
        if shapes == (entry.base_shape, entry.wide_shape) and (
            found.is_floating_point() or found.is_complex()
        ):
            errors[name] = difference(found, expected_weight(entry, base, found)).relative()
    return errors


def _gradient_difference(
    found: Tensor | None, sources: list[Tensor | None], entry: TensorPlan, pulled: bool
) -> Difference:
    """An absent gradient counts as zero; if only some of several sources have one, nothing can be compared."""
    known = {name: g for name, g in zip(entry.sources, sources, strict=True) if g is not None}
    if 0 < len(known) < len(sources):
        return Difference(gap=inf, size=1.0)
    if found is None:
        like = local_of(next(iter(known.values())))
        found = torch.zeros(entry.wide_shape, dtype=like.dtype, device=like.device)
    if not known:
        got = local_of(found)
        return difference(got, torch.zeros_like(got))
    got = _pulled_back(found, entry) if pulled else local_of(found)
    return difference(got, expected_gradient(entry, known, found))


def _pulled_back(grad: Tensor, entry: TensorPlan) -> Tensor:
    """A wide gradient as the base sees it: what new channels get goes to those whose mean they are, and zeros get nothing. Each
    copy of an expert has the mean of all its copies, which share its tokens.

    >>> from dataclasses import replace
    >>> from mupscale.rules import Axis
    >>> one, entry = torch.ones(6), TensorPlan(("w",), (Axis.parse("out: 4+2"),))
    >>> _pulled_back(one, entry), _pulled_back(one, replace(entry, mean=(0,)))
    (tensor([1., 1., 1., 1., 0., 0.]), tensor([1.5000, 1.5000, 1.5000, 1.5000, 0.0000, 0.0000]))
    >>> _pulled_back(torch.tensor([0.0, 2.0, 3.0, 1.0]), TensorPlan(("w",), (Axis.parse("out: 2x2"),), chosen=0))
    tensor([1., 1., 2., 2.])
    """
    pulled = grad.clone()
    if entry.chosen is not None:
        dims = enumerate(zip(entry.axes, grad.shape, strict=True))
        alone = Making(tuple(axis if dim == entry.chosen else Axis.fixed(n) for dim, (axis, n) in dims))
        pulled = expand(collapse(pulled, alone), alone)
    for dim, axis in enumerate(entry.axes):
        if not axis.padded or not entry.sources:
            continue
        new = torch.tensor(axis.new, device=grad.device)
        if dim in entry.mean:
            pulled += pulled.index_select(dim, new).sum(dim, keepdim=True) / (axis.wide - len(new))
        pulled.index_fill_(dim, new, 0)
    return pulled


@dataclass(frozen=True)
class Compared:
    """One loss of a base and of a wide model that hold corresponding weights: how far apart what it gives is."""

    base: Evaluated
    wide: Evaluated
    plan: Plan

    @cached_property
    def gap(self) -> float:
        """The relative difference of the losses."""
        return loss_gap(self.base.value, self.wide.value)

    @cached_property
    def identity(self) -> Identity:
        """How far every wide gradient is from r · dup(G)."""
        return compare_gradients(self.base.grads, self.wide.grads, self.plan)

    @cached_property
    def buffers(self) -> dict[str, float]:
        """How far every buffer is from s · dup of the base's."""
        return compare_buffers(self.base.buffers, self.wide.buffers, self.plan)

    @property
    def agrees(self) -> bool:
        """Whether the losses are equal up to the rounding of float64; a loss that is not a number is not."""
        return self.gap <= GRADIENT_TOLERANCE

    @property
    def wrong(self) -> list[str]:
        """The tensors whose gradients, and the buffers whose values, differ by more than the rounding of float64."""
        errors = {**self.identity.errors, **self.buffers}
        return [name for name, error in errors.items() if not error <= GRADIENT_TOLERANCE]

    @property
    def deviation(self) -> str:
        """What deviates first; "" if nothing does."""
        if not self.agrees:
            return f"the loss differs by {self.gap:.1e}"
        for name in self.wrong[:1]:
            if name in self.identity.errors:
                return f"the gradient of {name} is off by {self.identity.errors[name]:.1e}"
            return f"forward leaves {name} off by {self.buffers[name]:.1e}"
        return ""


def compared(base: nn.Module, wide: nn.Module, plan: Plan, loss: Loss) -> Compared:
    """Measure one loss on two live models.

    The readout of a grown model reads every copy at half weight. One that reads the first copies alone gives the same loss,
    and no gradient reaches the others:

    >>> import mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1, bias=False)).double()
    >>> loss = lambda model: model(torch.ones(2, 3, dtype=torch.float64)).sum()
    >>> plan, base = mu.plans.plan_between(make, 4, 8), make(4)
    >>> wide = mu.grow(base, lambda: make(8), plan=plan).model
    >>> compared(base, wide, plan, loss).deviation
    ''
    >>> with torch.no_grad():
    ...     _ = wide[2].weight.mul_(torch.tensor([2, 0] * 4))
    >>> found = compared(base, wide, plan, loss)
    >>> found.agrees, found.wrong
    (True, ['0.weight', '0.bias'])
    """
    return Compared(evaluated(base, loss), evaluated(wide, loss), plan)


def gradient_identity(base: nn.Module, wide: nn.Module, *, loss: Loss, plan: Plan) -> Identity:
    """Measure the gradient identity on two live models that hold corresponding weights.

    Args:
        base: The base.
        wide: The wide model, as `grow` made it.
        loss: `loss(model)` returns a scalar and must see the same data both times. The models are run in the mode they are in.
        plan: The plan from base to wide.

    Returns:
        The relative error of every tensor, and those that no gradient reached; `worst` is the largest, with its name.

    Raises:
        MupscaleError: If the plan does not fit the two models.

    >>> import mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> plan, base, x = mu.plans.plan_between(make, 4, 8), make(4).double(), torch.ones(2, 3).double()
    >>> wide = mu.grow(base, lambda: make(8), plan=plan).model
    >>> name, error = gradient_identity(base, wide, plan=plan, loss=lambda model: model(x).sum()).worst
    >>> error < 1e-12
    True
    """
    check_end(plan, base, "base")
    check_end(plan, wide, "wide")
    return compared(base, wide, plan, loss).identity
