"""Real optimizer steps on the small copy: a run widened in mid-training continues as the base does.

The plan that is proved is the one for the full model, brought back to the size of the copy. A control runs next to
it, with the same weights and unscaled learning rates and eps; if it continued like the base, the steps would prove
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..errors import Fault, MupscaleError
from ..models.float64 import cast_, lifted_casts
from ..plans.direction import Direction
from ..plans.plan import Plan
from ..plans.rows import old_words
from ..plans.wide_model import fill_model_
from ..proofs.identity import Loss
from ..runs.run import Run
from ..tensors.differences import curve_gap
from ..tensors.random_states import forked
from ..training.check.verify import verify
from .depth import deepened, new_blocks, small_depth, width_part
from .experts import entered, experts_plan
from .export import wide_of
from .lift import Tensors, lift
from .losses import another_batch, find_batch, growing_outputs, loss_on
from .models import as_data, config_from, factory, model_class, on_meta
from .record import FamilyPlan
from .small_search import declared_layouts
from .tables import more_of, small_more, table_plan, with_more

_BEFORE = 3
"""Steps before growing, so that there is optimizer state to carry over."""
_CONTROL = 1e-6
"""What the control must change the loss by, relatively: far above the rounding of float64, and far below 4e-2,
the least that it changed on 99 stock model types."""


@dataclass(frozen=True)
class Copy:
    """The small copy of a family plan: a base model, a factory for the wide one, the plan between them."""

    base: nn.Module
    wide: Any
    plan: Plan
    losses: list[Loss]


def small_copy(family: FamilyPlan, batches: int) -> Copy:
    """Both ends of the small copy with random weights, and a loss for each of several batches."""
    small = config_from(family.small_config)
    cls = model_class(small, family.architecture)
    experts = family.small_goal.to.experts
    mixture = None if experts is None else entered(small, cls, experts)
    first, own = (small, cls) if mixture is None else (mixture.config, mixture.cls)
    full = more_of(as_data(config_from(family.base_config)), family.goal.to)
    more = small_more(as_data(first), full)
    longer = with_more(first, more) if more else first
    depth = small_depth(longer) if family.new_blocks else None
    start = longer if depth is None else deepened(longer, depth)
    wide, wide_cls = wide_of(start, family.small_goal, family.export, own)
    unwidened = on_meta(start, own)
    ends = Tensors.of(unwidened), Tensors.of(on_meta(wide, wide_cls))
    layouts = declared_layouts(as_data(first), family.small_goal, list(ends[1].shapes), family.declared)
    width = family.plan if start is small else width_part(family.plan)
    plan, _ = lift(width, *ends, layouts, family.powers)
    if depth is not None:
        plan = new_blocks(on_meta(longer, own), unwidened, depth, first, own).then(plan)
    if more:
        plan = table_plan(on_meta(first, own), first, more, own).then(plan)
    if mixture is not None:
        plan = experts_plan(on_meta(small, cls), on_meta(first, own), mixture.target).then(plan)
    plan = replace(plan, proof="copy")
    make, make_wide = factory(cls, seed=1), factory(wide_cls, seed=1)
    with forked(seed=1):
        base, other = cast_(make(small), torch.float64), cast_(make_wide(wide), torch.float64)
    with lifted_casts():
        batch, which = find_batch(base, small)
        growing = growing_outputs(base, other, batch)
        words = old_words(plan)
        losses = [loss_on(another_batch(base, small, which, seed), growing, words) for seed in range(batches)]
    return Copy(base, lambda: make_wide(wide), plan, losses)


def prove(family: FamilyPlan, steps: int = 5) -> FamilyPlan:
    """The family plan with the evidence of `steps` AdamW steps, state carried over in mid-training.

    Raises when the wide run does not continue the base run, or when the control does.
    """
    copied = small_copy(family, _BEFORE + steps)
    run = Run(copied.base, _adamw(copied.base, copied.plan))

    def step(run: Run, i: int) -> float:
        run.optimizers[0].zero_grad()
        loss = copied.losses[i](run.model)
        loss.backward()  # type: ignore[no-untyped-call]
        run.optimizers[0].step()
        return float(loss.detach())

    with lifted_casts():
        for i in range(_BEFORE):
            step(run, i)
    certificate = verify(
        run, copied.wide, step=lambda r, i: step(r, _BEFORE + i), plan=copied.plan, steps=steps
    ).raise_if_broken()
    control = _control(run, copied, step, certificate.base_losses)
    if not control > _CONTROL:
        raise MupscaleError(
            "the proof proves nothing",
            [
                Fault(
                    "proof.control_too_small",
                    "control",
                    f"unscaled learning rates and eps change the loss by {control:.1e} only",
                )
            ],
        )
    return family.with_evidence(steps=steps, worst_step=certificate.worst, control=control)


def _adamw(model: nn.Module, plan: Plan) -> torch.optim.AdamW:
    """AdamW whose eps and decay both matter. Decay pulls w to 0, not 1 + w: folded gains of that kind go without."""
    bare = {n for n, t in plan.tensors.items() if t.shift and not t.fold.is_one}
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [p for n, p in named if n not in bare]}]
    if bare:
        groups.append({"params": [p for n, p in named if n in bare], "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-3, weight_decay=0.1)


def _control(run: Run, copied: Copy, step: Any, exact: tuple[float, ...]) -> float:
    """How far the losses deviate with the right weights and unscaled learning rates and eps."""
    with lifted_casts():
        model = cast_(fill_model_(copied.wide(), run.model, Direction(copied.plan)), torch.float64)
        naive = Run(model, _adamw(model, copied.plan))
        found = [step(naive, _BEFORE + i) for i in range(len(exact))]
    return curve_gap(exact, found)
