"""Dense stock models that become models with experts: the configuration, the plan, and a trial on a small copy.

The dense feed-forward layer becomes the expert that every token goes to. The routed experts next to it are zero. Their
output is zero whatever the router chooses, and no gradient reaches them, because every path through an expert has two
weights that are zero, up and down. The router gets none either: it only weighs outputs that are zero. So the run of the
dense model continues for any number of experts, any top_k, any width of experts and any router, until noise wakes them:
routers, gates and ups get noise then, and downs are quiet, so that waking does not change the output. Downs learn in
the first step, everything else from the second step on.

Classes without a shared expert hold the dense layer as E copies, all of which every token goes to (top_k = E), behind a
router that is zero. Each has a weight of 1/E, so that s = 1, c = E and r = 1/E. The outputs of copies are equal, so the
router has no gradient either.

With down = 0 and a random up, as experts are often added, only the outputs are the base's: downs have a gradient from
the first step on, so the training is another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from ...errors import Fault, raise_faults
from ...models.names import Kind, named_tensors, unique_tensors
from ...plans.plan import Plan
from ...plans.tensor_plan import TensorPlan
from ...proofs.identity import GRADIENT_TOLERANCE
from ...rules.axes import Axis
from ..config.goal import Goal
from ..config.multipliers import Experts, To
from ..copy.trial import End, Trial
from ..models import as_data, config_from, model_class
from ..types.into import Target, target_of, with_experts
from .step import Step

_CLAIM = "this model cannot get experts exactly"
_MOST = 4
"""Experts of a small copy: enough for a router to choose two of them and leave others out."""


def refuse_wider(goal: Goal) -> None:
    """Raise if feed-forward layers grow in the goal that adds experts: it names the width of experts in the result."""
    if goal.to.experts is not None and goal.size("ffn", 1) != 1:
        what = "feed-forward layers would grow too, and expert_ffn is the width of experts in the result"
        remedy = "name the other widths, as -k hidden=2,heads=2,kv_heads=2"
        raise_faults(_CLAIM, [Fault("experts.ffn_grows_too", "ffn", what, remedy)])


def small_experts(experts: Experts, full: Mapping[str, Any], small: Mapping[str, Any]) -> Experts:
    """Experts of a small copy: fewer and narrower, and as wide as the dense layer where the full ones are.

    >>> small_experts(Experts(64, 8, 512), {"intermediate_size": 2048}, {"intermediate_size": 44})
    Experts(number=4, top_k=2, ffn=22, into=None)
    >>> small_experts(Experts(3, 3, 2048), {"intermediate_size": 2048}, {"intermediate_size": 44})
    Experts(number=3, top_k=3, ffn=44, into=None)
    """
    ffn, count = small["intermediate_size"], min(experts.number, _MOST)
    top_k = count if experts.top_k == experts.number else min(experts.top_k, 2)
    divisor = max((n for n in range(1, ffn // 2 + 1) if ffn % n == 0), default=1)
    return Experts(count, top_k, ffn if experts.ffn == full["intermediate_size"] else divisor, experts.into)


def experts_plan(base: nn.Module, wide: nn.Module, target: Target) -> Plan:
    """The plan from a dense model to one with experts that sleep; nothing has proved it yet."""
    old = {name: tuple(tensor.shape) for name, _, tensor in named_tensors(base)}
    tensors: dict[str, TensorPlan] = {}
    odd: list[Fault] = []
    new, ties = unique_tensors(wide)
    for name, (kind, tensor) in new.items():
        entry = _entry(name, kind, tuple(map(Axis.fixed, tensor.shape)), target)
        if entry.sources and any(old.get(source) != entry.source_shape for source in entry.sources):
            odd.append(
                Fault(
                    "experts.shape_differs",
                    name,
                    f"{entry.source_shape} is not the shape of {' and '.join(entry.sources)}",
                )
            )
        tensors[name] = entry
    used = {source for entry in tensors.values() for source in entry.sources} | set(ties)
    odd += [
        Fault("experts.tensor_left_over", name, "no tensor of the model with experts is made from it")
        for name in old
        if name not in used
    ]
    raise_faults("the two classes do not correspond", odd[:4])
    return Plan(tensors, ties)


def _entry(name: str, kind: Kind, axes: tuple[Axis, ...], target: Target) -> TensorPlan:
    """How one tensor of the model with experts is made."""
    for ending, sources in target.made.items():
        if block := _before(name, ending):
            cat, stack = 0 if len(sources) > 1 else None, 0 if target.copies else None
            if target.copies:
                axes = (Axis.parse(f"out: 1x{axes[0].wide}"), *axes[1:])
            return TensorPlan(
                tuple(block + source for source in sources), axes, cat=cat, kind=kind, stack=stack
            )
    for ending, like in target.asleep.items():
        if block := _before(name, ending):
            stack = 0 if len(axes) > 2 else None
            return TensorPlan((), axes, like=block + like, quiet=ending.endswith("down_proj"), stack=stack)
    if name.endswith(".e_score_correction_bias"):
        return TensorPlan(
            (), axes, kind=kind
        )  # a bias of routing that trainers move, and that starts at zero
    return TensorPlan((name,), axes, kind=kind)


def _before(name: str, ending: str) -> str:
    """What stands before an ending, up to a dot; "" where the name ends otherwise.

    >>> _before("layers.0.mlp.gate.weight", "mlp.gate.weight"), _before("layers.0.gate.weight", "mlp.gate.weight")
    ('layers.0.', '')
    """
    return name.removesuffix(ending) if name.endswith(f".{ending}") else ""


@dataclass(frozen=True)
class Mixture(Step):
    """A dense model in a class with experts, at its own width and depth."""

    experts: Experts
    target: Target

    @staticmethod
    def in_class(start: End, experts: Experts) -> Mixture:
        return Mixture(start, experts, target_of(as_data(start.config), start.cls.__name__, experts))

    @cached_property
    def end(self) -> End:
        made = config_from(with_experts(as_data(self.start.config), self.target, self.experts))
        return End(made, model_class(made, self.target.architecture))

    def plan(self, base: nn.Module, wide: nn.Module, copy: End) -> Plan:
        return experts_plan(base, wide, self.target)

    def small(self, copy: End) -> Mixture:
        full, small = as_data(self.start.config), as_data(copy.config)
        return Mixture.in_class(copy, small_experts(self.experts, full, small))

    def judged(self, done: Trial) -> float:
        """Raises unless experts sleep, and wake silently."""
        worst = _check_asleep(done)
        done.wake_()
        _check_woken(done)
        return worst


def step_of(start: End, to: To) -> Mixture | None:
    """The experts that a goal adds; None where it adds none. Refused where no class holds the dense model exactly."""
    return None if to.experts is None else Mixture.in_class(start, to.experts)


def _check_asleep(done: Trial) -> float:
    """The worst gradient error; raises unless the loss is the base's, and no gradient reaches what is new."""
    found = done.compared()
    if not found.agrees:
        what = f"the loss differs by {found.gap:.1e} in the class with experts: it computes something else"
        raise_faults(_CLAIM, [Fault("experts.loss_differs", type(done.wide).__name__, what)])
    errors = found.identity.errors
    wrong = [name for name, error in errors.items() if not error <= GRADIENT_TOLERANCE]
    awake = [name for name in wrong if done.plan[name].new]
    faults = [
        Fault("experts.moved_before_waking", name, "new, and training would move it before it wakes")
        for name in awake
    ]
    faults += [
        Fault("experts.gradient_differs", name, "its gradient differs in the class with experts")
        for name in wrong
        if not awake
    ]
    raise_faults(_CLAIM, faults[:4])
    return max(errors.values(), default=0.0)


def _check_woken(done: Trial) -> None:
    """Raise unless the woken model has the base's loss, and gradients reach the downs of its experts."""
    found = done.compared()
    if not found.agrees:
        what = f"waking experts changes the loss by {found.gap:.1e}, expected 0"
        raise_faults(_CLAIM, [Fault("experts.waking_changes_loss", type(done.wide).__name__, what)])
    quiet = [name for name, entry in done.plan.tensors.items() if entry.quiet]
    asleep = [name for name in quiet if (grad := found.wide.grads[name]) is None or not grad.any()]
    raise_faults(
        _CLAIM,
        [
            Fault("experts.never_wake", name, "no gradient reaches it when its expert wakes")
            for name in asleep[:2]
        ],
    )
