"""The steps in which a stock model grows: experts, more experts, words and positions, blocks, then width.

Imports config, types and copy. A further direction is one more file with a `Step`, and one row in `STEPS`. The table imports
nothing, because what `--to` says is read without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Key(NamedTuple):
    """One thing that a goal may name: the option `--top-k 2` and the key `top_k=2` of `--to` are two spellings of it."""

    form: str
    """A regular expression of its value."""
    help: str
    metavar: str = "N"


class Asked(NamedTuple):
    """What may be asked of a step."""

    file: str
    """The file of this folder whose `step_of` makes the step."""
    keys: Mapping[str, Key]
    example: str
    """As `--to` has it."""


_NUMBER = r"[1-9]\d{0,6}"
STEPS = (
    Asked(
        "experts",
        {
            "experts": Key(_NUMBER, "experts for a dense model, or more of them for a mixture"),
            "top_k": Key(_NUMBER, "experts of a token"),
            "expert_ffn": Key(_NUMBER, "size of an expert"),
            "into": Key(r"[a-z]\w{0,60}", "model_type of a dense model with experts", "TYPE"),
        },
        "experts=8,top_k=2,expert_ffn=64",
    ),
    Asked("more_experts", {}, "experts=8"),  # without the other keys of experts
    Asked(
        "words",
        {
            "vocab": Key(rf"\+?{_NUMBER}", "words, or +64 for so many more"),
            "positions": Key(r"[1-9]\d{0,8}", "positions of a learned table"),
        },
        "vocab=+64,positions=4096",
    ),
    Asked(
        "depth",
        {
            "layers": Key(r"[1-9]\d{0,4}", "layers in all"),
            "after": Key(
                r"\d{1,5}(:\d{1,5})*",
                "new blocks go behind these (default: all blocks, then all again)",
                "I:J:…",
            ),
        },
        "layers=8,after=1:3:5:7",
    ),
)
"""All steps before the width, in the order in which a model takes them. `To` keeps the values of keys that have no field of their
own in `further`."""
