"""Stored runs of `reproduce/growth` as cases, and the fit of `mupscale.budgets.law` to them.

A case is a question with its measured answers: a base with what it has cost, and FLOPs that are left. The rate and the noise
of an answer are those with the lowest loss on the rows for choosing, at the tuning seed; its loss is the mean held-out loss of
its other seeds (of the tuning seed while there is no other).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np

from mupscale.budgets.advice import DEFAULT_WAY, SHARE
from mupscale.budgets.law import Law, Measured, Span, Way, range_of, samples

TUNING_SEED = 0
TIMES = 2
"""How many times as wide the models become that the advice is about."""
LEFT_OUT = {"stop", "by_rule", "one_rate", "centred", "top_k"}
"""Fields of runs that belong to other questions."""
Unit = Literal["per cent", "nats"]
Errors = Mapping[tuple[str, str], float]
"""By kind of model and way."""


class Kind(NamedTuple):
    """A kind of model: its stores, each with the layers that a key without layers has."""

    about: str
    unit: Unit
    files: tuple[tuple[str, int], ...]
    layers: int


KINDS: Mapping[str, Kind] = {
    "mlp": Kind(
        "MLPs of four layers on Forest Cover Type, AdamW, every run decayed to zero",
        "per cent",
        (("frontier.jsonl", 4), ("frontier_widths.jsonl", 4)),
        4,
    ),
    "llama": Kind(
        "Llamas of two layers with tied embeddings on textbooks, AdamW, every run decayed to zero",
        "nats",
        (("frontier_text.jsonl", 2), ("directions.jsonl", 4)),
        2,
    ),
}


@dataclass(frozen=True)
class Answer:
    """A measured way to go on. `difference` is to staying: log of the ratio of the losses, or nats."""

    way: str
    difference: float
    samples: float
    """Left per parameter of the base, when it begins."""
    share: float
    """Of all FLOPs, that the base has had by then."""
    times: float
    """FLOPs of a sample over those of the base; parameters, where the model becomes wider."""
    peak: float
    width: bool = True

    @property
    def kind(self) -> Literal["grow", "scratch"]:
        return "scratch" if self.way == "scratch" else "grow"


@dataclass(frozen=True)
class Case:
    """A base with what was spent on it, FLOPs that are left, and what was measured beside staying."""

    like: str
    base: int
    spent: float
    """0 where the base would be grown on the way, so that all FLOPs are left."""
    budget: float
    wide: int
    trained: int
    """FLOPs for which the base is trained; bases that are grown on the way would be trained for all."""
    answers: tuple[Answer, ...]

    @property
    def complete(self) -> bool:
        return {answer.kind for answer in self.answers} == {"grow", "scratch"}

    def best(self, kind: str) -> float:
        """The lowest difference of a kind; the default way of growing stands for all, where it was run."""
        if kind == "stay":
            return 0.0
        found = [answer for answer in self.answers if answer.kind == kind]
        default = [answer for answer in found if answer.way == DEFAULT_WAY]
        return min(answer.difference for answer in default or found)


def parameters(like: str, width: int, layers: int) -> int:
    """Of the models of the study.

    >>> parameters("mlp", 32, 4), parameters("llama", 32, 2)
    (4103, 59552)
    """
    if like == "mlp":
        return 55 * width + (layers - 2) * (width + 1) * width + (width + 1) * 7
    return 1024 * width + layers * (13 * width + 2) * width + width


@dataclass(frozen=True)
class _Point:
    """A run at its best rate and noise."""

    key: Mapping[str, Any]
    loss: float
    flops: float
    """Of a sample."""


def cases(results: Path) -> list[Case]:
    """Every base and budget that staying was run with, and something else."""
    return [case for like, kind in KINDS.items() for case in _cases(like, _points(results, kind))]


def on_the_way(results: Path) -> list[Case]:
    """New models of twice the width for what was left of a run at some moment, beside that run; in no fit."""
    found = []
    for like, kind in KINDS.items():
        throughout = [
            point for point in _points(results, kind) if _plain(point) and point.key["layers"] == kind.layers
        ]
        for run, new in product(throughout, repeat=2):
            total, left, width = run.key["budget"], new.key["budget"], run.key["width"]
            if new.key["width"] == TIMES * width and left < total:
                base, wide = (parameters(like, each, kind.layers) for each in (width, TIMES * width))
                share, per = 1 - left / total, samples(base, left) / base
                answer = Answer("scratch", _difference(like, new, run), per, share, wide / base, 1.0)
                found.append(Case(like, base, total - left, left, wide, total, (answer,)))
    return found


def fitted(known: Sequence[Case], seen: Sequence[Case] | None = None, errors: Errors | None = None) -> Law:
    """The law of some cases; ranges are those of all that were `seen`."""
    seen = known if seen is None else seen
    slopes: list[float] = []
    offsets: dict[tuple[str, str], float] = {}
    for kind in ("grow", "scratch"):
        rows = [(case.like, answer) for case in known for answer in case.answers if answer.kind == kind]
        columns = sorted({(like, answer.way) for like, answer in rows})
        table = [
            [
                *(float((like, a.way) == each) for each in columns),
                log(a.samples),
                *[a.share] * (kind == "scratch"),
            ]
            for like, a in rows
        ]
        found = np.linalg.lstsq(np.array(table), np.array([a.difference for _, a in rows]), rcond=None)[0]
        offsets |= dict(zip(columns, map(float, found), strict=False))
        slopes += map(float, found[len(columns) :])
    ways = {column: _way(column, offset, seen, errors or {}) for column, offset in offsets.items()}
    kinds = {
        name: Measured(
            kind.about,
            kind.unit,
            range_of(case.base for case in seen if case.like == name),
            tuple(way for (like, _), way in ways.items() if like == name),
        )
        for name, kind in KINDS.items()
        if any(like == name for like, _ in ways)
    }
    grow, scratch, share = slopes
    return Law(grow, scratch, share, kinds)


def off(law: Law, case: Case) -> Iterator[tuple[str, float]]:
    """By how much a law is wrong about each way of a case that it knows."""
    known = {way.name: way for way in law.kinds[case.like].ways} if case.like in law.kinds else {}
    for answer in case.answers:
        if answer.way in known:
            said = law.difference(known[answer.way], answer.samples, answer.share)
            yield answer.way, said - answer.difference


def _way(column: tuple[str, str], offset: float, seen: Sequence[Case], errors: Errors) -> Way:
    like, name = column
    rows = [(c, a) for c in seen if c.like == like for a in c.answers if a.way == name]
    spans = [
        Span(range_of(a.samples for a in some), range_of(a.share for a in some)) if some else None
        for some in ([a for c, a in rows if c.spent], [a for c, a in rows if not c.spent])
    ]
    first = rows[0][1]
    return Way(
        name,
        first.kind,
        offset,
        errors.get(column),
        len(rows),
        range_of(a.times for _, a in rows),
        range_of(a.peak for _, a in rows),
        first.width,
        *spans,
    )


def _cases(like: str, points: Sequence[_Point]) -> Iterator[Case]:
    throughout = {(p.key["width"], p.key["layers"], p.key["budget"]): p for p in points if _plain(p)}
    grown: dict[tuple[int, int, int, bool], list[_Point]] = {}
    for point in points:
        if "start" in point.key:
            start, at = point.key["start"], point.key.get("at", 1.0)
            if start["layers"] == KINDS[like].layers and at in (1.0, SHARE):
                known = grown.setdefault(
                    (start["width"], start["budget"], point.key["budget"], at == 1.0), []
                )
                known.append(point)
    for (width, spent, budget, finished), mine in sorted(grown.items()):
        layers = KINDS[like].layers
        went_on = [p for p in mine if _shape(p.key) == _shape(p.key["start"])]
        stay = next(iter(went_on), None) if finished else throughout.get((width, layers, budget))
        if stay is None:
            continue
        base, wide = (parameters(like, w, layers) for w in (width, TIMES * width))
        before = float(spent) if finished else 0.0
        answers = [a for p in mine if (a := _grown(like, p, stay, base)) is not None]
        if (new := throughout.get((TIMES * width, layers, budget))) is not None:
            left = samples(base, budget) / base
            peak = new.key["lr"] / mine[0].key["start"]["lr"]
            difference = _difference(like, new, stay)
            answers.append(Answer("scratch", difference, left, before / (before + budget), wide / base, peak))
        if answers:
            yield Case(like, base, before, float(budget), wide, spent, tuple(answers))


def _grown(like: str, point: _Point, stay: _Point, base: int) -> Answer | None:
    """A growth that the product makes: by new units with copied readers, copies, more layers or experts."""
    key, start, at = point.key, point.key["start"], point.key.get("at", 1.0)
    name = {
        ("copied_readers", "empty", TIMES, 1.0, 0): DEFAULT_WAY,
        ("ours", "carried", TIMES, 1.0, 0): "copies",
        ("copied_readers", "carried", 1.0, 2.0, 0): "more layers",
        ("ours", "carried", 1.0, 1.0, 8): "experts",
    }.get(
        (
            key.get("method", "ours"),
            key.get("state", "carried"),
            key["width"] / start["width"],
            key["layers"] / start["layers"],
            key.get("experts", 0),
        )
    )
    if name is None:
        return None
    left, share = (1 - at) * key["budget"], at
    if at == 1:
        left, share = key["budget"], start["budget"] / (start["budget"] + key["budget"])
    width = key["width"] != start["width"]
    wide = parameters(like, key["width"], key["layers"]) / base
    times = wide if width else point.flops / stay.flops
    peak = key["lr"] / start["lr"]
    return Answer(name, _difference(like, point, stay), samples(base, left) / base, share, times, peak, width)


def _difference(like: str, point: _Point, stay: _Point) -> float:
    return log(point.loss / stay.loss) if KINDS[like].unit == "per cent" else point.loss - stay.loss


def _shape(key: Mapping[str, Any]) -> tuple[int, int, int]:
    return key["width"], key["layers"], key.get("experts", 0)


def _plain(point: _Point) -> bool:
    return not point.key.keys() & {"start", "experts"}


def _points(results: Path, kind: Kind) -> list[_Point]:
    """Each run at the rate and noise of the tuning seed; diverged ones are left out."""
    tried: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
    keys: dict[str, Mapping[str, Any]] = {}
    for key, result in _lines(results, kind):
        setting = json.dumps(_without(key, ("seed",), ("seed",)), sort_keys=True)
        point = json.dumps(_without(key, ("seed", "lr", "noise"), ("seed", "lr")), sort_keys=True)
        keys[setting] = key
        tried.setdefault(point, {}).setdefault(setting, {}).setdefault(key["seed"], result)
    return [point for settings in tried.values() for point in _best(settings, keys)]


def _lines(results: Path, kind: Kind) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    for name, layers in kind.files:
        path = results / name
        for line in path.read_text("utf-8").splitlines() if path.is_file() else ():
            told = json.loads(line)
            if (
                "key" not in told
                or told["result"].get("choose") is None
                or told["result"].get("held") is None
            ):
                continue
            key = {"layers": layers, **told["key"]}
            if "start" in key:
                key["start"] = {"layers": layers, **key["start"]}
            if not (key.keys() & LEFT_OUT or key.get("start", {}).keys() & {"experts", *LEFT_OUT}):
                yield key, told["result"]


def _without(key: Mapping[str, Any], names: Iterable[str], of_start: Iterable[str]) -> dict[str, Any]:
    kept = {name: value for name, value in key.items() if name not in names}
    return {**kept, "start": _without(key["start"], of_start, of_start)} if "start" in key else kept


def _best(
    settings: Mapping[str, Mapping[int, Mapping[str, Any]]], keys: Mapping[str, Mapping[str, Any]]
) -> Iterator[_Point]:
    tuned = {setting: seeds for setting, seeds in settings.items() if TUNING_SEED in seeds}
    if tuned:
        chosen = min(tuned, key=lambda setting: float(tuned[setting][TUNING_SEED]["choose"]))
        seeds = tuned[chosen]
        others = [result for seed, result in seeds.items() if seed != TUNING_SEED] or list(seeds.values())
        first = seeds[TUNING_SEED]
        loss = fmean(float(result["held"]) for result in others)
        yield _Point(keys[chosen], loss, float(first["flops"]) / float(first.get("samples", 1)))
