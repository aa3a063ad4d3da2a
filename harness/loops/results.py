"""What the situations must show together, and how they are summed up in the last line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from harness.loops.measure import WORDS, Found

SITUATIONS = 60
CONTROL = 25
"""The least number of situations that are silent when nothing is carried and nothing is checked."""


def summary(found: Iterable[Found], control: Iterable[Found]) -> dict[str, int]:
    """The numbers of the last line."""
    lines = list(found)
    verdicts = Counter(line.verdict for line in lines)
    silent = sum(line.kind == "silent" for line in control)
    return {"situations": len(lines), **{word: verdicts[word] for word in WORDS}, "control": silent}


def failures(numbers: Mapping[str, int], found: Iterable[Found], whole: bool) -> Iterator[str]:
    """Every bound that does not hold, in words; how many situations there are is judged where all were run."""
    for word in WORDS:
        if numbers[word]:
            yield f"{word}={numbers[word]}, expected 0"
    for line in found:
        if line.verdict == "other":
            yield f"{line.name} is {line.kind}, which is not what it is judged to be: {line.said}"
    if whole and numbers["situations"] < SITUATIONS:
        yield f"{numbers['situations']} situations, expected at least {SITUATIONS}"
    if whole and numbers["control"] < CONTROL:
        yield f"{numbers['control']} situations are silent in the control, expected at least {CONTROL}"
