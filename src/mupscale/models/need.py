"""What a plan assumes and cannot check: a sentence for people, and a kind by which programs decide."""

from __future__ import annotations

from typing import Literal, get_args

NeedKind = Literal["dropout", "unreached", "train mode", "eval mode", "assumption"]
"""Dropout that a proof switched off, growing tensors that no gradient reached, the only mode in which the plan is known to be
exact, and everything else that is assumed."""
NEED_KINDS: tuple[NeedKind, ...] = get_args(NeedKind)
_WITHOUT_KIND: dict[str, NeedKind] = {
    "no dropout": "dropout", "a loss that reaches every tensor": "unreached", "train mode alone": "train mode",
    "eval mode alone": "eval mode",
}  # fmt: skip
"""How sentences began in plans that were stored before kinds were; nothing that is written today is read by it."""


class Need(str):
    """One assumption of a plan.

    >>> Need("any words", "unreached").kind, Need("every activation maps 0 to 0").kind
    ('unreached', 'assumption')
    """

    kind: NeedKind

    def __new__(cls, text: str, kind: NeedKind = "assumption") -> Need:
        made = super().__new__(cls, text)
        made.kind = text.kind if isinstance(text, Need) else kind
        return made

    @classmethod
    def stored_without_kind(cls, text: str) -> Need:
        """One of a plan that has sentences alone.

        >>> Need.stored_without_kind("no dropout (drop): …").kind
        'dropout'
        """
        found = (kind for start, kind in _WITHOUT_KIND.items() if text.startswith(start))
        return cls(text, next(found, "assumption"))
