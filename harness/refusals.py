"""Asserting that a call is refused, and that its message says why and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import mupscale as mu


def refusal(action: Callable[[], Any], *words: str) -> mu.MupscaleError:
    """The error that `action` raises; it must contain every word, those of the remedy among them."""
    with pytest.raises(mu.MupscaleError) as caught:
        action()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    return caught.value
