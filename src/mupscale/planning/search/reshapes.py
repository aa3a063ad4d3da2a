"""Layouts that the code of a model shows: views that split or merge a growing axis, and shuffles of channels.

A linear layer writes 4·w units and `view(-1, w, 2, 2)` reads them as w channels of four pixels. The wide model writes
8·w and reads 2·w channels, so blocks of four are copied together. From w = 3 to w = 6, in Python's terms:

>>> split_layouts((5, 12), (5, 3, 2, 2), (5, 24), (5, 6, 2, 2))
[(12, 24, ((3, 2), (4, 1)))]

The layout belongs to the tensors that write the axis before the view, or read it after a view that merges. Which of
them is found by trying.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import prod

from ...models.calls import Call, Trace
from ...models.names import pattern_of
from ...rules.axes import Layout
from ..draft import Draft
from ..knobs import Setting, per_name

Shape = Sequence[int]
Hint = tuple[int, int, tuple[tuple[int, int], ...]]
"""An axis from one size to another, with its factors (size, k)."""

_SETTINGS = 40
"""Settings proposed for one place; each costs a trial."""
_AWAY = 600
"""Calls between a place and the tensors whose layout matters for it."""


def split_layouts(base_in: Shape, base_out: Shape, wide_in: Shape, wide_out: Shape) -> list[Hint]:
    """The layouts of axes that a reshape splits or merges, in both directions."""
    found: list[Hint] = []
    for ins, outs in matched(base_in, base_out):
        for axis, parts, sizes, goals in (
            (ins, outs, (base_in, base_out), (wide_in, wide_out)),
            (outs, ins, (base_out, base_in), (wide_out, wide_in)),
        ):
            if len(axis) != 1 or len(parts) < 2:
                continue
            n, m = sizes[0][axis[0]], goals[0][axis[0]]
            small, large = [sizes[1][d] for d in parts], [goals[1][d] for d in parts]
            whole = all(a and b % a == 0 for a, b in zip(small, large, strict=True))
            if n != m and whole and prod(large) == m:
                factors = _joined([(a, b // a) for a, b in zip(small, large, strict=True)])
                if len(factors) > 1:
                    found.append((n, m, factors))
    return found


def _joined(factors: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbours that do not grow as one; sizes of one left out."""
    found: list[tuple[int, int]] = []
    for size, k in factors:
        if found and found[-1][1] == k == 1:
            found[-1] = (found[-1][0] * size, 1)
        elif size > 1 or k > 1:
            found.append((size, k))
    return tuple(found)


