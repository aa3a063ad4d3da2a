"""`mupscale cost`: FLOPs of training from scratch and of growing, and when growing does not pay.

Prints; the arithmetic is in `budgets/`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from ..budgets.cost import ACCOUNTS, ComparedRuns, Cost, Number, reasons
from ..budgets.file_flops import FileModel
from ..budgets.flops import quadratic
from ..budgets.stock_flops import StockModel
from ..extras import needs
from ..text import columns

Model = StockModel | FileModel


def run(chosen: argparse.Namespace) -> int:
    stock = chosen.model.suffix != ".py"
    model: Model
    with needs("the cost of a Hugging Face model", "hf"):
        if stock:
            model = StockModel(chosen.model, chosen.k, chosen.batch, chosen.context)
            proxy = chosen.proxy or model.proxy
        else:
            model, proxy = FileModel(chosen.model, chosen.width), chosen.proxy
    case = ComparedRuns(
        model.width,
        chosen.k,
        proxy,
        chosen.steps,
        chosen.base_steps or chosen.steps,
        chosen.trials,
        chosen.upscaled_steps,
    )
    found = case.cost(lambda width: model.at(width).counted)
    chosen.found = {"widths": [case.width, case.wide], "flops": vars(found)}
    print(describe(str(chosen.model), case, model))
    return 0


def unit_for(flops: Iterable[Number]) -> tuple[str, float]:
    """The unit in which all of these have at least one digit before the point.

    >>> unit_for([3e9, 5e13]), unit_for([0])
    (('GFLOPs', 1000000000.0), ('FLOPs', 1.0))
    """
    least = min((float(f) for f in flops if f), default=1.0)
    units = (("EFLOPs", 1e18), ("PFLOPs", 1e15), ("TFLOPs", 1e12), ("GFLOPs", 1e9), ("MFLOPs", 1e6))
    return next(((name, size) for name, size in units if least >= size), ("FLOPs", 1.0))


def _shown(flops: Number, size: float) -> str:
    count = float(flops) / size
    return f"{count:,.0f}" if count >= 1000 or size == 1 else f"{count:.4g}"


def describe(name: str, case: ComparedRuns, model: Model) -> str:
    """Steps, runs, accounts, the proxy from which it pays, and the reasons against it."""
    cost = case.cost(lambda width: model.at(width).counted)
    parts = [
        _steps(name, case, model),
        _runs(case, model, cost),
        _accounts(case, cost),
        _proxies(case, model),
    ]
    tokens = (
        None if model.tokens is None else float(case.steps * model.tokens) / model.at(case.wide).parameters
    )
    against = reasons(case, cost, tokens)
    lines = [f"  - {line}" for line in against] or ["  nothing found"]
    return "\n\n".join([*parts, "against growing like this\n" + "\n".join(lines)])


def _steps(name: str, case: ComparedRuns, model: Model) -> str:
    widths = {"base": case.width, "wide": case.wide, "proxy, grown": case.k * case.proxy}
    steps = {what: model.at(width) for what, width in widths.items()}
    unit, size = unit_for(step.counted for step in steps.values())
    rows = [("", "width", "parameters", "by formula", "counted")]
    for what, step in steps.items():
        flops = (_shown(step.formula, size), _shown(step.counted, size))
        rows.append((what, f"{step.width:,}", f"{step.parameters:,}", *flops))
    head = (
        f"{name}: {case.width:,} -> {case.wide:,} (k = {case.k}), "
        f"tuned on {case.proxy:,} -> {case.k * case.proxy:,} (n/n0 = {case.width / case.proxy:.3g})"
    )
    return f"{head}\n\n{unit} of one training step, forward and backward\n" + columns(
        rows, right=(1, 2, 3, 4)
    )


def _runs(case: ComparedRuns, model: Model, cost: Cost) -> str:
    formula = case.cost(lambda width: model.at(width).formula)
    last = "as long as from scratch" if case.upscaled_steps is None else f"{case.upscaled_steps:,} steps"
    runs = (
        ("from scratch", f"{case.steps:,} steps", formula.scratch, cost.scratch),
        ("base", f"{case.base_steps:,} steps", formula.base, cost.base),
        ("tuning", f"{case.trials:g} x {case.steps:,} steps", formula.tuning, cost.tuning),
        ("upscaled", last, formula.upscaled, cost.upscaled),
        ("stay", _throughout(case, model), formula.scratch, cost.scratch),
    )
    unit, size = unit_for(counted for _, _, _, counted in runs)
    rows = [("", "", "by formula", "counted", "of scratch")]
    for what, length, by_formula, counted in runs:
        share = f"{float(counted / cost.scratch):.1%}"
        rows.append((what, length, _shown(by_formula, size), _shown(counted, size), share))
    return f"{unit} of whole runs\n" + columns(rows, right=(2, 3, 4))


def _throughout(case: ComparedRuns, model: Model) -> str:
    return f"{case.steps_throughout(lambda width: model.at(width).counted):,.0f} steps of the base's width"


def _accounts(case: ComparedRuns, cost: Cost) -> str:
    known = case.upscaled_steps is not None
    rows = [("", "speedup" if known else "", "pays if the upscaled run is as good as from scratch")]
    for account in ACCOUNTS:
        faster = cost.break_even(account)
        speedup = f"{cost.speedup(account):.2f}" if known else ""
        if faster is None:
            when = "never: what is charged already costs more"
        else:
            times = f" ({faster:.3g} times faster)" if faster > 1 else ""
            when = f"before step {float(case.steps) / faster:,.0f}{times}"
        rows.append((account, speedup, when))
    return "break-even, counted\n" + columns(rows, right=(1,))


def _proxies(case: ComparedRuns, model: Model) -> str:
    if not case.trials:
        return "n/n0: nothing is tuned"
    widths = (case.width, case.wide, 2 * case.wide, case.k * case.proxy)
    curve = quadratic([(width, model.at(width).counted) for width in widths])
    if curve is None:
        return "n/n0 from which it pays: not known, as FLOPs are not a polynomial of degree two in this width"
    head = "n/n0 from which it pays"
    if case.upscaled_steps is None:
        head += ", a lower bound: the upscaled run counts as zero (give --upscaled-steps)"
    rows = []
    for account in ("tuning charged", "both charged"):
        largest = case.largest_proxy(curve, account)
        text = "none: not even a proxy of one unit" if largest is None else _ratio(case, largest)
        rows.append((account, text))
    return f"{head}\n" + columns(rows)


def _ratio(case: ComparedRuns, largest: int) -> str:
    return f"{case.width / largest:.3g} (n0 = {largest:,} or less)" if largest < case.width else "any"
