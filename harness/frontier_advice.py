"""Advice about the stored cases of `frontier_store.py`, each asked with itself left out of the fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import expm1, hypot, sqrt
from pathlib import Path
from statistics import fmean
from typing import NamedTuple
from unittest.mock import patch

from harness.frontier_store import KINDS, Answer, Case, Errors, cases, fitted, off, on_the_way
from harness.program import Outcome
from mupscale.budgets import advice
from mupscale.budgets.advice import DEFAULT_WAY
from mupscale.budgets.arms import Advice, Arm
from mupscale.budgets.law import Law, inside, samples

CLOSE = 0.02
"""Of the lowest loss for MLPs, nats for Llamas."""
LARGER = 279_104
"""Parameters of the larger Llama of the bench."""
LEAST_CASES = 2
"""A way that was measured once has no error."""


class Judged(NamedTuple):
    """An answer about one case, and by how much it and fixed answers miss the lowest loss."""

    case: Case
    said: str
    missed: float
    stay: float
    grow: float
    scratch: float

    @property
    def regrets(self) -> tuple[float, ...]:
        """In the order of the last line: as a share of the loss, or in nats."""
        return tuple(_shown(self.case, miss) for miss in self[2:])


def whole(known: Sequence[Case]) -> Law:
    """The fit of all cases, with the errors of each way in cases that the fit had not seen."""
    missed: dict[tuple[str, str], list[float]] = {}
    for case in known:
        for way, error in off(fitted(_but(known, case), known), case):
            missed.setdefault((case.like, way), []).append(error)
    errors = {
        column: hypot(*wrong) / sqrt(len(wrong))
        for column, wrong in missed.items()
        if len(wrong) >= LEAST_CASES
    }
    return fitted(known, errors=errors)


def errors_of(law: Law) -> Errors:
    return {
        (like, way.name): way.error
        for like, kind in law.kinds.items()
        for way in kind.ways
        if way.error is not None
    }


def judged(results: Path, stored: Path | None = None) -> Outcome:
    """The advice on all cases of a folder of stores; it fails if the stored law is not their fit."""
    known = cases(results)
    if not any(case.complete for case in known):
        return Outcome("", [f"{results} has no case: run python -m reproduce.growth"])
    law = whole(known)
    failed = []
    if stored is not None and stored.read_text("utf-8") != law.to_json():
        failed.append(f"{stored.name} is not the fit of the store: run python benchmarks/advise.py --fit")
    found = list(judge(known, known, law))
    for each in found:
        print(_line(each))
    regrets = [fmean(column) for column in zip(*(each.regrets for each in found), strict=True)]
    mixed = shuffled(known, law)
    print(f"control: with the outcomes of other cases in the fit the mean regret is {mixed:.4f}")
    if mixed <= regrets[0]:
        failed.append(
            f"outcomes of other cases advise as well: {mixed:.4f}, and {regrets[0]:.4f} with their own"
        )
    apart = list(judge(known, known, law, by_base=True))
    within = sum(each.regrets[0] <= CLOSE for each in apart)
    print(f"with all cases of a base left out: {within} of {len(apart)}, where another base is measured")
    for line in beside(results, law):
        print(line)
    right = sum(each.missed == 0 for each in found)
    close = sum(each.regrets[0] <= CLOSE for each in found)
    names = ("score", "stay", "grow", "scratch")
    means = " ".join(f"{name}={mean:.4f}" for name, mean in zip(names, regrets, strict=True))
    share = close / len(found)
    return Outcome(f"cases={len(found)} right={right} within_2pct={close} share={share:.2f} {means}", failed)


def beside(results: Path, law: Law) -> Iterator[str]:
    """How far off the law is about new models in the place of what was left of a run, inside the measured range."""
    errors = [error for case in inside_of(law, on_the_way(results)) for _, error in off(law, case)]
    if errors:
        worst = max(map(abs, errors))
        yield f"new models beside runs on their way, in no fit: {len(errors)}, off by at most {worst:.3f}"


def inside_of(law: Law, known: Sequence[Case]) -> list[Case]:
    """Cases of new models beside a run on its way that the advice answers."""
    return [
        case
        for case in known
        for way in law.kinds[case.like].ways
        if way.kind == "scratch" and way.finished is not None
        if inside(case.answers[0].share, (0.0, way.finished.share[1]))
        if way.going is not None and inside(case.answers[0].samples, way.going.samples)
    ]


def judge(known: Sequence[Case], told: Sequence[Case], law: Law, by_base: bool = False) -> Iterator[Judged]:
    """Ask about every complete case; the fit sees the others as they are `told`, or only those of other bases.

    Errors and ranges are those of all.
    """
    for case in known:
        if not case.complete:
            continue
        others = [new for old, new in zip(known, told, strict=True) if old is not case]
        if by_base:
            others = [other for other in others if (other.base, other.trained) != (case.base, case.trained)]
            if not any(other.like == case.like for other in others):
                continue
        blind = fitted(others, known, errors_of(law))
        with patch.object(advice, "stored", lambda blind=blind: blind):
            answer = advice.advise(
                case.base, spent=case.spent, budget=case.budget, to=case.wide, like=case.like
            )
        said, difference = named(case, answer)
        lowest = min(0.0, *(a.difference for a in case.answers))
        fixed = (case.best(kind) - lowest for kind in ("stay", "grow", "scratch"))
        if answer.arm is not None:
            first = _label(answer.arm)
            said = f"{said} ({answer.sure})" if said == first else f"{first}, which was not run, then {said}"
        yield Judged(case, said, difference - lowest, *fixed)


def named(case: Case, told: Advice) -> tuple[str, float]:
    """The arm with the lowest expected loss among those that were measured, and its measurement."""
    measured = {answer.way: answer.difference for answer in case.answers} | {"": 0.0}
    arms = [
        arm for arm in told.arms if told.arm is not None and (arm.kind == "stay" or arm.between is not None)
    ]
    for arm in sorted(arms, key=lambda arm: arm.difference or 0.0):
        if (way := _way(arm)) in measured:
            return _label(arm), measured[way]
    return told.choice, max(measured.values())


def shuffled(known: Sequence[Case], law: Law) -> float:
    """The control: the mean regret if the fit sees, for each way, the outcomes of other cases."""
    found = []
    for by in range(1, 5):
        outcomes: dict[tuple[str, str], list[float]] = {}
        for case in known:
            for answer in case.answers:
                outcomes.setdefault((case.like, answer.way), []).append(answer.difference)
        turned = {
            column: [*seen[by % len(seen) :], *seen[: by % len(seen)]] for column, seen in outcomes.items()
        }
        told = [replace(case, answers=tuple(_retold(case, turned))) for case in known]
        found += [each.regrets[0] for each in judge(known, told, law)]
    return fmean(found)


def table(law: Law) -> str:
    """What a law knows, as Markdown: each way, where it was measured, and half of its interval."""
    lines = ["| model | way | cases | samples left per parameter | interval |", "|---|---|---|---|---|"]
    for like, kind in law.kinds.items():
        for way in kind.ways:
            spans = [span.samples for span in (way.finished, way.going) if span is not None]
            low, high = min(low for low, _ in spans), max(high for _, high in spans)
            left = f"{low:,.0f} to {high:,.0f}" if low < high else f"{low:,.0f}"
            told = "a new model" if way.kind == "scratch" else way.name
            lines.append(f"| {like} | {told} | {way.cases} | {left} | {_told(kind.unit, way.within)} |")
    return "\n".join(lines)


def larger(results: Path, law: Law) -> str:
    """What the law would say of the larger Llama, which is in no fit, beside what was measured, in nats above staying."""
    known = law.kinds["llama"]
    ends = {}
    for line in (results / "frontier_large.jsonl").read_text("utf-8").splitlines():
        key, result = (json.loads(line)[part] for part in ("key", "result"))
        if "start" in key and key["budget"] == key["start"]["budget"] and "layers" not in key:
            ends["" if key["width"] == key["start"]["width"] else key.get("method", "copies")] = (
                key,
                result["held"],
            )
    lines = ["| way | expected | measured |", "|---|---|---|"]
    for way in known.ways:
        method = {DEFAULT_WAY: "copied_readers", "copies": "copies"}.get(way.name)
        if method in ends and "" in ends:
            key, held = ends[method]
            left = samples(LARGER, key["budget"]) / LARGER
            lines.append(
                f"| {way.name} | {law.difference(way, left, 0.5):+.3f} | {held - ends[''][1]:+.3f} |"
            )
    return "\n".join(lines)


def _told(unit: str, within: float | None) -> str:
    if within is None:
        return "none"
    return f"±{100 * within:.0f} %" if unit == "per cent" else f"±{within:.3f} nats"


def _retold(case: Case, outcomes: dict[tuple[str, str], list[float]]) -> Iterator[Answer]:
    for answer in case.answers:
        yield replace(answer, difference=outcomes[case.like, answer.way].pop(0))


def _but(known: Sequence[Case], case: Case) -> list[Case]:
    return [other for other in known if other is not case]


def _way(arm: Arm) -> str:
    return "scratch" if arm.kind == "scratch" else arm.way


def _label(arm: Arm) -> str:
    return arm.way or arm.kind


def _shown(case: Case, miss: float) -> float:
    """A miss as a share of the loss, or in nats."""
    return miss if KINDS[case.like].unit == "nats" else expm1(miss)


def _line(each: Judged) -> str:
    case = each.case
    best = min(case.answers, key=lambda answer: answer.difference)
    way, difference = (best.way, best.difference) if best.difference < 0 else ("stay", 0.0)
    return (
        f"{case.like}, {case.base:,} parameters, {case.spent:.3g} FLOPs spent, {case.budget:.3g} left: {each.said}; "
        f"measured best {way} at {difference:+.3f}, regret {each.regrets[0]:.4f}"
    )
