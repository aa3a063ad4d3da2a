"""The likeliest plan of two models: every knob at its first setting, and the layouts that their code shows.

It takes one forward of each model, in their own dtype, and no copy in float64. Nothing has proved it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from ...errors import raise_faults
from ...models.calls import Trace, traced
from ...models.dropout import without_dropout
from ...plans.direction import Direction
from ...plans.plan import Plan
from ...plans.wide_model import fill_model_
from ...proofs.identity import Loss, evaluated
from ..draft import Draft
from ..facts.padded_norms import streams, unpaddable, with_streams
from .choices import Choices, assumed_roles
from .not_found import mean_not_written
from .shown import shown_layouts


def likely_plan(made: Draft, base: nn.Module, wide: nn.Module, loss: Loss) -> Plan:
    """The likeliest plan; the wide model is written over."""
    raise_faults("these two models cannot be planned", list(unpaddable(made)))
    with without_dropout(base, wide):
        before = _trace(base, loss)
        found = streams(made, before)
        if found.closed:
            raise mean_not_written(found.closed)
        made = with_streams(made, found)
        choices = Choices(made, base, before.returned, found)
        trial = choices.draft(choices.likeliest)
        fill_model_(wide, base, Direction(trial.plan()), hooks=False)
        shown = shown_layouts(trial, before, _trace(wide, loss))
    plan = (trial if shown is None else shown.apply(trial)).plan()
    return replace(plan, needs=plan.needs | assumed_roles(made, plan))


def _trace(model: nn.Module, loss: Loss) -> Trace:
    """All calls of one loss, without gradients."""
    seen: list[Trace] = []

    def recorded(model: nn.Module) -> Tensor:
        value, trace = traced(model, lambda: loss(model))
        seen.append(trace)
        return value

    evaluated(model, recorded, wanted=lambda value: False)
    return seen[-1]
