"""`mupscale cost --budget`: stay at a size, grow, or start anew. Prints; what is expected comes from `budgets/`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from ..budgets.advice import advise
from ..budgets.spent import STATE, Spent, read_spent
from ..errors import Fault, raise_faults
from ..extras import needs


def run(chosen: argparse.Namespace) -> int:
    base = None if chosen.model is None else read_spent(chosen.model)
    params = chosen.params if base is None else base.params
    spent, origin = _spent(chosen, base)
    finished = base is None or base.finished is not False
    advice = advise(
        params,
        spent=spent,
        budget=chosen.budget,
        to=chosen.wide_params or [_wider(chosen.model, chosen.k)],
        like=chosen.like or (None if base is None else base.like),
        decayed=finished and not chosen.mid_run,
        batch=chosen.batch,
        context=1 if chosen.context is None else chosen.context,
    )
    chosen.found = {"parameters": params, "spent": spent, "budget": chosen.budget, "advice": asdict(advice)}
    print(f"{params:,.0f} parameters, {spent:.4g} FLOPs spent{origin}, {chosen.budget:.4g} left\n\n{advice}")
    return 0


def _spent(chosen: argparse.Namespace, base: Spent | None) -> tuple[float, str]:
    """FLOPs that were spent, and where that is from."""
    if chosen.spent is not None:
        return chosen.spent, ""
    if base is None or base.flops is None:
        fault = Fault(
            "option.not_given",
            "--spent",
            f"not given, and no {STATE} in {chosen.model} says it",
            "write --spent 2e18, for example",
        )
        raise_faults("no advice can be given", [fault])
    assert base is not None
    assert base.flops is not None
    return base.flops, f" ({base.source} of {STATE})"


def _wider(base: Path, k: int) -> float:
    """Parameters of a base that is k times as wide in every width."""
    with needs("the size of a wider Hugging Face model", "hf"):
        from ..families.config.goal import Goal
        from ..families.config.grown import grown
        from ..families.config.multipliers import EVERY
        from ..families.models import config_from, model_class, on_meta, read_config

        config = config_from(read_config(base))
        wide = on_meta(grown(config, Goal({EVERY: k})), model_class(config))
    return float(sum(parameter.numel() for parameter in wide.parameters()))
