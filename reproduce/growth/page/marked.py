"""docs/frontier.md: hand-written Markdown with marked tables, which are what is stored, and a check of its figures.

A table stands between `<!-- table NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from . import new_units, repairs, tables
from .bench import bench_table
from .directions import directions_table, mixture_table, order_table, orders_table
from .figures import DEFAULT, figures
from .quoted import unlike
from .sizes import family_table, large_table
from .stored import Stored, stored

DOCS = Path(__file__).parents[3] / "docs"
MARKED = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end of table -->)", re.S)


def _of(name: str, make: Callable[..., str]) -> Callable[[Stored], str]:
    """A table of one study; "" where it is not stored."""

    def made(stored: Stored) -> str:
        book = stored.book(name)
        return "" if book is None else make(book)

    return made


def _base(name: str, number: int) -> Callable[[Stored], str]:
    def made(stored: Stored) -> str:
        book = stored.book(name)
        known = book is not None and number < len(book.sizes.bases)
        return tables.base_table(book, book.sizes.bases[number]) if book is not None and known else ""

    return made


def _text_widths(stored: Stored) -> str:
    book = stored.book("text")
    told = book is not None and book.sizes.cited_mid_run
    return repairs.text_widths_table(book, stored.known) if book is not None and told else ""


TABLES: Mapping[str, Callable[[Stored], str]] = {
    "bench": bench_table,
    "default": lambda stored: repairs.default_table(stored.books, DEFAULT),
    "base_32": _base("mlp", 0),
    "base_32_longer": _base("mlp", 1),
    "base_64": _base("mlp", 2),
    "base_text": _base("text", 0),
    "ranks": lambda stored: new_units.ranks_table(stored.books),
    "large": _of("large", large_table),
    "right_width": _of(
        "mlp",
        lambda book: repairs.widths_table(book, repairs.ways_to_the_right_width(book, from_narrow=True)),
    ),
    "right_width_first": _of(
        "mlp",
        lambda book: repairs.widths_table(book, repairs.ways_to_the_right_width(book, from_narrow=False)),
    ),
    "right_width_text": _text_widths,
    "to_256": _of("mlp", tables.mid_run_table),
    "copies_text": _of("text", tables.mid_run_table),
    "family": _of("mlp", family_table),
    "after": _of("mlp", repairs.after_table),
    "after_text": _of("text", repairs.after_table),
    "state": _of("mlp", tables.state_table),
    "state_text": _of("text", lambda book: repairs.states_table(book, tables.state_name)),
    "kept": lambda stored: new_units.kept_table(stored.books),
    "directions": lambda stored: directions_table(stored.known, stored.dense),
    "order": lambda stored: order_table(stored.known, (stored.dense, stored.larger)),
    "orders": lambda stored: orders_table(stored.known, stored.order),
    "mixture": lambda stored: mixture_table(stored.known, stored.mixture),
    "noise": _of("mlp", tables.noise_table),
    "recipe": lambda stored: tables.recipe_table(stored.books),
    "untuned": lambda stored: tables.untuned_table(stored.books),
    "centred": lambda stored: tables.centred_table(stored.books),
    "open": lambda stored: "\n".join(f"- {line}" for line in tables.open_questions(stored.books)),
    "figures": lambda stored: f"`{line_of(stored)}`",
}
"""By the name of the mark."""


def line_of(stored: Stored) -> str:
    """The last line of `--stage print`."""
    return " ".join(f"{name}={value}" for name, value in figures(stored).items())


def page(text: str | None = None, known: Stored | None = None) -> str:
    """The page with its tables as they are stored."""
    told = (DOCS / "frontier.md").read_text("utf-8") if text is None else text
    found = stored() if known is None else known

    def filled(mark: re.Match[str]) -> str:
        begin, name, end = mark.groups()
        return f"{begin}\n{TABLES[name](found)}\n\n{end}"

    return MARKED.sub(filled, told)


def differences() -> list[str]:
    """What the pages say otherwise than the store: nothing, or what to do."""
    text, found = (DOCS / "frontier.md").read_text("utf-8"), stored()
    unused = TABLES.keys() - {name for _, name, _ in MARKED.findall(text)}
    told = [f"frontier.md has no table {name}" for name in sorted(unused)]
    if page(text, found) != text:
        told.append("frontier.md is not what is stored: run python docs/generate.py")
    return [*told, *unlike(found, DOCS)]


def show(found: Stored, say: Callable[[str], object] = print) -> int:
    """Print every table and the line; 1 if something that a page cites is missing."""
    for name, make in TABLES.items():
        if name != "figures" and (told := make(found)):
            say(f"\n{name}\n{told}")
    lacking = list(found.missing())
    for line in lacking:
        say(f"missing: {line}")
    say(line_of(found))
    return 1 if lacking else 0
