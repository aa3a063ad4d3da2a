"""Draw docs/figures/two_ways.svg, dup.svg, blocks.svg, units.svg, frontier.svg and four of growth: `python docs/drawings.py`.

Each stands on a light panel of its own, so that it reads the same on a light and on a dark page. What the drawings
say in numbers is computed by the package, or read from stored runs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from math import log
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mupscale.plans import TensorPlan
from mupscale.rules import Axis
from mupscale.rules.optimizer_rule import decay_factor
from mupscale.rules.optimizers import rule_for
from reproduce.growth.book import Book, Seen
from reproduce.growth.methods.method import OURS
from reproduce.growth.page.bench import listed
from reproduce.growth.page.new_units import chosen
from reproduce.growth.page.sizes import ends
from reproduce.growth.page.stored import stored
from reproduce.growth.questions import after, large, sunk, widths
from reproduce.growth.sizes import Finished

FIGURES = Path(__file__).parent / "figures"
INK, FAINT, PAPER, WRONG = "#24292f", "#6a737d", "#fbfaf7", "#b3261e"
COLOURS = ("#f2b8a0", "#f6dca2", "#bfe0b2", "#a9d6e5", "#c3bfe8", "#eab7d4")


class Drawing:
    """Shapes in the order they are drawn; y grows downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="Helvetica, Arial, sans-serif" font-size="14" role="img"><title>{escape(title)}</title>'
        )
        self.shapes: list[str] = []
        self.box(0, 0, width, height, PAPER, line=PAPER, round_by=8)

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, line: str = "#ffffff", round_by: float = 2
    ) -> None:
        self.shapes.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="{round_by}" fill="{fill}" stroke="{line}" stroke-width="1.5"/>'
        )

    def say(
        self, x: float, y: float, text: str, *, at: str = "middle", size: int = 14, ink: str = INK, bold: bool = False
    ) -> None:  # fmt: skip
        weight = ' font-weight="bold"' if bold else ""
        self.shapes.append(
            f'<text x="{x}" y="{y}" text-anchor="{at}" font-size="{size}" fill="{ink}"{weight}>{escape(text)}</text>'
        )

    def line(
        self, x: float, y: float, to_x: float, to_y: float, ink: str = FAINT, width: float = 1.5
    ) -> None:
        self.shapes.append(
            f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{ink}" stroke-width="{width}"/>'
        )

    def dot(self, x: float, y: float, ink: str, size: float = 5) -> None:
        self.shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{ink}"/>')

    def arrow(self, x: float, y: float, length: float) -> None:
        self.line(x, y, x + length, y, width=2)
        tip = x + length
        self.shapes.append(f'<path d="M{tip} {y} l-8 -5 v10 z" fill="{FAINT}"/>')

    def __str__(self) -> str:
        return "\n".join([self.head, *self.shapes, "</svg>"]) + "\n"


def matrix(drawing: Drawing, x: float, y: float, cells: Sequence[Sequence[int]], size: int) -> None:
    for i, row in enumerate(cells):
        for j, entry in enumerate(row):
            drawing.box(x + j * size, y + i * size, size, size, COLOURS[entry])
            drawing.say(x + (j + 0.5) * size, y + (i + 0.5) * size + 5, "abcdef"[entry])


def layer(drawing: Drawing, x: float, y: float, units: Sequence[str], reads: Sequence[str]) -> None:
    """Hidden units between an input and an output: how each is read, "1", "½" or "0". A unit "new" has no letter."""
    left, right, middle = x, x + 170, y + 20 * (len(units) - 1)
    for i, (unit, read) in enumerate(zip(units, reads, strict=True)):
        at = y + 40 * i
        ink = WRONG if read == "0" else FAINT
        drawing.line(left + 10, middle, left + 85, at, ink=FAINT)
        drawing.line(left + 85, at, right - 10, middle, ink=ink, width=1.0 if read == "0" else 2.0)
        drawing.dot(left + 85, at, COLOURS["ab".find(unit)] if unit in "ab" else "#d9d6ce", size=14)
        drawing.say(left + 85, at + 5, unit if unit in "ab" else "+")
        drawing.say(left + 122, at + (-6 if at <= middle else 16), read, size=12, ink=ink)
    drawing.dot(left, middle, INK, size=6)
    drawing.dot(right, middle, INK, size=6)


