"""The steps in which a stock model grows: experts, words and positions, blocks, then width.

Imports config, types and copy. A further direction is one more file with a `Step`, and one row in `STEPS`. The table imports
nothing, because what `--to` says is read without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Asked(NamedTuple):
    """What `--to` may ask of a step."""

    file: str
    """The file of this folder whose `step_of` makes the step."""
    keys: Mapping[str, str]
    """Key -> a regular expression of its value."""
    help: str
    """What it does, with an example."""


_NUMBER = r"[1-9]\d{0,6}"
STEPS = (
    Asked(
        "experts",
        {"experts": _NUMBER, "top_k": _NUMBER, "expert_ffn": _NUMBER, "into": r"[a-z]\w{0,60}"},
        "experts next to the dense layers: experts=8,top_k=2,expert_ffn=64",
    ),
    Asked(
        "words",
        {"vocab": rf"\+?{_NUMBER}", "positions": r"[1-9]\d{0,8}"},
        "more words and positions: vocab=+64,positions=4096",
    ),
    Asked(
        "depth",
        {"layers": r"[1-9]\d{0,4}", "after": r"\d{1,5}(:\d{1,5})*"},
        "how deep: layers=8, or layers=8,after=1:3:5:7 for new blocks behind these blocks of the base",
    ),
)
"""All steps before the width, in the order in which a model takes them. `To` keeps the values of keys that have no field of their
own in `further`."""
