"""What a comparison found: differences, what cannot be told, and notes; as text, as JSON and as an exit status."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..errors import Fault

_SHOWN = 20
"""Findings of one kind that are printed; JSON has all of them."""


@dataclass
class Found:
    """What a comparison has found so far."""

    compared: dict[str, int] = field(default_factory=dict)
    differences: list[Fault] = field(default_factory=list)
    unknown: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)

    def count(self, what: str, many: int = 1) -> None:
        self.compared[what] = self.compared.get(what, 0) + many


@dataclass(frozen=True)
class Same:
    """Whether two checkpoints continue the same run; true only if they do.

    The remedy of a finding says what the difference does to training.
    """

    a: str
    b: str
    kinds: tuple[str, str]
    """Their formats."""
    profile: str
    compared: dict[str, int]
    """How many of what were compared, such as `weights` and `moments`."""
    differences: tuple[Fault, ...] = ()
    unknown: tuple[Fault, ...] = ()
    """What could not be compared."""
    notes: tuple[str, ...] = ()
    """What differs or was assumed without an effect on training."""
    measured: dict[str, float] = field(default_factory=dict)
    """With a batch: the losses of both, and how far gradients and one step are apart, relative to their size."""

    def __bool__(self) -> bool:
        return not self.differences and not self.unknown

    @property
    def verdict(self) -> str:
        return "different" if self.differences else "cannot tell" if self.unknown else "same"

    @property
    def status(self) -> int:
        """The exit status: 0 the same, 1 different, 2 cannot tell."""
        return {"same": 0, "different": 1, "cannot tell": 2}[self.verdict]

    def json(self) -> dict[str, Any]:
        """Plain data, for `json.dumps`."""

        def plain(faults: tuple[Fault, ...]) -> list[dict[str, str]]:
            return [{"code": f.code, "where": f.where, "what": f.what, "effect": f.remedy} for f in faults]

        return {
            "verdict": self.verdict,
            "a": self.a,
            "b": self.b,
            "kinds": list(self.kinds),
            "profile": self.profile,
            "compared": self.compared,
            "differences": plain(self.differences),
            "unknown": plain(self.unknown),
            "notes": list(self.notes),
            "measured": self.measured,
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"A: {self.a}, {self.kinds[0]}"
        yield f"B: {self.b}, {self.kinds[1]}"
        counts = ", ".join(f"{count} {what}" for what, count in self.compared.items())
        yield f"compared by the profile {self.profile}: {counts or 'nothing'}"
        for head, faults in (("different", self.differences), ("cannot tell", self.unknown)):
            for fault in faults[:_SHOWN]:
                yield f"{head}: {fault.where} [{fault.code}]"
                yield f"  {fault.what}"
                if fault.remedy:
                    yield f"  {fault.remedy}"
            if len(faults) > _SHOWN:
                yield f"{head}: {len(faults) - _SHOWN} more"
        if self.measured:
            yield "measured: " + ", ".join(f"{what} {value:.6g}" for what, value in self.measured.items())
        yield from (f"note: {note}" for note in self.notes)
        yield f"verdict: {self.verdict}"
