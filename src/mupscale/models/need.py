"""What a plan assumes and cannot check: a sentence for people, and a kind by which programs decide."""

from __future__ import annotations

from typing import Literal

NeedKind = Literal["dropout", "unreached", "train mode", "eval mode", "assumption"]
"""Dropout that a proof switched off, growing tensors that no gradient reached, the only mode in which the plan is known to be
exact, and everything else that is assumed."""
NO_DROPOUT = "no dropout"
REACHED = "a loss that reaches every tensor"
TRAIN_ALONE, EVAL_ALONE = "train mode alone", "eval mode alone"
_BEGINNINGS: dict[str, NeedKind] = {
    NO_DROPOUT: "dropout", REACHED: "unreached", TRAIN_ALONE: "train mode", EVAL_ALONE: "eval mode"
}  # fmt: skip


class Need(str):
    """One assumption of a plan. A stored plan has the sentence alone, whose beginning tells the kind.

    >>> Need("no dropout (drop): …").kind, Need("every activation maps 0 to 0").kind, Need("…", "unreached").kind
    ('dropout', 'assumption', 'unreached')
    """

    kind: NeedKind

    def __new__(cls, text: str, kind: NeedKind | None = None) -> Need:
        made = super().__new__(cls, text)
        made.kind = kind or (text.kind if isinstance(text, Need) else _kind(text))
        return made


def _kind(text: str) -> NeedKind:
    return next((kind for start, kind in _BEGINNINGS.items() if text.startswith(start)), "assumption")