def two_ways() -> Drawing:
    """Two hidden units become four: by copies that share, and by new units that nothing reads yet."""
    drawing = Drawing(640, 250, "Two ways to grow: copy and share, or add and wake")
    for x, title, units, reads in (
        (30, "the base", ("a", "b"), ("1", "1")),
        (235, "copy and share", ("a", "a", "b", "b"), ("½", "½", "½", "½")),
        (440, "add and wake", ("a", "b", "new", "new"), ("1", "1", "0", "0")),
    ):
        drawing.say(x + 85, 36, title, bold=True)
        layer(drawing, x, 116 if len(units) == 2 else 76, units, reads)
    drawing.say(
        320,
        236,
        "numbers: how the output reads a unit; + is a new unit, which reads the input already",
        ink=FAINT,
    )
    return drawing


def dup() -> Drawing:
    """A matrix and a bias, each entry next to its copies."""
    drawing, size = Drawing(600, 440, "Duplication: each entry next to its copies"), 34
    base = [[0, 1, 2], [3, 4, 5]]
    wide = [[base[i // 2][j // 2] for j in range(6)] for i in range(4)]
    drawing.say(30, 32, "A matrix that grows in and out, k = 2", at="start", bold=True, size=16)
    matrix(drawing, 60, 98, base, size)
    drawing.say(111, 86, "W, 2 × 3", ink=FAINT)
    drawing.arrow(190, 132, 70)
    drawing.say(306, 138, "½ ·", size=20)
    matrix(drawing, 335, 64, wide, size)
    drawing.say(437, 56, "dup(W), 4 × 6", ink=FAINT)
    drawing.say(30, 236, "Copies lie side by side, four of each entry: c = 4", at="start")
    drawing.say(
        30, 260, "Twice the terms in each sum: s = ½. Each copy gets a share: r = 1/(s c) = ½", at="start"
    )
    drawing.line(30, 286, 570, 286, ink="#e3e0d8")
    drawing.say(30, 318, "A bias, gain or embedding: grows out only", at="start", bold=True, size=16)
    matrix(drawing, 60, 340, [[0, 3]], size)
    drawing.arrow(190, 357, 70)
    drawing.say(306, 363, "1 ·", size=20)
    matrix(drawing, 335, 340, [[0, 0, 3, 3]], size)
    drawing.say(30, 410, "Nothing sums over it: s = 1. Two copies share its gradient: r = ½", at="start")
    return drawing


def heads(drawing: Drawing, y: float, queries: Sequence[int], keys: Sequence[int], ink: str = FAINT) -> None:
    """Query heads above the key-value heads that they read, in equal groups."""
    per, size = len(queries) // len(keys), 44
    start = 303 - len(queries) * (size + 6) / 2
    for i, query in enumerate(queries):
        x = start + i * (size + 6)
        key_x = start + (i // per + 0.5) * per * (size + 6) - 3
        drawing.line(x + size / 2, y + 32, key_x, y + 66, ink=ink)
        drawing.box(x, y, size, 32, COLOURS[query])
        drawing.say(x + size / 2, y + 21, f"q{query}")
    for i, key in enumerate(keys):
        x = start + (i + 0.5) * per * (size + 6) - 3 - 30
        drawing.box(x, y + 66, 60, 32, "#d9d6ce" if key else "#efece4", line=FAINT)
        drawing.say(x + 30, y + 87, f"k{key}, v{key}")


def blocks() -> Drawing:
    """Grouped-query attention: groups move whole, heads alone do not."""
    drawing = Drawing(600, 500, "Blocks: query heads move with the key head that they read")
    drawing.say(30, 32, "Base: four query heads, two key-value heads", at="start", bold=True)
    heads(drawing, 48, (0, 1, 2, 3), (0, 1))
    drawing.say(30, 180, "Exact: whole groups are copied", at="start", bold=True)
    drawing.say(30, 200, "query rows: (2 groups, k = 2) × (2 heads) × (D)", at="start", ink=FAINT)
    heads(drawing, 216, (0, 1, 0, 1, 2, 3, 2, 3), (0, 0, 1, 1))
    drawing.say(30, 348, "Wrong: heads are copied one by one", at="start", bold=True, ink=WRONG)
    drawing.say(30, 368, "the same logits, other gradients", at="start", ink=WRONG)
    heads(drawing, 384, (0, 0, 1, 1, 2, 2, 3, 3), (0, 0, 1, 1), ink=WRONG)
    return drawing


def factors(kind: str, k: int) -> list[str]:
    """s, c, r, and what AdamW's settings and state are multiplied by, of a tensor of this kind."""
    out, into = Axis.parse(f"out: 6x{k}"), Axis.parse(f"in: 6x{k}")
    fixed = Axis.fixed(6)
    axes = {"out": (out, fixed), "in and out": (out, into), "in": (fixed, into)}[kind]
    change, rule = TensorPlan(("w",), axes).change, rule_for("torch.optim.AdamW")
    rate = change.factor(rule.lr)
    decay = decay_factor(rule.decay, change, rate)
    state = [change.factor(rule.state[key].units) for key in ("exp_avg", "exp_avg_sq")]
    eps = change.factor(rule.hyper["eps"])  # type: ignore[arg-type]
    sgd = change.factor(rule_for("torch.optim.SGD").lr)
    return [str(x) for x in (change.s, change.c, change.r, rate, eps, decay, *state, sgd)]


def units() -> Drawing:
    """Three kinds of tensor, and every number that follows from s and c."""
    drawing = Drawing(640, 430, "Units: every factor follows from s and c")
    columns = {
        "first layer, bias": ("out", 345),
        "hidden matrix": ("in and out", 470),
        "readout": ("in", 580),
    }
    drawing.say(20, 32, "Width 6 becomes 24: k = 4", at="start", bold=True)
    drawing.say(20, 88, "growing sides in orange", at="start", ink=FAINT, size=13)
    for title, (kind, x) in columns.items():
        tall, wide = (54 if "out" in kind else 22), (54 if "in" in kind else 22)
        drawing.say(x, 32, title, bold=True)
        drawing.box(x - wide / 2, 84 - tall / 2, wide, tall, "#efece4", line=FAINT)
        if "out" in kind:
            drawing.line(x - wide / 2, 84 - tall / 2, x - wide / 2, 84 + tall / 2, ink="#d9622b", width=5)
        if "in" in kind:
            drawing.line(x - wide / 2, 84 - tall / 2, x + wide / 2, 84 - tall / 2, ink="#d9622b", width=5)
    rows = (
        ("weight scale s", "W"), ("copies c", ""), ("gradient scale r = 1/(s c)", "G"), ("AdamW: learning rate", "W"),
        ("AdamW: eps", "G"), ("AdamW: decay", "1/lr"), ("first moment", "G"), ("second moment", "G²"),
        ("SGD: learning rate", "W/G"),
    )  # fmt: skip
    told = [factors(kind, 4) for kind, _ in columns.values()]
    for i, (label, unit) in enumerate(rows):
        y = 150 + 31 * i
        drawing.line(20, y - 21, 620, y - 21, ink="#e3e0d8")
        drawing.say(20, y, label, at="start", bold=i < 3)
        drawing.say(235, y, unit, ink=FAINT)
        for (_, x), column in zip(columns.values(), told, strict=True):
            drawing.say(x, y, column[i], bold=i < 3, ink=INK if column[i] != "1" else FAINT)
    return drawing


GROWN, ON, SCRATCH, NEW = ("#b3541e", "#e0a070"), "#24292f", ("#33658a", "#86bbd8"), "#3a7d44"
INKS = {"train on": ON, "copies ×2": GROWN[0], "new model ×2": SCRATCH[0], "copies ×4": GROWN[1]}
INKS |= {"new model ×4": SCRATCH[1], "new units ×2": NEW}
"""The arms of a base in the order of `_budgets`."""
PANEL, TOP, BOTTOM = 274, 92, 290


def frontier() -> Drawing:
    """Finished bases with more FLOPs to spend: held-out loss at the end by budget, for every way to spend them."""
    books = stored().books
    mlp, readers = books[0], chosen(books)
    bases = mlp.sizes.cited_bases
    panels = {base: found for base in bases if len(found := _budgets(mlp, base, readers)) > 1}
    drawing = Drawing(
        40 + PANEL * len(panels), 392, "A finished model may spend more: stay, grow or start anew"
    )
    for number, (base, arms) in enumerate(panels.items()):
        told = f"width {base.width}, cost {mlp.sizes.flops(base.units):.2g} FLOPs"
        _panel(drawing, 66 + PANEL * number, told, arms)
    drawing.say(
        30, 34, "Held-out loss of a finished model that may spend more", at="start", bold=True, size=16
    )
    drawing.say(
        30, 342, "FLOPs that are spent after the base, in units of what it cost", at="start", ink=FAINT
    )
    places = (36, 136, 256, 396, 516, 656)
    for x, (name, ink) in zip(places, INKS.items(), strict=True):
        drawing.dot(x, 370, ink, size=6)
        drawing.say(x + 14, 375, name, at="start")
    return drawing


def _budgets(stored: Book, base: Finished, readers: str | None) -> dict[float, dict[str, Seen]]:
    """The arms of a base for every budget that has all of them, and new units where they are stored, last."""
    found = {}
    for extra in stored.sizes.extras:
        arms = {name: stored.sunk(base, name, extra) for name in sunk.names(stored.sizes, base)}
        known = {name: seen for name, seen in arms.items() if seen is not None}
        if len(known) == len(arms):
            found[extra] = known
            new = None if readers is None else stored.new_units(base, readers, extra)
            found[extra] |= {} if new is None else {"new units": new}
    return found


def _panel(drawing: Drawing, left: float, told: str, arms: Mapping[float, Mapping[str, Seen]]) -> None:
    """Loss on a logarithmic axis; a bar spans the seeds."""
    values = [value for found in arms.values() for seen in found.values() for value in seen.values]
    low, high = min(values), max(values)

    def y(loss: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * log(loss / low) / log(high / low)

    right = left + PANEL - 50
    wide = (right - left - 40) / (len(arms) - 1)
    places = {extra: left + 20 + wide * i for i, extra in enumerate(arms)}
    for tick in (low, (low * high) ** 0.5, high):
        drawing.line(left, round(y(tick), 1), right, round(y(tick), 1), ink="#e3e0d8", width=1)
        drawing.say(left - 4, round(y(tick) + 5, 1), f"{tick:.2f}", at="end", ink=FAINT)
    for extra, x in places.items():
        drawing.say(round(x, 1), BOTTOM + 24, f"{extra:g} ×", ink=FAINT)
    drawing.say(left, 68, told, at="start")
    names = dict.fromkeys(name for found in arms.values() for name in found)
    inks = dict(zip(names, INKS.values(), strict=False))
    for name, ink in inks.items():
        points = [(x, arms[extra][name]) for extra, x in places.items() if name in arms[extra]]
        for (x, seen), (to_x, to) in pairwise(points):
            drawing.line(round(x, 1), round(y(seen.mean), 1), round(to_x, 1), round(y(to.mean), 1), ink)
        for x, seen in points:
            drawing.line(x, round(y(min(seen.values)), 1), x, round(y(max(seen.values)), 1), ink, width=4)
            drawing.dot(x, y(seen.mean), ink)


def text_methods() -> Drawing:
    """Every method that has been run on the finished Llama, by where it ends."""
    found = stored()
    rows = [
        (f"{label} ({kind})", one, NEW if source.startswith(OURS) else GROWN[0])
        for kind, label, source, _, one in listed(found)
        if one is not None
    ]
    text = found.books[1]
    on = text.sunk(text.sizes.bases[0], "goes on", 1.0)
    rows = sorted([*rows, ("the base goes on", on, ON)] if on else rows, key=lambda row: row[1].mean)
    return _ends("A finished Llama with as many FLOPs again: held-out loss", rows, 540)


def large_methods() -> Drawing:
    """The same for the larger Llama."""
    book = stored().book("large")
    assert book is not None
    found = ends(book, 1.0)
    inks = {large.DEFAULT: NEW, large.ASLEEP: NEW, "goes on": ON, large.SCRATCH: SCRATCH[0]}
    rows = sorted(
        ((name, one, inks.get(name, GROWN[0])) for name, one in found.items()), key=lambda row: row[1].mean
    )
    return _ends("A Llama of 279,104 parameters with as many FLOPs again: held-out loss", rows, 300)


def right_width() -> Drawing:
    """Growth to the right width beside widths throughout, with the larger budget."""
    mlp = stored().books[0]
    way = mlp.sizes.ways[-1]
    arms = {name: widths.arm(mlp.known, mlp.sizes, way, name) for name in widths.names(way)}
    ends = [
        (name if "through" in name else f"{way.narrow} grown by {name}", mlp.paired(made))
        for name, made in arms.items()
    ]
    rows = [(name, one, ON if "through" in name else NEW) for name, one in ends if one is not None]
    return _ends(f"One budget of {way.units} units for everything: held-out loss", rows, 250)


def rate_after() -> Drawing:
    """The rate after growth alone."""
    mlp = stored().books[0]
    names = {name: tuple(name.split(", ")) for name in after.names(mlp.sizes)}
    ends = [
        (
            f"{way}, {factor} × after{' a base at twice its rate' if before == '2' else ''}",
            mlp.paired(after.arm(mlp.known, mlp.sizes, name)),
        )
        for name, (way, before, factor) in names.items()
    ]
    rows = [
        (name, one, GROWN[0] if name.startswith("copies") else NEW) for name, one in ends if one is not None
    ]
    return _ends("The peak after growth, over the base's own: held-out loss", rows, 400)


def _ends(title: str, rows: Sequence[tuple[str, Seen, str]], left: int) -> Drawing:
    """A line for each arm, in its colour: a dot at its mean, and a bar that spans the seeds."""
    low = min(min(one.values) for _, one, _ in rows)
    high = max(max(one.values) for _, one, _ in rows)
    wide, bottom = 330, 62 + 26 * len(rows)
    drawing = Drawing(left + wide + 50, bottom + 44, title)
    drawing.say(20, 34, title, at="start", bold=True, size=16)

    def x(loss: float) -> float:
        return round(left + wide * log(loss / low) / log(high / low), 1)

    for tick in (low, (low * high) ** 0.5, high):
        drawing.line(x(tick), 52, x(tick), bottom, ink="#e3e0d8", width=1)
        drawing.say(x(tick), bottom + 24, f"{tick:.3f}", ink=FAINT)
    for i, (name, one, ink) in enumerate(rows):
        y = 68 + 26 * i
        drawing.say(20, y + 5, name, at="start")
        drawing.line(x(min(one.values)), y, x(max(one.values)), y, ink, width=4)
        drawing.dot(x(one.mean), y, ink)
    return drawing


DRAWINGS = {
    "growth_text.svg": text_methods,
    "growth_large.svg": large_methods,
    "growth_width.svg": right_width,
    "growth_rate.svg": rate_after,
    "two_ways.svg": two_ways,
    "dup.svg": dup,
    "blocks.svg": blocks,
    "units.svg": units,
    "frontier.svg": frontier,
}


if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (FIGURES / name).write_text(str(draw()), encoding="utf-8")
