"""Stored runs of `reproduce/growth` as rows and cases, and the fit of the law and of growth to them.

A row is one point that can be compared: the best rate and noise by the loss on the rows for choosing, at the tuning seed,
and the mean held-out loss of its other seeds (of the tuning seed while there is no other). A case is a question with its
measured answers: a base that is finished, or a budget that nothing has been spent of.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from mupscale.budgets.law import LEAST_RUNS, Finished, GrowthWorth, Law, StoredLaw, fit

ABOUT = "MLPs of four layers on Forest Cover Type, AdamW, every run decayed to zero"
LAYERS, FEATURES, CLASSES = 4, 54, 7
KINDS = ("stay", "grow", "scratch")
TUNING_SEED = 0
LEAST_OF_A_PART = 4
NOTHING = StoredLaw(
    "no runs",
    Law(0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0, (0.0, 0.0), (0.0, 0.0)),
    GrowthWorth(0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0, 1.0, (0.0, 0.0), (), (0.0, 0.0), (1.0, 1.0)),
)
"""The fit of a store that is too small for one: every size is outside its range."""
WORTH = tuple(i / 20 for i in range(31))
FADES = tuple(i / 10 for i in range(21))
"""Tried values of what a base is worth, and of how fast that fades."""


@dataclass(frozen=True)
class Row:
    """A measured point. `budget` is what the user of a case has left; `spent` was spent on a base of `base` parameters."""

    kind: Literal["scratch", "stay", "grow"]
    params: int
    flops: float
    budget: int
    loss: float
    base: int = 0
    spent: float = 0.0
    share: float = 1.0
    """Where on its way the base was grown; 1 is a finished base."""
    noise: float = 0.0
    peak: float = 1.0


@dataclass(frozen=True)
class Case:
    """A base with what was spent on it, a budget, and the measured rows of each arm."""

    base: int
    spent: float
    budget: int
    rows: tuple[Row, ...]

    def best(self, kind: str) -> Row | None:
        """The row of a kind with the lowest loss."""
        return min((row for row in self.rows if row.kind == kind), key=lambda row: row.loss, default=None)

    @property
    def wider(self) -> tuple[int, ...]:
        """Sizes above the base's."""
        return tuple(sorted({row.params for row in self.rows} - {self.base}))


def parameters(width: int, layers: int = LAYERS) -> int:
    """Of the MLPs of the study.

    >>> parameters(32)
    4103
    """
    return (FEATURES + 1) * width + (layers - 2) * (width + 1) * width + (width + 1) * CLASSES


def read(path: Path) -> list[Row]:
    """The rows of a store; runs of other depths, methods and optimizer states are left out, and so are diverged ones."""
    points: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
    keys: dict[str, Mapping[str, Any]] = {}
    for line in path.read_text("utf-8").splitlines():
        told = json.loads(line)
        if "key" not in told or told["key"].keys() & {"layers", "state", "method"}:
            continue
        key, result = told["key"], told["result"]
        if result.get("held") is None or result.get("choose") is None:
            continue
        setting = json.dumps(_without(key, ("seed",)), sort_keys=True)
        point = json.dumps(_without(key, ("seed", "lr", "noise")), sort_keys=True)
        keys[setting] = key
        points.setdefault(point, {}).setdefault(setting, {})[key["seed"]] = result
    return [row for tried in points.values() for row in _best(tried, keys)]


def cases(rows: Iterable[Row]) -> list[Case]:
    """The questions that have all three answers: stay, grow and scratch."""
    known = list(rows)
    found = []
    grown = {
        (row.base, row.spent if row.share == 1 else 0.0, row.budget) for row in known if row.kind == "grow"
    }
    for base, spent, budget in sorted(grown):
        same = [row for row in known if row.budget == budget]
        mine = [row for row in same if row.base == base]
        here = [row for row in same if row.kind == "scratch" and row.params > base]
        here += [r for r in mine if r.kind == "grow" and (r.spent == spent if spent else r.share < 1)]
        here += [row for row in mine if row.kind == "stay" and row.spent == spent]
        if not spent:
            throughout = (row for row in same if row.kind == "scratch" and row.params == base)
            here += [replace(row, kind="stay", base=base) for row in throughout]
        case = Case(base, spent, budget, tuple(here))
        if all(case.best(kind) for kind in KINDS):
            found.append(case)
    return found


