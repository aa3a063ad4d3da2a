"""Which optimizer left a state dict: by the settings of its groups, the names of what it keeps, and their dimensions.

Knows: the table of rules. Reads no file and touches no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import Fault, MupscaleError
from ..files.strict import printable
from ..rules.optimizer_rule import Decay, OptimizerRule
from ..rules.optimizers import RULES
from .positions import CLAIM, LEAVE
from .read import settings_of

Groups = Sequence[Mapping[str, Any]]
States = Iterable[Mapping[str, Any]]


def candidates(
    groups: Groups, states: States, rules: Mapping[str, OptimizerRule] | None = None
) -> dict[str, OptimizerRule]:
    """Every row of the table that such groups and such state can be of. A flag tells Adam from AdamW, where there is one.

    >>> adam = dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, amsgrad=False)
    >>> state = {"step": 1, "exp_avg": 0, "exp_avg_sq": 0}
    >>> [name for name in candidates([adam], [state]) if name.startswith("torch.")]
    ['torch.optim.Adam', 'torch.optim.AdamW']
    >>> flagged = {**adam, "decoupled_weight_decay": True}
    >>> [name for name in candidates([flagged], [state]) if name.startswith("torch.")]
    ['torch.optim.AdamW']
    """
    every, settings = list(states), list(map(settings_of, groups))
    given, kept = {key for group in settings for key in group}, {key for state in every for key in state}
    found: dict[str, OptimizerRule] = {}
    for name, rule in (RULES if rules is None else rules).items():
        needed = rule.constants - rule.constructor_only
        known = needed <= given and all(map(rule.known, given)) and kept <= set(rule.state)
        if known and all(_stacks(rule, state) for state in every):
            found[name] = rule
    flagged = {name: rule for name, rule in found.items() if all(_flag_fits(rule, g) for g in settings)}
    return flagged or found


def identify(
    groups: Groups,
    states: States,
    rules: Mapping[str, OptimizerRule] | None = None,
    *,
    remedy: str = f"name it (--optimizer torch.optim.AdamW), register it, or {LEAVE}",
) -> OptimizerRule:
    """The one row of the table that knows these settings and this state; several are fine when they agree.

    >>> settings = dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, amsgrad=False, params=[0])
    >>> identify([settings], [{"step": 1, "exp_avg": 0, "exp_avg_sq": 0}]).decay_kind(settings).name
    'COUPLED'
    """
    every = list(states)
    kept = {key for state in every for key in state}
    found = candidates(groups, every, rules)
    # Rows that give the present state the same units and the same refusals do the same here.
    kinds = {(rule.refuse, *(rule.state[key] for key in sorted(kept))) for rule in found.values()}
    if len(kinds) == 1:
        return next(iter(found.values()))
    given = {key for group in groups for key in settings_of(group)}
    has = ", ".join(sorted(map(printable, given))), ", ".join(sorted(map(printable, kept))) or "nothing"
    which = f"which fits {', '.join(found)}" if found else "which no optimizer in the registry has"
    what = f"its groups have {has[0]}; its state has {has[1]}, {which}"
    raise MupscaleError(CLAIM, [Fault("state.optimizer_unclear", "which optimizer was it?", what, remedy)])


def _stacks(rule: OptimizerRule, state: Mapping[str, Any]) -> bool:
    """Whether what a row calls a stack of tensors has a dimension more than the rest of the state."""
    sizes = {key: len(getattr(value, "shape", ())) for key, value in state.items()}
    most = max((size for key, size in sizes.items() if not rule.state[key].stack), default=0)
    return all(size == most + 1 for key, size in sizes.items() if rule.state[key].stack)


def _flag_fits(rule: OptimizerRule, settings: Mapping[str, Any]) -> bool:
    """Whether a group that says how its decay is applied says what the row does."""
    flag = rule.decoupled_flag
    return flag is None or flag not in settings or bool(settings[flag]) == (rule.decay is Decay.DECOUPLED)
