"""Heads of attention at both ends of a plan: their number may grow, their size and the queries that share a key may not."""

from __future__ import annotations

from ..errors import Fault


def other_heads(where: str, base: tuple[int, int], wide: tuple[int, int], remedy: str) -> list[Fault]:
    """A fault if heads have another size at the wide end, or come in other groups."""
    if base == wide:
        return []
    what = f"heads of size {base[0]} in groups of {base[1]} at the base, {wide[0]} in groups of {wide[1]} in the wide config"
    return [Fault("layout.heads_differ", where, what, remedy)]
