"""Real optimizer steps on the small copy: a run widened in mid-training continues as the base does.

The plan that is proved is the one for the full model, brought back to the size of the copy. A control runs next to
it, with the same weights and unscaled learning rates and eps; if it continued like the base, the steps would prove
nothing. A plan by units is also woken on the copy, to see whether its loss stays.

Where new channels carry the mean of the others, outputs are exact and training is not the base's. Such a plan is proved by
the loss and its gradients, pulled back, on the trained copy; the control has zeros in the place of means.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..errors import Fault, MupscaleError
from ..models.float64 import cast_, lifted_casts
from ..models.names import named_tensors
from ..noise.apart import share_kept
from ..noise.kinds import NewUnits
from ..noise.resolve import resolve_noise
from ..noise.where import exempt_of
from ..plans.direction import Direction
from ..plans.plan import Plan
from ..plans.rows import old_words
from ..plans.wide_model import fill_model_
from ..proofs.identity import Loss
from ..runs.run import Run
from ..tensors.differences import curve_gap, loss_gap
from ..tensors.random_states import forked
from ..training.check.verify import verify
from .copy.lift import Tensors
from .copy.losses import another_batch, find_batch, growing_outputs, loss_on
from .copy.trial import End
from .models import config_from, factory, model_class, on_meta
from .record import FamilyPlan
from .steps.compose import compose, whole_plan
from .steps.width import Width, width_part

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
    full = compose(End(config_from(family.base_config), cls), family.goal)
    chain = full.small(End(small, cls))
    width = Width(family.small_goal, family.export, family.declared)
    wide, wide_cls = width.end(chain.last)
    source = width_part(family.plan) if chain.steps else family.plan, family.powers
    ends = Tensors.of(on_meta(wide, wide_cls))
    plan, _ = whole_plan(chain, chain.plans(chain), width, source, ends)
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
    # Where training is not the base's there are no steps to compare.
    alone = copied.plan.carries_mean or copied.plan.parts_tokens
    certificate = verify(
        run,
        copied.wide,
        step=None if alone else lambda r, i: step(r, _BEFORE + i),
        loss=copied.losses[_BEFORE] if alone else None,
        plan=copied.plan,
        steps=steps,
    ).raise_if_broken()
    if copied.plan.carries_mean:
        wrong, control = "zeros for means", _moved(run, copied, _without_means(copied.plan))
    elif copied.plan.parts_tokens:
        wrong, control = "equal scores of copies", _moved(run, copied, copied.plan)
    else:
        wrong = "unscaled learning rates and eps"
        control = _control(run, copied, step, certificate.base_losses)
    if not control > _CONTROL:
        what = f"{wrong} change the loss by {control:.1e} only"
        raise MupscaleError("the proof proves nothing", [Fault("proof.control_too_small", "control", what)])
    woken = _woken(copied) if family.goal.by == "units" else {}
    steps = 0 if alone else steps
    return family.with_evidence(steps=steps, worst_step=certificate.worst, control=control, **woken)


def _adamw(model: nn.Module, plan: Plan) -> torch.optim.AdamW:
    """AdamW whose eps and decay both matter. Decay pulls w to 0, not 1 + w: folded gains of that kind go without."""
    bare = {n for n, t in plan.tensors.items() if t.shift and not t.fold.is_one}
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [p for n, p in named if n not in bare]}]
    if bare:
        groups.append({"params": [p for n, p in named if n in bare], "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-3, weight_decay=0.1)


def _woken(copied: Copy) -> dict[str, float | None]:
    """What waking does on the copy: how far the loss moves, and which share of tokens keep their experts where copies part."""
    tensors = {name: tensor for name, _, tensor in named_tensors(copied.base)}
    exempt = exempt_of(copied.base, copied.plan, "base")
    noise = resolve_noise(tensors, NewUnits(), plan=copied.plan, exempt=exempt)
    # Noise is drawn in float32, which casts that are lifted would make float64.
    wide = cast_(copied.wide(), torch.float64)
    fill_model_(wide, copied.base, Direction(copied.plan, noise=noise), in_place=True)
    with lifted_casts():
        kept = share_kept(copied.plan, copied.base, wide, copied.losses[0])
    return {"jump": _gap(copied.losses[0], copied.base, wide), "kept": kept}


def _without_means(plan: Plan) -> Plan:
    """The plan in which new channels are zeros and not the mean of the others."""
    zeros = {n: replace(e, mean=(), cut=e.sleep.cut) for n, e in plan.tensors.items() if e.mean}
    return plan.with_tensors(zeros)


def _moved(run: Run, copied: Copy, plan: Plan) -> float:
    """How far the loss moves in a copy that is filled by this plan, while it sleeps."""
    with lifted_casts(), torch.no_grad():
        wide = cast_(fill_model_(copied.wide(), run.model, Direction(plan)), torch.float64)
    return _gap(copied.losses[_BEFORE], run.model, wide)


def _gap(loss: Loss, *models: nn.Module) -> float:
    """How far a loss is from one model to another, under the same random numbers: some draw what they read even in eval mode."""
    found = []
    with lifted_casts(), torch.no_grad():
        for model in models:
            with forked(model, seed=0):
                found.append(float(loss(model)))
    return loss_gap(*found)


def _control(run: Run, copied: Copy, step: Any, exact: tuple[float, ...]) -> float:
    """How far the losses deviate with the right weights and unscaled learning rates and eps."""
    with lifted_casts():
        model = cast_(fill_model_(copied.wide(), run.model, Direction(copied.plan)), torch.float64)
        naive = Run(model, _adamw(model, copied.plan))
        found = []
        for i in range(len(exact)):
            with forked(model, seed=i):  # the random numbers of the run that it is compared with
                found.append(step(naive, _BEFORE + i))
    return curve_gap(exact, found)
