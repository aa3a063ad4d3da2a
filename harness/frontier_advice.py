"""Advice about the stored cases of `frontier_store.py`, each asked with the runs of its budget left out of the fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from math import inf, log
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

from harness.frontier_store import KINDS, NOTHING, Case, Row, cases, fitted, predicted, read
from harness.program import Outcome
from mupscale import MupscaleError
from mupscale.budgets import advice, law
from mupscale.budgets.arms import Advice

CLOSE = 0.02
LEAST_CASES = 2
"""The error of one case tells nothing about another."""


def law_of(store: Path) -> tuple[list[Row], law.StoredLaw]:
    """The rows of a store and their fit; a store that is too small has the fit of nothing."""
    rows = read(store)
    try:
        return rows, with_spread(rows)
    except MupscaleError as refused:
        print(refused)
        return rows, NOTHING


def judged(store: Path, stored: Path | None = None) -> Outcome:
    """The advice on all cases of a store; it fails when there is no store, or the stored law is not its fit."""
    if not store.is_file():
        return Outcome("", [f"{store} is missing: run python -m reproduce.growth"])
    rows, whole = law_of(store)
    failed = []
    if stored is not None and stored.read_text("utf-8") != whole.to_json():
        failed.append(f"{stored.name} is not the fit of {store.name}: run python benchmarks/advise.py --fit")
    return Outcome(judge(rows, whole), failed)


def with_spread(rows: list[Row]) -> law.StoredLaw:
    """The fit of all rows, with errors of rows that were predicted without the runs of their budget."""
    found = fitted(rows)
    off: dict[Row, float] = {}
    contrasts: list[float] = []
    asked = cases(rows)
    for budget in sorted({row.budget for row in rows}):
        blind = without(rows, budget)
        if blind is None:
            continue
        off |= {row: error(blind, row) for row in rows if row.budget == budget}
        for case in asked:
            if case.budget == budget:
                best = [error(blind, row) for kind in KINDS if (row := case.best(kind))]
                contrasts += [a - b for a, b in combinations(best, 2)]
    if len(contrasts) < LEAST_CASES * len(KINDS):
        raise MupscaleError(
            f"the error of the law cannot be measured: {len(contrasts) // len(KINDS)} cases have a fit without their "
            f"budget, expected {LEAST_CASES} or more"
        )
    spread = {kind: law.root_mean_square([off[row] for row in off if row.kind == kind]) for kind in KINDS}
    growth = replace(
        found.growth,
        grown_spread=spread["grow"],
        stay_spread=spread["stay"],
        contrast=law.root_mean_square(contrasts),
    )
    return replace(found, law=replace(found.law, spread=spread["scratch"]), growth=growth)


def error(blind: law.StoredLaw, row: Row) -> float:
    return log(predicted(blind.growth, blind.law, row) / row.loss)


def without(rows: list[Row], budget: int) -> law.StoredLaw | None:
    """The fit without the runs of a budget; None where too few are left."""
    try:
        return fitted([row for row in rows if row.budget != budget], rows)
    except MupscaleError:
        return None


def judge(rows: list[Row], whole: law.StoredLaw) -> str:
    """Ask about every case and sum up the answers; errors, and so how sure it is, are those of the whole fit."""
    regrets: dict[str, list[float]] = {"score": [], "stay": [], "grow": [], "scratch": []}
    right = 0
    for case in cases(rows):
        blind = without(rows, case.budget)
        if blind is None:
            continue
        blind = replace(blind, growth=replace(blind.growth, contrast=whole.growth.contrast or inf))
        with patch.object(advice, "stored", lambda blind=blind: blind):
            told = advice.advise(case.base, spent=case.spent, budget=case.budget, to=case.wider)
        best = [row.loss for kind in KINDS if (row := case.best(kind))]
        lowest = min(best)
        name, row = named(case, told)
        for kind, loss in zip(KINDS, best, strict=True):
            regrets[kind].append(loss / lowest - 1)
        regrets["score"].append(row.loss / lowest - 1)
        right += row.loss == lowest
        print(line(case, f"{name} ({told.sure})", row.loss / lowest - 1))
    close = sum(regret <= CLOSE for regret in regrets["score"])
    means = " ".join(f"{name}={mean(values):.4f}" for name, values in regrets.items())
    return f"cases={len(regrets['score'])} right={right} within_2pct={close} {means}"


def named(case: Case, told: Advice) -> tuple[str, Row]:
    """The arm with the lowest expected loss among those that were measured, and its measurement."""
    for arm in sorted((arm for arm in told.arms if arm.loss is not None), key=lambda arm: arm.loss or 0.0):
        first = arm.phases[0].flops if len(arm.phases) > 1 else 0.0
        share = 1.0 if case.spent else first / case.budget
        for row in case.rows:
            same = (row.kind, row.params) == (arm.kind, arm.params)
            if same and (row.kind != "grow" or abs(row.share - share) < 0.01):
                return arm.name, row
    worst = max(case.rows, key=lambda row: row.loss)
    return told.choice, worst


def line(case: Case, told: str, regret: float) -> str:
    best = min(case.rows, key=lambda row: row.loss)
    return (
        f"{case.base:,} parameters, {case.spent:.3g} FLOPs spent, {case.budget:.3g} left: {told}; "
        f"measured best {best.kind} {best.params:,}: {best.loss:.4f}, regret {regret:.1%}"
    )


def mean(values: Iterable[float]) -> float:
    known = list(values)
    return fmean(known) if known else 0.0
