"""`mupscale advise`: stay at a size, grow, or start anew. Prints; what is expected comes from `budgets/`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..budgets.advice import advise
from ..budgets.spent import STATE, Spent, read_spent
from ..errors import Fault, MupscaleError, raise_faults
from ..files.strict import parse_json, read_regular


def run(chosen: argparse.Namespace) -> int:
    base = None if chosen.base is None else read_spent(chosen.base)
    params = chosen.params if base is None else base.params
    spent, said = _spent(chosen, base)
    finished = base is None or base.finished is not False
    advice = advise(
        params,
        spent=spent,
        budget=chosen.budget,
        to=chosen.to,
        losses=None if chosen.losses is None else _losses(chosen.losses),
        decayed=finished and not chosen.mid_run,
        batch=chosen.batch,
        context=chosen.context,
    )
    print(f"{params:,.0f} parameters, {spent:.4g} FLOPs spent{said}, {chosen.budget:.4g} left\n\n{advice}")
    return 0


def _spent(chosen: argparse.Namespace, base: Spent | None) -> tuple[float, str]:
    """FLOPs that were spent, and where that is from."""
    if chosen.spent is not None:
        return chosen.spent, ""
    if base is None or base.flops is None:
        fault = Fault(
            "option.not_given",
            "--spent",
            f"not given, and no {STATE} in {chosen.base} says it",
            "write --spent 2e18, for example",
        )
        raise_faults("no advice can be given", [fault])
    assert base is not None
    assert base.flops is not None
    return base.flops, f" ({base.source} of {STATE})"


def _losses(path: Path) -> list[Any]:
    told = parse_json(read_regular(path), str(path))
    if not isinstance(told, list):
        raise MupscaleError(
            f"{path} holds a {type(told).__name__}, expected [[parameters, FLOPs, loss], …]",
            code="advice.losses_not_a_list",
        )
    return told
