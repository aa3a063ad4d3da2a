"""More experts for a mixture, with as many of them per token as before: the configuration, the plan, and a trial on a small copy.

Which of the two ways of `plans/more_experts.py` a model takes follows from its router. Where new experts sleep, the trial is the
gradient identity. Where copies part, it is measured with copies so far apart that every token keeps its experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from ...errors import Fault, MupscaleError, raise_faults
from ...noise.apart import far_apart
from ...plans.direction import Direction
from ...plans.more_experts import more_experts_plan
from ...plans.plan import Plan
from ...plans.wide_model import fill_model_
from ..config.multipliers import Experts, To
from ..config.nested import Path, expert_fields, nested_configs, with_edits
from ..copy.trial import End, Trial
from ..models import as_data, config_from
from ..types.into import target_of, with_experts
from .step import Step

_CLAIM = "this model cannot get more experts like that"


@dataclass(frozen=True)
class MoreExperts(Step):
    """A mixture with more experts, of which a token goes to as few as before."""

    number: int

    @cached_property
    def counted(self) -> tuple[Path, int, int]:
        """The field that counts experts, their number in the base, and how many groups they stand in."""
        data = as_data(self.start.config)
        found = [(path, part, expert_fields(part)) for path, part in nested_configs(data)]
        path, part, fields = next(each for each in found if each[2])
        groups = part[fields[2]] if fields[2:] else 1
        return (*path, fields[0]), part[fields[0]], groups

    @cached_property
    def end(self) -> End:
        made = with_edits(as_data(self.start.config), self.edits)
        return End(config_from(made), self.start.cls)

    @property
    def edits(self) -> Mapping[Path, Any]:
        return {self.counted[0]: self.number}

    @property
    def makes_tensors(self) -> bool:
        return False

    def plan(self, base: nn.Module, wide: nn.Module, copy: End) -> Plan:
        _, now, groups = self.counted
        try:
            return more_experts_plan(base, wide, (now, self.number), groups)
        except MupscaleError as error:
            if copy == self.start or self._can_be_whole(copy):
                raise
            raise MupscaleError(error.claim, [fault._replace(remedy="") for fault in error.faults]) from None

    def _can_be_whole(self, copy: End) -> bool:
        """Whether twice the experts of a small copy pass their trial, so that other numbers than this one can be had."""
        _, few, _ = MoreExperts(copy, 0).counted
        with suppress(MupscaleError):
            MoreExperts(copy, 2 * few).tried()
            return True
        return False

    def small(self, copy: End) -> MoreExperts:
        """As many times the experts of the copy; where that is no whole number, one more in every group."""
        _, now, _ = self.counted
        _, few, groups = MoreExperts(copy, 0).counted
        whole = self.number % now == 0
        return MoreExperts(copy, few * self.number // now if whole else few + groups)

    def judged(self, done: Trial) -> float:
        """Raises unless the run of the base continues, for all tokens or for those that keep their experts."""
        if (noise := far_apart(done.plan, done.base)) is not None:
            fill_model_(done.wide, done.base, Direction(done.plan, noise=noise), in_place=True)
        found = done.measured()
        if not found.exact:
            how = "with copies far apart" if noise is not None else "while the new ones sleep"
            what = f"with more experts the loss is off by {found.gap:.1e} {how}, and its gradient by {found.worst:.1e}"
            raise_faults(_CLAIM, [Fault("experts.more_change_the_loss", found.where, what)])
        return found.worst


def step_of(start: End, to: To) -> MoreExperts | None:
    """The experts that a goal adds to a mixture; None where it adds none."""
    number = int(dict(to.further).get("experts", 0))
    if not number:
        return None
    step = MoreExperts(start, number)
    data = as_data(start.config)
    if not any(expert_fields(part) for _, part in nested_configs(data)):
        what = "no field says how many experts a token goes to; a dense model needs top_k and expert_ffn too"
        raise_faults(_CLAIM, [Fault("experts.base_is_dense", "experts", what, _example(start, number))])
    if number <= step.counted[1]:
        what = f"{step.counted[1]} -> {number}: growing only adds experts"
        remedy = f"write a number above {step.counted[1]}"
        raise_faults(_CLAIM, [Fault("goal.size_not_larger", "experts", what, remedy)])
    return step


def _example(start: End, number: int) -> str:
    """What to write for a dense model; nothing where no class with experts holds it."""
    data = as_data(start.config)
    width = data.get("intermediate_size")
    ffn = width // 2 if isinstance(width, int) and width % 2 == 0 else width
    try:
        asked = Experts(number, min(2, number), int(ffn or 0), None)
        with_experts(data, target_of(data, start.cls.__name__, asked), asked)
    except MupscaleError:
        return ""
    return f"write experts={number},top_k={asked.top_k},expert_ffn={ffn}, for example"
