"""What is looked at in a run whose new units woke, or whose copies were split: no reader was in use, so no loss may move.

Works with losses, a plan and its noise, wherever they were measured.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from torch import nn

from ...errors import Fault, MupscaleError, raise_faults
from ...noise.resolved import NoisePlan
from ...plans.ends import expect_plan
from ...plans.more_experts import ADMITTED_BY_BIAS
from ...plans.plan import Plan
from ...proofs.compare import tolerance_of
from ...rules.products import By

_SMALL = 0.01
"""A loss that is small because a model fits its batch: outputs near 1 in float32 move its square root by 1e-7."""


def check_woken(
    losses: Mapping[str, float] | None,
    wide: nn.Module,
    plan: Plan,
    noise: NoisePlan,
    unlearned: Sequence[str],
    given: bool,
) -> None:
    """Raise if the loss moved; warn of copies that nothing parts, and of sizes whose new units will not learn.

    `given` says that the caller chose the plan.
    """
    if losses is not None and not plan.parts_tokens and _moved(losses, wide):
        fault = moved_by_waking(losses["before"], losses["after"], given)
        raise_faults("waking would change the loss", [fault])
    if equal := _equal_copies(plan, noise):
        warnings.warn(
            f"{', '.join(equal)} grows by copies that nothing parts: they stay equal in training, and the width is not used; "
            'write by="copies" and loss=, which chooses noise that parts them',
            stacklevel=3,
        )
    asleep = _sleeping_experts(plan)
    if asleep:
        warnings.warn(f"new experts of {', '.join(asleep)} sleep: {ADMITTED_BY_BIAS}", stacklevel=3)
    if unlearned := [size for size in unlearned if size not in asleep]:
        what = "get no gradient from this loss, so they will not learn"
        warnings.warn(f"new units of {', '.join(unlearned)} {what}", stacklevel=3)


def moved_by_waking(before: float, after: float, given: bool) -> Fault:
    """The fault for a loss that moved by more than rounding although nothing that reads new units or copies has changed."""
    what = f"it is {before:.6g} before and {after:.6g} after new units and split copies woke"
    remedy = "leave out by= and plan=" if given else 'write by="copies", whose noise is chosen by the loss'
    return Fault("growth.waking_moves_loss", "the loss", what, remedy)


def refuse_other_way(by: By | None, plan: Plan | None) -> None:
    """Raise where the caller asks for one way to grow and gives a plan of the other, which would be followed.

    >>> import mupscale as mu
    >>> plan = mu.plans.plan_between(lambda n: nn.Sequential(nn.Linear(3, n), nn.ReLU(), nn.Linear(n, 2)), 4, 8)
    >>> refuse_other_way("copies", plan), refuse_other_way("units", None)
    (None, None)
    """
    if plan is None:
        return
    expect_plan(plan)
    axes = [axis for entry in plan.tensors.values() for axis in entry.axes if axis.grows]
    zeros = [axis for axis in axes if axis.padded]
    if (by == "units" and axes and not zeros) or (by == "copies" and zeros):
        has = "no new units" if by == "units" else f"zeros, {zeros[0].base} -> {zeros[0].wide} among them"
        fault = Fault("plan.of_another_way", "plan=", f"it has {has}", "leave out by=, or leave out plan=")
        raise MupscaleError(f"by={by!r} is not how this plan grows", [fault])


def _sleeping_experts(plan: Plan) -> list[str]:
    """The numbers of experts, before and after, of which the new ones have a bias that keeps tokens away."""
    axes = [axis for entry in plan.tensors.values() if entry.pad for axis in entry.axes if axis.padded]
    return list(dict.fromkeys(f"{axis.base} -> {axis.wide}" for axis in axes))


def _moved(losses: Mapping[str, float], wide: nn.Module) -> bool:
    """Whether the loss moved by more than rounding.

    This also sees how the rounding of the base parts from that of the wide model, so the tolerances are those of proofs. What
    waking alone does was compared before, in float64 for all but large models (`planning/awake.py`). Losses below `_SMALL` are
    compared as if they were as large: the rounding of outputs does not fall with the loss.
    """
    dtypes = {p.dtype for p in wide.parameters() if p.is_floating_point()}
    tolerance = max((tolerance_of(dtype, None) for dtype in dtypes), default=0.0)
    before, after = losses["before"], losses["after"]
    return not abs(after - before) <= tolerance * max(abs(before), _SMALL)


def _equal_copies(plan: Plan, noise: NoisePlan) -> list[str]:
    """Sizes that grow by copies where no weight that reads them was split: such copies stay equal for ever."""
    copied: set[tuple[int, int]] = set()
    parted: set[tuple[int, int]] = set()
    for name, entry in plan.tensors.items():
        one = noise.tensors.get(name)
        for dim, axis in enumerate(entry.axes):
            if axis.k > 1 and axis.role is not None:
                copied.add((axis.base, axis.wide))
                if one is not None and (one.sigma is not None or one.split == dim):
                    parted.add((axis.base, axis.wide))
    return [f"{base} -> {wide}" for base, wide in sorted(copied - parted)]
