"""Prove a registry row on real steps of the optimizer, without a model.

Two tensors, the base and its widening, are given gradients G and r · dup(G); if the row is right the
second stays the widening of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...arguments import wrong_function, wrong_kind
from ...errors import Fault, MupscaleError, raise_faults
from ...plans.plan import Plan
from ...plans.tensor_plan import TensorPlan
from ...proofs.identity import expected_gradient, expected_weight
from ...rules.axes import Axis
from ...rules.optimizer_rule import OptimizerRule
from ...rules.optimizers import qualified_name, rule_for
from ...runs.run import Run
from ...tensors.devices import default_device, has_float64
from ...tensors.differences import difference
from ...tensors.random_states import forked
from ..grow.grow import grow

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The largest relative errors over 12 steps. In float32 a right row is off by 1e-6; an optimizer that divides rounding by
almost zero, such as SOAP, is off by its whole size, and in float64 that would not show."""


class _Weight(nn.Module):
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=dtype))


def check_optimizer(
    make: Callable[[list[nn.Parameter]], Optimizer],
    *,
    before: int = 8,
    steps: int = 12,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> float:
    """Prove the row of an optimizer: a small tensor and its growth are stepped side by side.

    Args:
        make: A function of a list of parameters that builds the optimizer. Choose large settings (eps, weight_decay), so that a
            wrong unit would show.
        before: How many steps are taken before the tensor is grown.
        steps: How many steps are taken after.
        dtype: The dtype of the tensor. By default it is proved in float64 and in float32.
        tolerance: The relative error that counts as equal; by default 1e-9 in float64 and 1e-4 in float32.
        rules: Rows to use in place of the registry of optimizers, by full class name.

    Returns:
        The largest relative error, in float64 unless `dtype` says otherwise; about 1e-16 for a right row.

    Raises:
        MupscaleError: If the wide tensor is farther off than the tolerance, or the class has no row.

    >>> check_optimizer(lambda params: torch.optim.AdamW(params, lr=0.1, eps=0.1, weight_decay=0.5)) < 1e-12
    True
    """
    raise_faults("no optimizer can be made", wrong_function("make", make, "params"))
    errors, here = [], default_device()
    for each in TOLERANCES if dtype is None else (dtype,):
        with torch.device("cpu" if each == torch.float64 and not has_float64(here) else here):
            name, worst = _worst(make, before, steps, each, rules)
        allowed = TOLERANCES.get(each, TOLERANCES[torch.float32]) if tolerance is None else tolerance
        if not worst <= allowed:
            raise MupscaleError(
                f"the units registered for {name} are not right: after {steps} steps in {str(each)[6:]} the wide tensor is "
                f"{worst:.1e} away from the base's widening; check lr, decay, every hyperparameter and every state",
                code="optimizer.wrong_units",
            )
        errors.append(worst)
    return errors[0]


def _worst(
    make: Callable[[list[nn.Parameter]], Optimizer],
    before: int,
    steps: int,
    dtype: torch.dtype,
    rules: Mapping[str, OptimizerRule] | None,
) -> tuple[str, float]:
    """The name of the optimizer, and its largest relative error in one dtype."""
    entry = TensorPlan(("weight",), (Axis.parse("out: 6x2"), Axis.parse("in: 4x3")))
    plan = Plan({"weight": entry})
    generator = torch.Generator().manual_seed(0)
    with forked(seed=0):
        base = _Weight(entry.base_shape, dtype)
        optimizer = make([base.weight])
    remedy = "return the optimizer: lambda params: AdamW(params, lr=0.1)"
    raise_faults("make(params) made no optimizer", wrong_kind("make(params)", optimizer, Optimizer, remedy))

    def gradient() -> Any:
        drawn = torch.randn(entry.base_shape, dtype=torch.float64, generator=generator, device="cpu")
        return drawn.to(base.weight.device, dtype)

    for i in range(before):
        base.weight.grad = gradient()
        optimizer.step()
        if i == 0:
            _refuse_undeclared_copies(optimizer, base.weight, rule_for(type(optimizer), rules=rules))
    wide = grow(
        Run(base, optimizer), lambda: _Weight(entry.wide_shape, dtype), plan=plan, prove=False, rules=rules
    )
    start, worst = base.weight.detach().clone(), 0.0
    for _ in range(steps):
        base.weight.grad = gradient()
        grown = wide.model.get_parameter("weight")
        grown.grad = expected_gradient(entry, {"weight": base.weight.grad}, grown)
        optimizer.step()
        wide.optimizers[0].step()
        want = expected_weight(entry, {"weight": base.weight.detach()}, grown)
        worst = max(worst, difference(grown.detach(), want).relative())
    name = qualified_name(type(optimizer))
    if torch.equal(start, base.weight.detach()):
        raise MupscaleError(
            f"{name} did not move its parameter in {steps} steps, so nothing was tested; give it a learning rate",
            code="optimizer.did_not_move",
        )
    return name, worst


def _refuse_undeclared_copies(optimizer: Optimizer, weight: Tensor, rule: OptimizerRule) -> None:
    """Raise if a state in the units of the weight is nearer to it than to zero and its row does not call it a copy.

    Exact growth does not show it: a copy without noise is exact, and then pulls the noise out of the weight again.
    """
    faults = []
    for key, value in optimizer.state.get(weight, {}).items():
        known = rule.row(optimizer.param_groups[0], weight.dim(), optimizer.state[weight]).state.get(key)
        undeclared = known is not None and known.may_be_a_copy and not known.copy
        if (
            undeclared
            and getattr(value, "shape", None) == weight.shape
            and (value - weight).norm() < 0.5 * weight.norm()
        ):
            what = f"its state {key!r} looks like a copy of the weights, which must get their noise"
            where, remedy = qualified_name(type(optimizer)), f"write {key!r}: State(W, copy=True)"
            faults.append(Fault("optimizer.undeclared_weight_copy", where, what, remedy))
    raise_faults("the row of this optimizer is not complete", faults)
