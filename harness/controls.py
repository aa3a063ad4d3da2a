"""The nearest wrong rules: every row of the optimizer registry with one of its factors left at 1.

A check that passes with a forgotten factor tests nothing. Where forgetting has no effect by nature, the
reason is stated here, and the benchmark fails when an excused factor turns out to matter.
"""

from __future__ import annotations

from dataclasses import replace

from torch.optim import Optimizer

from mupscale.rules import NEUTRAL, Decay, OptimizerRule, Units

_CREATED = "read only to create state, which exists by now"
_REFUSED = "a run in which it is large enough to act is refused"
_FACTORED = ("CAME", "HF Adafactor", "HF Adafactor by size", "HF Adafactor absolute")
EXCUSES = {
    ("Rprop", "lr"): _CREATED,
    ("Rprop", "prev"): "only its sign is read",
    ("ASGD", "ax"): "an average of the weights that no step reads",
    ("Adagrad", "initial_accumulator_value"): _CREATED,
    ("Adagrad sparse", "initial_accumulator_value"): _CREATED,
    ("Adafactor", "eps[0]"): _REFUSED,
    ("Adafactor absolute", "eps[0]"): _REFUSED,
    **{
        (f"Schedule-free {kind}", "scheduled_lr"): "written before it is read"
        for kind in ("SGD", "AdamW", "RAdam")
    },
    **{(name, "eps[0]"): "too small to act" for name in _FACTORED},
    **{(name, "RMS"): "written and never read" for name in _FACTORED},
    ("HF Adafactor", "eps[1]"): "read with scale_parameter only",
    ("HF Adafactor by size", "eps[1]"): "below the size of every weight here; HF Adafactor absolute shows it",
    ("AnyPrecision", "compensation"): "below the rounding of float64; tests/optimizers/test_rows.py shows it",
    **{
        (name, f"{key}, another row"): "its vectors have s = 1"
        for name in ("Keller Jordan's Muon", "Moonlight's Muon", "nanochat's Muon")
        for key in ("lr", "weight_decay")
    },
    ("Adafactor", "eps[1]"): "below the size of every weight here; Adafactor absolute shows it",
}
"""(setup, key) -> why leaving that factor at 1 has no effect."""

NOT_IN_A_RUN = {
    ("StableAdamW", "kahan_comp"): "kept for weights in 16 bits only",
    ("TorchaoAdamW", "max_exp_avg_sq"): "kept with amsgrad only; torch.optim.AdamW shows it",
    ("CAME", "exp_avg_sq"): "shown by the moments of vectors, which have the same key",
}
"""(class, key) -> why no run in float64 has this factor; tests/optimizers/test_rows.py shows it or says why not."""


def wrong_rules(rule: OptimizerRule) -> dict[str, OptimizerRule]:
    """Key -> the same row with that key's factor left at 1, for every key whose exponents are not zero.

    Decoupled decay follows the factor of lr, so a forgotten lr leaves both at 1.
    """
    wrong: dict[str, OptimizerRule] = {}
    if rule.lr != NEUTRAL:
        wrong["lr"] = replace(rule, lr=NEUTRAL)
    if rule.lr.of_matrices:
        wrong["shape"] = replace(rule, lr=Units(rule.lr.weight, rule.lr.gradient, rule.lr.filled))
    if rule.decay not in (None, Decay.INDEPENDENT):
        # Independent decay has the factor 1; the flag must go, and stay known, or it would decide instead.
        flag = {rule.decoupled_flag} if rule.decoupled_flag else set()
        wrong["weight_decay"] = replace(
            rule, decay=Decay.INDEPENDENT, decoupled_flag=None, neutral=rule.neutral | flag
        )
    for key, units in rule.hyper.items():
        if units == NEUTRAL:
            continue
        if not isinstance(units, tuple):
            wrong[key] = replace(rule, hyper={**rule.hyper, key: NEUTRAL})
            continue
        for i in (i for i, part in enumerate(units) if part != NEUTRAL):
            one_off = (*units[:i], NEUTRAL, *units[i + 1 :])
            wrong[f"{key}[{i}]"] = replace(rule, hyper={**rule.hyper, key: one_off})
    for key, state in rule.state.items():
        if state.units != NEUTRAL:
            wrong[key] = replace(rule, state={**rule.state, key: replace(state, units=NEUTRAL, copy=False)})
    return wrong


def wrong_for(optimizer: Optimizer, rule: OptimizerRule) -> dict[str, OptimizerRule]:
    """The wrong rules that matter to an optimizer: for each row that its tensors have, and the factors that it uses."""
    used: list[OptimizerRule] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            row = rule.row(group, p.dim(), optimizer.state.get(p))
            used += [row] if all(row is not other for other in used) else []
    found: dict[str, OptimizerRule] = {}
    for row in used:
        for key, wrong in wrong_rules(row).items():
            if has(optimizer, row, key):
                found[key if key not in found else f"{key}, another row"] = _swapped(rule, row, wrong)
    return found


def _swapped(rule: OptimizerRule, row: OptimizerRule, wrong: OptimizerRule) -> OptimizerRule:
    """A rule with one of its rows replaced."""
    if rule is row:
        return wrong
    return replace(rule, rows={value: _swapped(each, row, wrong) for value, each in rule.rows.items()})


def has(optimizer: Optimizer, rule: OptimizerRule, key: str) -> bool:
    """False for state and decay that this configuration of the optimizer does without."""
    if key in rule.state:
        return any(state.get(key) is not None for state in optimizer.state.values())
    if key == "weight_decay":
        return any(group.get(rule.decay_key) for group in optimizer.param_groups)
    return not (key in rule.hyper and all(group.get(key) is None for group in optimizer.param_groups))