def matched(a: Shape, b: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Runs of dimensions of two shapes that hold the same entries.

    >>> list(matched((5, 12), (5, 3, 4)))
    [([0], [0]), ([1], [1, 2])]
    """
    i = j = 0
    while i < len(a) and j < len(b):
        left, right, m, n = [i], [j], a[i], b[j]
        while m != n and max(i, j) < max(len(a), len(b)):
            if m < n and i + 1 < len(a):
                i += 1
                left.append(i)
                m *= a[i]
            elif n < m and j + 1 < len(b):
                j += 1
                right.append(j)
                n *= b[j]
            else:
                return
        yield left, right
        i, j = i + 1, j + 1


def hints(base: Trace, wide: Trace) -> list[tuple[int, Hint | int]]:
    """For calls that rearrange a growing axis, their index and the layout: whole, or only the size of a block."""
    found: list[tuple[int, Hint | int]] = []
    for index, (a, b) in enumerate(zip(base.calls, wide.calls, strict=False)):
        if a.name != b.name:
            break
        if not a.inputs or not b.inputs or a.value is None or b.value is None:
            continue
        shapes = [tuple(t.shape) for t in (a.inputs[0], a.value, b.inputs[0], b.value)]
        if shapes[0] == shapes[2] or len(a.inputs) > 1:
            continue
        if prod(shapes[0]) == prod(shapes[1]):
            splits = split_layouts(*shapes)
            found += [(index, hint) for hint in splits]
            found += [(index, block) for block in _ratios(*shapes) if not splits]
    return found


def _ratios(base_in: Shape, base_out: Shape, wide_in: Shape, wide_out: Shape) -> Iterator[int]:
    """Block sizes that a shuffle suggests: how many times longer a growing axis is before it than after it."""
    before = [(a, b) for a, b in zip(base_in, wide_in, strict=False) if a != b]
    after = [(a, b) for a, b in zip(base_out, wide_out, strict=False) if a != b]
    for n, m in before:
        for p, q in after:
            for long, short in ((n, p), (p, n)):
                if short and long % short == 0 and long > short and n * q == m * p:
                    yield long // short


def layout_settings(
    draft: Draft, trace: Trace, index: int, known: Sequence[tuple[int, Hint | int]]
) -> Iterator[Setting]:
    """Layouts for the tensors around one call: its own, and those that wrote its inputs."""
    ordered = sorted(known, key=lambda hint: abs(hint[0] - index))
    count = 0
    for name, dim in _around(draft, trace, index):
        entry = draft.entries[name]
        n, m = entry.base_shape[dim], entry.wide_shape[dim]
        for option in dict.fromkeys(_option(hint, n, m) for _, hint in ordered):
            if option is not None and count < _SETTINGS:
                count += 1
                axes = _together(draft, name, dim)
                yield Setting(layouts=per_name(axes, option))


def _option(hint: Hint | int, n: int, m: int) -> Layout | None:
    """A hint as a layout for an axis from n to m: as it is, or its innermost block."""
    if isinstance(hint, int):
        return hint if n % hint == 0 and m % hint == 0 and (m // hint) % (n // hint) == 0 else None
    if hint[:2] == (n, m):
        return hint[2]
    size, k = hint[2][-1]
    return _option(size, n, m) if k == 1 else None


def _around(draft: Draft, trace: Trace, index: int) -> Iterator[tuple[str, int]]:
    """Growing axes of the tensors of a call and of those that made its inputs, back to the last matrix."""
    queue, seen = deque([index]), {index}
    given: set[tuple[str, int]] = set()
    while queue:
        i = queue.popleft()
        call = trace.calls[i]
        matrices = False
        for name in _growing_leaves(draft, call):
            entry = draft.entries[name]
            for dim in entry.growing:
                reads = (entry.roles or {}).get(dim) == "in"
                # Behind a matrix only what it writes matters; of the call itself also what it reads.
                if entry.kind == "parameter" and (not reads or i == index) and (name, dim) not in given:
                    given.add((name, dim))
                    yield name, dim
            matrices |= len(entry.base_shape) > 1
        if matrices and i != index:
            continue
        for parent in call.parents:
            if parent is not None and parent not in seen and index - parent <= _AWAY:
                seen.add(parent)
                queue.append(parent)


def _growing_leaves(draft: Draft, call: Call) -> list[str]:
    names = [draft.planned(leaf) for leaf in call.leaves if leaf is not None]
    found = [n for n in names if n in draft.entries and draft.entries[n].growing]
    return sorted(found, key=lambda n: -len(draft.entries[n].base_shape))


def _together(draft: Draft, name: str, dim: int) -> list[tuple[str, int]]:
    """The axis in all layers, and with an axis that is written the vectors of the same module and size."""
    entry = draft.entries[name]
    owner, size = pattern_of(name.rpartition(".")[0]), (entry.base_shape[dim], entry.wide_shape[dim])
    found = []
    for other in draft.entries.values():
        if pattern_of(other.name) == pattern_of(name) and dim in other.growing:
            found.append((other.name, dim))
        elif (
            (entry.roles or {}).get(dim) == "out"
            and pattern_of(other.name.rpartition(".")[0]) == owner
            and other.kind == "parameter"
            and other.growing == [0]
            and (other.base_shape, other.wide_shape) == ((size[0],), (size[1],))
        ):
            found.append((other.name, 0))
    return found
