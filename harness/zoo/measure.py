"""One model of the zoo through every path: what is exact, what is refused, what is silently different.

A base is trained for a few steps and grown by each path with zero noise; then it continues next to every wide run on
the same batches. A path whose losses differ by more than the bound, without a refusal, is silent.
"""

from __future__ import annotations

import math
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch._dynamo

import mupscale as mu
from harness import limited as process
from harness.zoo import ZOO
from harness.zoo.entry import Entry, Exact
from harness.zoo.paths import certified, follow, known, plain, unproved, with_inputs, with_loss

WARM, STEPS, PROOF_STEPS = 3, 6, 6
BOUNDS = {torch.float64: 1e-7, torch.float32: 1e-4}
"""The largest relative difference of losses that counts as the same training.

Rounding stays below 1e-8 in float64 (T5 computes parts in float32) and below 1e-6 in float32.
"""
SECONDS = 60
"""CPU time for one path: the slowest search that finds a plan takes a third of it."""
MODEL_SECONDS, MODEL_BYTES = 15 * SECONDS, 8 << 30
"""What all paths of a model may take together."""


class TooSlowError(Exception):
    """A path has used up its CPU time."""


@dataclass
class Outcome:
    """What one path did: exact, refused, silent, crashed or slow."""

    kind: str
    gap: float | None = None
    said: str = ""
    seconds: float = 0.0


@dataclass
class Line:
    """All paths of one model, as they are stored."""

    name: str
    mode: str
    dtype: str
    paths: dict[str, Outcome] = field(default_factory=dict)
    holds: bool | None = None
    """What verify says about the plan of an exact path; None when no path is exact."""
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """The class of the model; silent and wrong weigh most, exact by any path more than a refusal by another."""
        kinds = [outcome.kind for outcome in self.paths.values()]
        return next(
            (k for k in ("silent", "exact", "dropout", "refused", "slow", "crashed") if k in kinds), ""
        )

    @property
    def remedy_wrong(self) -> bool:
        return any(o.kind == "wrong" for o in self.paths.values())

    @property
    def false_alarm(self) -> bool:
        return self.holds is False

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "kind": self.kind}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Line:
        kept = {key: value for key, value in values.items() if key not in ("kind", "key", "paths")}
        return cls(**kept, paths={name: Outcome(**path) for name, path in values["paths"].items()})


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise when the block has used more CPU time than this."""

    def stop(*_: object) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@dataclass
class Attempt:
    """A path that was tried: its wide run or its refusal, and the warnings on the way."""

    outcome: Outcome
    run: mu.Run | None = None
    refusal: mu.MupscaleError | None = None
    warned: str = ""


def attempted(grow: Callable[[], mu.Run | None]) -> Attempt:
    """Grow, and sort what happens."""
    begun = time.process_time()
    tried = Attempt(Outcome("refused"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with limited(SECONDS):
                tried.run = grow()
            tried.outcome.kind = "grown"
        except mu.MupscaleError as error:
            tried.refusal, tried.outcome.said = error, " ".join(str(error).split())[:200]
        except TooSlowError:
            tried.outcome.kind = "slow"
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            tried.outcome.kind = "crashed"
            tried.outcome.said = f"{type(error).__name__}: {error}"[:200] + f" ({last.name})"
    tried.outcome.seconds = round(time.process_time() - begun, 2)
    tried.warned = " ".join(str(w.message) for w in caught)
    return tried


def losses(entry: Entry, run: mu.Run) -> list[float]:
    """The losses of the steps after growth, with the same random numbers for every run."""
    found = []
    for i in range(WARM, WARM + STEPS):
        torch.manual_seed(i)
        found.append(float(entry.step(run, i)))
    return found


def gap(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference; infinite when a loss is not finite."""
    gaps = [abs(a - b) / max(abs(b), 1e-6) for a, b in zip(found, wanted, strict=True)]
    return max(g if math.isfinite(g) else math.inf for g in gaps)


