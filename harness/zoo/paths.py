"""The calls by which a user grows a model of the zoo, each with zero noise: this file alone knows their arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

import mupscale as mu
from harness.zoo.entry import Entry, Exact

Declarations = dict[str, dict[str, Any]]
NOISE = mu.MupNoise(0.0)
ROUNDS = 6
"""How many refusals in a row are followed; each must add a declaration."""


def plain(entry: Entry, run: mu.Run) -> mu.Run:
    """The shortest call of the README."""
    return mu.upscale(run, entry.grown, NOISE)


def unproved(entry: Entry, run: mu.Run) -> mu.Run:
    """The same with proofs switched off."""
    return mu.upscale(run, entry.grown, NOISE, prove=False)


def with_loss(entry: Entry, run: mu.Run) -> mu.Run:
    return mu.upscale(run, entry.grown, NOISE, loss=entry.loss)


def with_inputs(entry: Entry, run: mu.Run) -> mu.Run:
    return mu.upscale(run, entry.grown, NOISE, example_inputs=entry.examples)


def planned(
    entry: Entry, run: mu.Run, declarations: Mapping[str, Any], loss: bool, fresh: bool = False
) -> mu.Plan:
    """A plan with declarations, proved by the loss if one is asked for; from new models if `fresh`, else from the run's."""
    options: dict[str, Any] = {
        "declared": mu.Declared(**declarations),
        "loss": entry.loss if loss else None,
    }
    if fresh:
        return mu.plans.plan_between(entry.make, entry.base, entry.wide, **options)
    return mu.infer_plan(run.model, entry.grown, **options)


def known(entry: Entry, run: mu.Run, judgement: Exact) -> mu.Run:
    """Growth by the plan that is stored with the entry."""
    plan = planned(entry, run, judgement.declarations, judgement.loss, fresh=True)
    return mu.grow(run, entry.grown, plan=plan, prove=False)


def certified(entry: Entry, run: mu.Run, plan: mu.Plan, steps: int) -> bool:
    """Whether verify says that the plan is exact."""
    return mu.verify(run, entry.grown, step=entry.step, plan=plan, steps=steps).holds


def follow(entry: Entry, run: mu.Run, refused: mu.MupscaleError, loss: bool) -> mu.Run | None:
    """Write what a refusal tells to write, until it grows or refuses for good; None when it names nothing to write."""
    given: Declarations = {}
    fresh = False
    for _ in range(ROUNDS):
        more = merged(given, declarations_of(refused))
        newer = fresh or "plan_between(" in str(refused)
        if more == given and newer == fresh:
            break
        given, fresh = more, newer
        try:
            plan = planned(entry, run, given, loss, fresh)
            return mu.upscale(run, entry.grown, NOISE, plan=plan)
        except mu.MupscaleError as error:
            refused = error
    if given or fresh:
        raise refused
    return None


_OPENING = re.compile(r"(roles|layouts|folds)=(?=\{)")


def declarations_of(error: mu.MupscaleError) -> Declarations:
    """The first declaration of every fault, with those that are to be passed next to it.

    >>> from mupscale.errors import Fault
    >>> line = 'declare layouts={"f.weight": {1: 4}}, roles={"g": "out"}, or folds={"h": "1/2"}'
    >>> declarations_of(mu.MupscaleError("refused", [Fault("search.tensor_undecided", "f.weight", "undecided", line)]))
    {'layouts': {'f.weight': {1: 4}}, 'roles': {'g': 'out'}}
    """
    found: Declarations = {}
    for text in (error.claim, *(fault.remedy for fault in error.faults)):
        match = _OPENING.search(text)
        while match is not None:
            end = _closing(text, match.end())
            try:
                value = ast.literal_eval(text[match.end() : end])
            except (SyntaxError, ValueError):
                break
            found = merged(found, {match[1]: value})
            gap = re.match(r",?\s*(?:and\s+)?", text[end:])
            match = _OPENING.match(text, end + (gap.end() if gap else 0))
    return found


def _closing(text: str, start: int) -> int:
    """The place after the brace that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    return len(text)


def merged(first: Mapping[str, Mapping[str, Any]], second: Mapping[str, Mapping[str, Any]]) -> Declarations:
    """Both together; where they speak of the same axis of a tensor, the first holds."""
    both = {word: dict(values) for word, values in first.items()}
    for word, values in second.items():
        mine = both.setdefault(word, {})
        for name, value in values.items():
            if isinstance(value, dict) and isinstance(mine.get(name), dict):
                mine[name] = {**value, **mine[name]}
            else:
                mine.setdefault(name, value)
    return both
