"""What becomes of a situation: exact, warned, refused, silent or crashed, and whether that is what it should be.

Base and wide run are trained side by side, by the loop of the situation, in float64. A wide run whose losses differ
from the base's without a warning is silent. After a refusal the remedy is typed, and must give an exact run.
"""

from __future__ import annotations

import math
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import mupscale as mu
from harness import limited as process
from harness.loops import LOOPS
from harness.loops.control import switched_off
from harness.loops.situation import Exact, Function, Pair, Refused, Situation, Step, Warned

STEPS = 6
"""Steps after growth; counters and schedules of the situations change within them."""
BOUND = 1e-8
"""The largest relative difference of losses that counts as the same training: rounding stays below 1e-12."""
SECONDS, BYTES = 20, 4 << 30
"""What one situation may take; most take less than half a second."""
PACKAGE = str(Path(mu.__file__).parent)
WORDS = ("silent", "remedy_wrong", "false_alarms", "crashed")
"""What must not happen."""


@dataclass
class Found:
    """What one situation did: its kind, and which of `WORDS` it counts as; `other` if it is not as judged and yet honest."""

    name: str
    kind: str
    verdict: str = ""
    gap: float | None = None
    said: str = ""
    seconds: float = 0.0


@dataclass
class Tried:
    """One call of a situation."""

    kind: str
    gap: float | None = None
    said: str = ""
    error: mu.MupscaleError | None = None
    provenance: str = ""


@contextmanager
def heard() -> Iterator[list[str]]:
    """The warnings that the package itself gives; those of torch and of the situation are not its words."""
    said: list[str] = []

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.endswith("warnings.py"):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
            said.append(" ".join(str(message).split()))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield said


def losses(run: mu.Run, step: Step) -> list[float]:
    """The losses of the steps after growth, with the same random numbers for every run."""
    found = []
    for number in range(100, 100 + STEPS):
        torch.manual_seed(number)
        found.append(float(step(run, number)))
    return found


def gap_of(pair: Pair) -> float:
    """The largest relative difference of losses; infinite when one is not finite."""
    wanted = losses(pair.base, pair.step)
    found = losses(pair.wide, pair.wide_step or pair.step)
    gaps = [abs(a - b) / max(abs(b), 1e-6) for a, b in zip(found, wanted, strict=True)]
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)


def tried(function: Function) -> Tried:
    """Call a situation, train both runs, and sort what happens."""
    with heard() as said:
        try:
            outcome = function()
            warned = list(said)
            gap = gap_of(outcome) if isinstance(outcome, Pair) else outcome
        except mu.MupscaleError as error:
            return Tried("refused", said=" ".join(str(error).split()), error=error)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            return Tried("crashed", said=f"{type(error).__name__}: {error} ({last.name})")
    kind = "warned" if warned else "exact" if gap <= BOUND else "silent"
    provenance = str(outcome.wide.provenance) if isinstance(outcome, Pair) else ""
    return Tried(kind, gap, " ".join(warned), provenance=provenance)


def measure(situation: Situation, control: bool = False) -> Found:
    """One situation, judged; with `control`, what it does when nothing is carried and nothing is checked."""
    torch.manual_seed(0)
    with switched_off() if control else nullcontext():
        first = tried(situation.function)
    if control and first.gap is not None:
        first.kind = "silent" if first.gap > BOUND else "exact"
    found = Found(situation.name, first.kind, gap=first.gap, said=first.said)
    if not control:
        found.verdict, more = judged(situation, first)
        found.said += more
    return found


def judged(situation: Situation, first: Tried) -> tuple[str, str]:
    """Which of `WORDS` this is, "other" if it is none of them and not as judged, "" if all is well; and why."""
    judgement = situation.judgement
    if first.kind in ("silent", "crashed"):
        return first.kind, ""
    if isinstance(judgement, Exact):
        if first.kind != "exact":
            return "false_alarms", ""
        missing = [name for name in judgement.names if first.provenance and name not in first.provenance]
        return ("silent", f" not named: {missing}") if missing else ("", "")
    if isinstance(judgement, Warned) or first.kind != "refused":
        wanted = "warned" if isinstance(judgement, Warned) else "refused"
        if first.kind == "warned" and first.gap is not None and first.gap <= BOUND:
            return "false_alarms", " training does not change"
        return ("", "") if first.kind == wanted else ("other", f" expected {wanted}")
    assert first.error is not None
    return _remedied(situation, judgement, first.error)


def _remedied(situation: Situation, judgement: Refused, error: mu.MupscaleError) -> tuple[str, str]:
    if judgement.code not in error.codes:
        return "other", f" expected the code {judgement.code}, found {error.codes}"
    if judgement.shows not in str(error):
        return "remedy_wrong", f" the message does not show {judgement.shows}"
    if situation.typed is None:
        return "remedy_wrong", " there is no remedy"
    second = tried(situation.typed)
    return (
        ("", "")
        if second.kind == "exact"
        else ("remedy_wrong", f" typed: {second.kind} {second.gap} {second.said}")
    )


def prepare() -> None:
    """Grow something, so that what a growth imports is read once and not in every process."""
    torch.set_default_dtype(torch.float64)
    tried(LOOPS["grown_trained_and_narrowed"].function)


def measured(name: str, control: bool = False) -> Found:
    """One situation in a process of its own: what it patches in torch or registers is gone with it."""

    def action() -> dict[str, Any]:
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        return asdict(measure(LOOPS[name], control))

    found = process.limited(process.silent(action), SECONDS, BYTES)
    if not found.done:
        return Found(
            name, "crashed", "" if control else "crashed", said=str(found.value), seconds=found.seconds
        )
    return Found(**{**found.value, "seconds": round(found.seconds, 2)})