def warmed(entry: Entry) -> mu.Run:
    run = entry.start()
    for i in range(WARM):
        torch.manual_seed(i)
        entry.step(run, i)
    return run


def tells_of_dropout(attempt: Attempt) -> bool:
    needs = attempt.run.plan.needs if attempt.run is not None and attempt.run.plan is not None else ()
    return "dropout" in f"{attempt.warned} {' '.join(needs)}".lower()


def judge(entry: Entry, run: mu.Run, tried: dict[str, Attempt], bound: float) -> None:
    """Train every wide run next to the base, and sort what grew into exact and silent."""
    wanted = losses(entry, run)
    for path, attempt in tried.items():
        if attempt.run is None:
            continue
        outcome = attempt.outcome
        try:
            outcome.gap = gap(losses(entry, attempt.run), wanted)
        except RuntimeError as error:  # shapes or dtypes of the grown run do not fit its own model
            outcome.kind, outcome.said = "crashed", f"in training: {error}"[:300]
            continue
        if outcome.gap <= bound:
            outcome.kind = "exact"
        elif entry.dropout and tells_of_dropout(attempt):
            outcome.kind = "dropout"
        else:
            outcome.kind = "wrong" if path.startswith("remedy") else "silent"


def measure(entry: Entry, mode: str, dtype: torch.dtype) -> Line:
    """Every path of one model: "paths" for what a user does, "control" with proofs off, "prove" for the stored plan."""
    begun = time.process_time()
    line = Line(entry.name, mode, str(dtype).removeprefix("torch."))
    run = warmed(entry)
    tried: dict[str, Attempt] = {}
    if mode == "control":
        tried["unproved"] = attempted(lambda: unproved(entry, run))
    elif mode == "prove":
        judgement = entry.judgement
        if isinstance(judgement, Exact):
            tried["known"] = attempted(lambda: known(entry, run, judgement))
    else:
        tried["plain"] = attempted(lambda: plain(entry, run))
        tried["loss"] = attempted(lambda: with_loss(entry, run))
        if entry.examples is not None:
            tried["inputs"] = attempted(lambda: with_inputs(entry, run))
        for path in list(tried):
            refusal = tried[path].refusal
            if refusal is not None:
                remedy = attempted(lambda: follow(entry, run, refusal, loss=path == "loss"))  # noqa: B023
                if remedy.run is not None or remedy.outcome.kind != "grown":
                    tried[f"remedy of {path}"] = remedy
    judge(entry, run, tried, BOUNDS[dtype])
    exact = [a.run for a in tried.values() if a.outcome.kind == "exact" and a.run is not None]
    if exact and mode != "control":
        plan = exact[0].plan
        assert plan is not None
        verdict: list[bool] = []
        checked = attempted(lambda: verdict.append(certified(entry, run, plan, PROOF_STEPS)))
        if checked.outcome.kind == "grown":
            line.holds = verdict[0]
        else:
            tried["verify"] = checked
            line.holds = None if checked.outcome.kind == "slow" else False
    line.paths = {path: attempt.outcome for path, attempt in tried.items()}
    line.seconds = round(time.process_time() - begun, 2)
    return line


def measured(name: str, mode: str, dtype: torch.dtype) -> Line:
    """The line of one model, measured in a process of its own: it can take no memory and no time from the next."""
    if ZOO[name].needs:
        import_module(ZOO[name].needs)  # before the fork, so that it is read once

    def action() -> dict[str, Any]:
        torch.set_num_threads(1)
        torch.set_default_dtype(dtype)
        return measure(ZOO[name], mode, dtype).as_json()

    found = process.limited(action, MODEL_SECONDS, MODEL_BYTES)
    if found.done:
        return Line.from_json(found.value)
    crashed = Outcome("crashed", said=str(found.value))
    return Line(name, mode, str(dtype).removeprefix("torch."), {"base": crashed})
