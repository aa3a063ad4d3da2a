"""What `-k` says: by how much each width grows. Knows the names of widths and no configuration; needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import Fault, raise_faults
from .widths import USUAL

Multipliers = Mapping[str, int]
EVERY = "every"
WIDTHS = tuple(USUAL)


def parse_multipliers(text: str | int | Multipliers) -> dict[str, int]:
    """What `-k` says: one number for every width, or a number per width; a width that is not named stays.

    >>> parse_multipliers("2"), parse_multipliers("hidden=2,heads=2,ffn=4")
    ({'every': 2}, {'hidden': 2, 'heads': 2, 'ffn': 4})
    >>> parse_multipliers("2,kv_heads=1")
    {'every': 2, 'kv_heads': 1}
    """
    if isinstance(text, Mapping):
        pairs = [(str(width), str(k)) for width, k in text.items()]
    else:
        parts = [part.strip() for part in str(text).split(",")]
        pairs = [
            (width.strip(), k.strip()) if eq else (EVERY, width)
            for width, eq, k in (p.partition("=") for p in parts)
        ]
    found: dict[str, int] = {}
    faults = []
    for width, k in pairs:
        if width not in (EVERY, *WIDTHS):
            what = f"no such width, expected one of {', '.join(WIDTHS)}"
            faults.append(Fault(width or "(nothing)", what, "write -k 2, or -k hidden=2,heads=2,ffn=4"))
        elif width in found:
            faults.append(Fault(_said(width), "given twice, expected once", "keep one of the two"))
        elif not re.fullmatch(r"[1-9]\d{0,3}", k):
            what = f"{k!r}, expected a whole number from 1 to 9999: copies come whole"
            faults.append(Fault(_said(width), what, "write 2, 3, …"))
        else:
            found[width] = int(k)
    raise_faults("the multipliers cannot be read", faults)
    return found


def _said(width: str) -> str:
    """A width as the user wrote it; that a lone number turns every width is a word of ours."""
    return "-k" if width == EVERY else width


def multiplier(multipliers: Multipliers, width: str) -> int:
    return multipliers.get(width, multipliers.get(EVERY, 1))