def fitted(rows: Iterable[Row], seen: Iterable[Row] | None = None) -> StoredLaw:
    """The law and growth of some rows; ranges are those of all `seen`.

    A part of what was seen may be small: how wrong its fit is on the rest is what is measured.
    """
    some = list(rows)
    everything = some if seen is None else list(seen)
    least = LEAST_RUNS if seen is None else LEAST_OF_A_PART
    law = fit([_finished(row) for row in some if row.kind == "scratch"], "the store", least)
    told = [_finished(row) for row in everything if row.kind == "scratch"]
    law = replace(
        law,
        params=(min(run.params for run in told), max(run.params for run in told)),
        flops=(min(run.flops for run in told), max(run.flops for run in told)),
    )
    return StoredLaw(ABOUT, law, growth(some, law, everything))


def growth(rows: list[Row], law: Law, seen: list[Row]) -> GrowthWorth:
    grown = [row for row in rows if row.kind == "grow"]
    went_on = [row for row in rows if row.kind == "stay"]
    best = [row for row in seen if row.kind == "grow"]
    ratios = [row.budget / row.spent for row in seen if row.spent and row.share == 1]
    start = replace(
        NOTHING.growth,
        runs=len(grown),
        times=max((row.params / row.base for row in best), default=1.0),
        more=(min(ratios, default=0.0), max(ratios, default=0.0)),
        shares=tuple(sorted({row.share for row in best if row.share < 1})),
        noise=(min((row.noise for row in best), default=0.0), max((row.noise for row in best), default=0.0)),
        peak=(min((row.peak for row in best), default=1.0), max((row.peak for row in best), default=1.0)),
    )

    def off(found: GrowthWorth, of: list[Row]) -> float:
        """The mean absolute error: one arm that was tuned badly should not move it."""
        return fmean(abs(log(predicted(found, law, row) / row.loss)) for row in of)

    if went_on:
        options = [replace(start, kept=kept) for kept in WORTH if kept <= 1]
        start = min(options, key=lambda found: off(found, went_on))
    if not grown:
        return start
    options = [replace(start, worth=worth, fades=fades) for worth, fades in product(WORTH, FADES)]
    return min(options, key=lambda found: off(found, grown))


def predicted(found: GrowthWorth, law: Law, row: Row) -> float:
    """The loss of a row by a fit."""
    if row.kind == "stay" and row.spent:
        return found.gone_on(law, (row.base, row.spent), row.flops, decayed=True)
    if row.kind == "grow":
        return found.grown(law, (row.base, row.spent), row.params, row.flops)
    return law.loss(row.params, row.flops)


def _finished(row: Row) -> Finished:
    return Finished(row.params, row.flops, row.loss)


def _without(key: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    kept = {name: value for name, value in key.items() if name not in names}
    return {**kept, "start": _without(key["start"], ("seed", "lr"))} if "start" in key else kept


def _best(
    tried: Mapping[str, Mapping[int, Mapping[str, Any]]], keys: Mapping[str, Mapping[str, Any]]
) -> Iterator[Row]:
    tuned = {setting: seeds for setting, seeds in tried.items() if TUNING_SEED in seeds}
    if not tuned:
        return
    chosen = min(tuned, key=lambda setting: float(tuned[setting][TUNING_SEED]["choose"]))
    key, seeds = keys[chosen], tuned[chosen]
    others = [result for seed, result in seeds.items() if seed != TUNING_SEED] or list(seeds.values())
    loss, first = fmean(float(result["held"]) for result in others), seeds[TUNING_SEED]
    row = Row("scratch", parameters(key["width"]), float(first["flops"]), key["budget"], loss)
    if "start" in key:
        start = key["start"]
        row = replace(
            row,
            kind="stay" if start["width"] == key["width"] else "grow",
            base=parameters(start["width"]),
            spent=float(first["flops_before"]),
            share=key.get("at", 1.0),
            noise=key.get("noise", 0.0),
            peak=key["lr"] / start["lr"],
        )
    yield row
