"""Cells of the page's tables: a mean with the distance between seeds, a gain, a peak rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log2

from ..book import Seen
from ..spec import Spec


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown.

    >>> print(table(["", "a"], [["b", "1"]]))
    | | a |
    |---|---|
    | b | 1 |
    """
    lines = [f"| {' | '.join(head)} |".replace("|  |", "| |"), "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def mean_cell(seen: Seen | None) -> str:
    if seen is None:
        return ""
    return f"{seen.mean:.4f} ({f'{seen.spread:.4f}' if len(seen.values) > 1 else 'one seed'})"


def gain_cell(found: tuple[float, bool] | None, nats: bool) -> str:
    if found is None:
        return ""
    gain, beyond = found
    level = not beyond and gain > (0 if nats else 1)
    return f"{f'{gain:+.4f} nats' if nats else f'{gain:.3f}'}{', seeds overlap' if level else ''}"


def cell(seen: Seen | None) -> str:
    return "" if seen is None else f"{mean_cell(seen)} {peak(seen.chosen)}"


def peak(spec: Spec) -> str:
    noise = "t by rule" if spec.by_rule else f"t = {spec.noise:g}"
    return f"2<sup>{log2(spec.lr):g}</sup>" + (f", {noise}" if spec.grows and spec.method == "ours" else "")


def by_seed(values: Iterable[float], nats: bool) -> str:
    """What is above what, seed by seed, in nats or as a ratio.

    >>> by_seed([1.02, 0.99], False), by_seed([0.1, -0.2], True)
    ('1.020, 0.990', '+0.1000, -0.2000')
    """
    return ", ".join(f"{value:+.4f}" if nats else f"{value:.3f}" for value in values)
