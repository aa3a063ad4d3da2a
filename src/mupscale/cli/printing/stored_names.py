"""Lines that say how the names in a directory are read, where they are not those of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...families.record import FamilyPlan
from ...files.directory import Directory
from ...files.strict import printable
from ...models.names import pattern_of

_SHOWN = 4  # names in one line; a reason often holds for every layer


def stored_names(directory: Directory, family: FamilyPlan) -> Iterator[str]:
    """A line for the renamed tensors, one for each reason to leave tensors out, and one for those that are not there."""
    if not directory.weights:
        yield "note: no weights are here, so this plan is made from config.json alone; to grow the model they are needed"
        return
    reading = family.reading
    if reading.names:
        yield f"renamed: {_some(f'{old} is read as {new}' for old, new in reading.names.items())}"
    reasons: dict[str, list[str]] = {}
    for name, why in reading.left_out.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        yield f"left out: {_some(names)} because {why}"
    if reading.absent:
        why = "the base does not store it, and from_pretrained makes it anew in the base as in the result"
        yield f"not there: {_some(reading.absent)}: {why}"


def _some(names: Iterable[str]) -> str:
    """The first few, equal layers as one.

    >>> _some(["h.0.a", "h.1.a", "b"])
    'h.*.a, b'
    """
    found = list(dict.fromkeys(printable(pattern_of(name)) for name in names))
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
