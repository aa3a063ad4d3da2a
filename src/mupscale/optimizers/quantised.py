"""State in 8 or 4 bits: how it is recognised, and why it is not carried.

A block of neighbouring entries shares one scale. Copies would put other entries in a block, so only the codes of a tensor that
does not change are carried.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def quantised(state: Mapping[str, Any]) -> str | None:
    """Why the state of one parameter cannot be carried exactly, if it is quantised; None otherwise."""
    coded = [key for key, value in state.items() if hasattr(value, "codes")]  # torchao's tensors
    coded += [key.replace("absmax", "state") for key in state if key.startswith("absmax")]  # bitsandbytes
    if not coded:
        return None
    return f"its state {', '.join(sorted(coded))} is quantised in blocks of neighbouring entries, which copies would mix"
