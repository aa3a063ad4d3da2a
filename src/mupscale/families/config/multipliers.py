"""What `-k` and `--to` say: by how much each width grows, to which size, how deep, and how many words and positions there are.

Knows no configuration; needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ...errors import Fault, MupscaleError, raise_faults
from ..steps import STEPS
from .fields import EXPERTS, WIDTHS

Multipliers = Mapping[str, int]
EVERY = "every"
TOWERS = ("text", "vision")
"""Parts of a model that can grow alone; a configuration holds them as text_config and vision_config."""
SIZED = (*WIDTHS, "head_dim")
"""Sizes that `--to` can name. The size of a head is one of them, so that the refusal can say why it stays."""
_NAMED = (*WIDTHS, EXPERTS, *TOWERS)
"""What `-k` can name."""
_EXAMPLES = ", or ".join(
    f"--to {example}"
    for example in ("hidden=96,heads=6,kv_heads=3,ffn=264", *(step.example for step in reversed(STEPS)))
)


def parse_multipliers(text: str | int | Multipliers) -> dict[str, int]:
    """What `-k` says: one number for every width, or a number per width or per tower; what is not named stays.

    Experts are multiplied only where they are named, and the number of experts that each token goes to with them.

    >>> parse_multipliers("2"), parse_multipliers("hidden=2,heads=2,ffn=4")
    ({'every': 2}, {'hidden': 2, 'heads': 2, 'ffn': 4})
    >>> parse_multipliers("2,kv_heads=1")
    {'every': 2, 'kv_heads': 1}
    >>> parse_multipliers("text=2"), parse_multipliers("experts=2")
    ({'text': 2}, {'experts': 2})
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
        if width not in (EVERY, *_NAMED):
            what = f"no such width or tower, expected one of {', '.join(_NAMED)}"
            faults.append(
                Fault(
                    "goal.unknown_width",
                    width or "(nothing)",
                    what,
                    "write -k 2, or -k hidden=2,heads=2,ffn=4",
                )
            )
        elif width in found:
            faults.append(
                Fault(
                    "goal.width_given_twice",
                    _as_written(width),
                    "given twice, expected once",
                    "keep one of the two",
                )
            )
        elif not re.fullmatch(r"[1-9]\d{0,3}", k):
            what = f"{k!r}, expected a whole number from 1 to 9999: copies come whole"
            faults.append(Fault("goal.not_a_multiplier", _as_written(width), what, "write 2, 3, …"))
        else:
            found[width] = int(k)
    for tower in [name for name in TOWERS if name in found] if found.keys() & {*WIDTHS, EXPERTS} else ():
        what = "a tower grows in all its widths, and widths are named next to it"
        faults.append(
            Fault("goal.tower_beside_widths", tower, what, f"write -k {tower}=2, or name widths alone")
        )
    raise_faults("the multipliers cannot be read", faults)
    return found


def _as_written(width: str) -> str:
    """A width as the user wrote it; that a lone number turns every width is a word of ours."""
    return "-k" if width == EVERY else width


class Experts(NamedTuple):
    """What `--to` says about experts: how many, how many of them a token goes to, their width, and in which class."""

    number: int
    top_k: int
    ffn: int
    into: str | None = None
    """A model type; None for the first that holds the base."""


class To(NamedTuple):
    """What `--to` says: how many layers, behind which blocks of the base the new ones go, and the sizes of widths."""

    layers: int
    """0 for as many as the base has."""
    after: tuple[int, ...] | None = None
    """None for stack order: all blocks, then all blocks again."""
    sizes: tuple[tuple[str, int], ...] = ()
    """By width, in alphabetical order."""
    vocab: str = ""
    """"+64" for so many more words, "576" for so many in all, "" for the base's."""
    positions: int = 0
    """0 for as many as the base has."""
    experts: Experts | None = None
    """The experts of a model that has none."""
    further: tuple[tuple[str, str], ...] = ()
    """What is asked of other steps, by key, in alphabetical order."""


_EXPERTS = ("experts", "top_k", "expert_ffn")
_OWN = {*_EXPERTS, "into", "layers", "after", "vocab", "positions"}
"""Keys of steps whose values are fields of `To`."""
NOTHING = To(0)
"""No layers and no sizes."""


def _experts(found: Mapping[str, str]) -> Experts:
    number, top_k, ffn = (int(found[key]) for key in _EXPERTS)
    return Experts(number, top_k, ffn, found.get("into"))


def parse_to(text: str) -> To:
    """What `--to` says.

    >>> parse_to("layers=3,after=0")
    To(layers=3, after=(0,), sizes=(), vocab='', positions=0, experts=None, further=())
    >>> parse_to("hidden=96,ffn=264").sizes, parse_to("vocab=+64").vocab
    ((('ffn', 264), ('hidden', 96)), '+64')
    >>> parse_to("experts=8,top_k=2,expert_ffn=64").experts
    Experts(number=8, top_k=2, ffn=64, into=None)
    >>> parse_to("experts=8").further  # more experts for a mixture
    (('experts', '8'),)
    """
    pairs = [part.strip().partition("=") for part in text.split(",")]
    found = {key: value for key, _, value in pairs}
    asked = {name: key.form for step in STEPS for name, key in step.keys.items()}
    known = dict.fromkeys(SIZED, r"[1-9]\d{0,6}") | asked
    wrong = [key for key, value in found.items() if not re.fullmatch(known.get(key, "(?!)"), value)]
    said = sum(key in found for key in _EXPERTS)
    more = ("experts",) if said == 1 and "experts" in found and "into" not in found else ()
    said = 0 if more else said
    alone = ("after" in found and "layers" not in found) or said in (1, 2) or ("into" in found and not said)
    if wrong or alone or len(found) != len(pairs):
        raise MupscaleError(f"--to {text}: expected {_EXAMPLES}", code="goal.to_not_readable")
    after = found.get("after")
    return To(
        int(found.get("layers", 0)),
        None if after is None else tuple(map(int, after.split(":"))),
        tuple((width, int(found[width])) for width in sorted(SIZED) if width in found),
        found.get("vocab", ""),
        int(found.get("positions", 0)),
        _experts(found) if said else None,
        tuple((key, found[key]) for key in sorted({*more, *(asked.keys() - _OWN)}) if key in found),
    )


def counted(text: str, now: int) -> int:
    """The number that "+64" or "576" means where there are `now`.

    >>> counted("+64", 512), counted("576", 512)
    (576, 576)
    """
    return now + int(text) if text.startswith("+") else int(text)
