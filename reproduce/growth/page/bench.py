"""Every registered way of growing beside each other: on text, from a finished base, with as many FLOPs again."""

from __future__ import annotations

from math import log2

from ..book import NOT_RUN, Book, Seen, seen
from ..choose import Arm, Known
from ..methods import METHODS
from ..methods.method import OURS, Method
from ..questions import bench, directions, new_units, sunk
from ..questions.directions import ARMS
from .cells import mean_cell, peak, table
from .directions import OURS as BY_PLAN
from .directions import results
from .stored import Stored

KINDS = ("width", "depth", "experts")
UNITS = {method: name for name, method in new_units.METHODS.items()}


Row = tuple[str, str, str, Known, Seen | None]
"""What grows, the label of a method, its source, where its runs are known, and its end on the reported seeds."""


def listed(stored: Stored) -> list[Row]:
    """Every method, and growth by our plans of blocks and experts; the lowest end first within what grows."""
    text = stored.book("text")
    if text is None or not text.sizes.bases:
        return []
    rows: list[Row] = []
    for method in METHODS.values():
        if method.kind != "mixture":
            rows.append((method.kind, method.label, method.source, *_seen(stored, text, method)))
    for name, one in results(stored.known, stored.dense).items():
        made = ARMS[name]
        if made.of in KINDS[1:] and made.method in BY_PLAN and not made.scratch:
            rows.append((made.of, made.label, OURS, stored.known, one))
    return sorted(rows, key=lambda row: (KINDS.index(row[0]), row[4] is None, row[4].mean if row[4] else 0.0))


def bench_table(stored: Stored) -> str:
    """The same as a table; methods that have not been run say so."""
    rows = []
    for kind, label, source, known, one in listed(stored):
        if one is None:
            rows.append([kind, label, source, "", NOT_RUN, ""])
            continue
        rate = peak(one.chosen) if kind == "width" else f"2<sup>{log2(one.chosen.lr):g}</sup>"
        rows.append([kind, label, source, _rise(known, one), mean_cell(one), rate])
    head = ["grows", "method", "source", "rises by", "ends at", "peak"]
    return table(head, rows) if rows else ""


def _seen(stored: Stored, text: Book, method: Method) -> tuple[Known, Seen | None]:
    """A method on the reported seeds, by the arm that chose its rate first, and where its runs are known."""
    if method.kind != "width":
        named = {made.method: name for name, made in ARMS.items() if made.of in (method.kind, "order")}
        if method.name in named:
            sizes = stored.order if ARMS[named[method.name]].of == "order" else stored.dense
            made = directions.arm(stored.known, sizes, named[method.name])
        else:
            started = directions.base(stored.known, stored.dense)
            made = bench.arm(stored.known, started, method, 1.0, stored.dense.extend)
        return stored.known, seen(stored.known, made, stored.dense.seeds)
    return text.known, seen(text.known, _wider(text, method), text.sizes.seeds)


def _wider(text: Book, method: Method) -> Arm:
    base, sizes = text.sizes.bases[0], text.sizes
    if method.name == "ours":
        return sunk.arm(text.known, sizes, base, f"grown to {new_units.TIMES * base.width}", 1.0)
    if method.name in UNITS:
        return new_units.arm(text.known, sizes, base, UNITS[method.name], 1.0)
    [started] = bench.bases(text.known, sizes, method)
    return bench.arm(text.known, started, method, 1.0, sizes.extend)


def _rise(known: Known, one: Seen) -> str:
    """By how much the held-out loss rises at growth, on the tuning seed."""
    noise = (known(one.chosen) or {}).get("noise", {})
    return f"{noise['after']['choose'] - noise['before']['choose']:+.2f}" if "after" in noise else ""
