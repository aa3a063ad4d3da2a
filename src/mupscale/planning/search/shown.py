"""The layouts that the code of a model shows, followed from its views to the tensors that write and read them.

A view that splits a growing axis shows how the axis is laid out, and so does one that joins two axes. Calls in between,
such as sums, activations and concatenations, carry the axis to other tensors. All of it together is one hypothesis, for
every layer at once:

    qkv = linear(x, W)        192 -> 384       6x2 * 16      (3 parts of the heads below)
    q, k, v = qkv.chunk(3)     64 -> 128         2x2 * 16      by the view
    q.view(b, t, 2, 16)         2 -> 4
    y.flatten(2)                64 -> 128         2x2 * 16
    linear(y, P)                                  P reads 2x2 * 16

What is read here is a guess: two axes of the same two sizes in one call count as one. The gradient identity decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import NamedTuple

from torch import Tensor

from ...models.calls import Call, Trace
from ...rules.axes import Layout, Role
from ...rules.products import Factor, Ways
from ..draft import Draft, DraftEntry
from ..knobs import Setting
from .reshapes import matched

_RESHAPES = frozenset(
    [
        "view",
        "reshape",
        "flatten",
        "unflatten",
        "_unsafe_view",
        "view_as",
        "reshape_as",
        "squeeze",
        "unsqueeze",
    ]
)
_PARTS = frozenset(
    ["chunk", "split", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split", "narrow", "glu"]
)
_VIEWS = frozenset(["select", "index_select", "unbind", "contiguous", "clone", "to", "type"])
"""Functions that take matrices out of a stack, or return what they get."""
_TURNS = frozenset(["t", "T", "mT", "transpose"])
_PRODUCTS = frozenset(["matmul", "__matmul__", "mm", "bmm"])
_SUMS = frozenset(["add", "__add__", "__radd__", "__iadd__", "add_"])
_JOINS = frozenset(["cat", "concat", "concatenate"])
_DEEP = 8
"""Splits inside of splits that are followed."""


class Space(NamedTuple):
    """A growing axis of one tensor: of which tensor, and its sizes in both models."""

    of: int | tuple[str, int]
    """The id of a tensor that a call made, or the name of a parameter and its dimension."""
    base: int
    wide: int


Part = Space | int
"""A factor of an axis: one that grows, or the size of one that does not."""
Segments = list[list[Part]]
"""What a space consists of, one behind the other, each a product of factors, outer to inner."""
Atom = tuple[int, int]
"""The two sizes of a factor."""


def with_shown_roles(draft: Draft, trace: Trace) -> Draft:
    """The draft whose raw matrices know which of their axes is read, where every call that takes them is a product.

    Biases of experts are known too, where they are added.

    `F.linear(x, w)` reads the last axis of `w` and writes the one before it, `x @ w` the other way round. So does an
    expert, which is one matrix of a stack:

    >>> import torch
    >>> from torch import nn
    >>> from mupscale.models.calls import traced
    >>> from mupscale.planning.draft import draft
    >>> class Experts(nn.Module):
    ...     def __init__(self, n: int) -> None:
    ...         super().__init__()
    ...         self.up, self.down = nn.Parameter(torch.ones(3, 4, n)), nn.Parameter(torch.ones(3, 4, n))
    ...
    ...     def forward(self, x: torch.Tensor) -> torch.Tensor:
    ...         return nn.functional.linear(x @ self.up[2], self.down[2])
    >>> base, x = Experts(5), torch.ones(2, 4)
    >>> found = with_shown_roles(draft(base, Experts(10), Ways("units"), None)[0], traced(base, lambda: base(x))[1])
    >>> {name: entry.roles for name, entry in found.entries.items()}
    {'up': {2: 'out'}, 'down': {2: 'in'}}
    """
    seen: dict[str, set[tuple[Role, ...] | None]] = {}
    views: dict[int, tuple[str, bool]] = {}
    opened = {entry.name for entry in draft.open if entry.kind == "parameter" and len(entry.base_shape) > 1}
    for call in trace.calls:
        for position, given in enumerate(call.inputs):
            leaf = call.leaves[position]
            name, turned = (
                (draft.planned(leaf), False) if leaf is not None else views.get(id(given), ("", False))
            )
            if name not in opened:
                continue
            turns = turned ^ (call.name in _TURNS)
            same = given.shape[-2:][::-1] if call.name in _TURNS else given.shape[-2:]
            taken = call.takes_expert and position == 0
            if taken or (
                call.name in _VIEWS | _TURNS and all(out.shape[-2:] == same for out in call.outputs)
            ):
                views |= {id(out): (name, turns) for out in call.outputs}
            else:
                # A product of two weights is a matrix itself, and what reads that is not shown here.
                data = not trace.weight(call, 0)
                seen.setdefault(name, set()).add(_shown_roles(call, position, turned) if data else None)
    changes = {}
    for name, (roles, *others) in seen.items():
        entry = draft.entries[name]
        if roles is not None and not others:
            # Axes before those of the product are stacked copies of the matrix.
            first = len(entry.base_shape) - len(roles)
            every: dict[int, Role] = dict.fromkeys(range(first), "out")
            every |= enumerate(roles, first)
            known = {dim: every[dim] for dim in entry.growing}
            changes[name] = replace(entry, roles=known, seen_roles=True)
    return draft.with_entries(changes)


def _shown_roles(call: Call, position: int, turned: bool) -> tuple[Role, ...] | None:
    """The roles of the last axes of a tensor in a product with a matrix, or where a bias is added; None for other uses."""
    given = call.inputs[position]
    if given.dim() == 1:
        return ("out",) if call.name in _SUMS or (call.name == "linear" and position == 2) else None
    if position != 1 or len(call.inputs) > 3:
        return None
    if call.name == "linear":
        return ("in", "out") if turned else ("out", "in")
    if call.name in _PRODUCTS:
        return ("out", "in") if turned else ("in", "out")
    return None


def shown_layouts(draft: Draft, base: Trace, wide: Trace) -> Setting | None:
    """One setting with the layouts of all parameters that calls show; None if they show nothing new. Those declared stay."""
    spaces = _Spaces(draft)
    for a, b in zip(base.calls, wide.calls, strict=False):
        if a.name != b.name or len(a.inputs) != len(b.inputs):
            break
        spaces.read(base, a, b)
    spaces.unite_parts()
    found: dict[str, dict[int, Layout]] = {}
    for name, entry in draft.entries.items():
        for dim in entry.growing if entry.kind == "parameter" else ():
            layout = None if dim in entry.declared_layouts else spaces.layout(_own(entry, dim))
            if layout is not None and _changes(draft, entry, dim, layout):
                found.setdefault(name, {})[dim] = layout
    return Setting(layouts=found) if found else None


def _own(entry: DraftEntry, dim: int) -> Space:
    return Space((entry.name, dim), entry.base_shape[dim], entry.wide_shape[dim])


def _changes(draft: Draft, entry: DraftEntry, dim: int, layout: Layout) -> bool:
    """Whether a layout fits and is another than that of the draft."""
    then = draft.axis(replace(entry, layouts={**entry.layouts, dim: layout}), dim)
    return then is not None and then != draft.axis(entry, dim)


class _Spaces:
    """Spaces that are one, and how some of them consist of others."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.parent: dict[Space, Space] = {}
        self.made_of: list[tuple[Space, Segments]] = []

    def find(self, space: Space) -> Space:
        while (above := self.parent.get(space, space)) != space:
            space = above
        return space

    def unite(self, spaces: Sequence[Space]) -> None:
        for one, other in pairwise(spaces):
            if (a := self.find(one)) != (b := self.find(other)):
                self.parent[a] = b

    def read(self, trace: Trace, a: Call, b: Call) -> None:
        """What one call says about the axes of its inputs and outputs."""
        data, weights = [], []
        for i, pair in enumerate(zip(a.inputs, b.inputs, strict=True)):
            leaf = a.leaves[i]
            entry = self.draft.entries.get(self.draft.planned(leaf)) if leaf is not None else None
            if entry is not None and entry.kind == "parameter":
                weights.append(entry)
                continue
            found = _Grown(*pair)
            if trace.weight(a, i) and len(found.sizes) > 1:
                return  # a matrix that was computed from others: which of its axes is read is not known
            data.append(found)
        outs = [_Grown(*pair) for pair in zip(a.outputs, b.outputs, strict=False)]
        if len(data) == 1 and not weights and outs:
            if a.name in _RESHAPES:
                self._reshaped(data[0], outs[0])
                return
            if self._taken(a.name, data[0], outs):
                return
        if a.name in _JOINS and not weights and len(outs) == 1 and len(data) > 1:
            self._joined(data, outs[0])
            return
        self._through(a.name, data, weights, outs)

    def _through(self, name: str, data: list[_Grown], weights: list[DraftEntry], outs: list[_Grown]) -> None:
        """A call that keeps axes as they are, except those that a matrix reads or writes."""
        apart: set[Atom] = set()
        for entry in weights:
            sizes = {dim: (entry.base_shape[dim], entry.wide_shape[dim]) for dim in entry.growing}
            roles = {dim: role for dim, role in (entry.roles or {}).items() if dim in sizes}
            matrix = "in" in roles.values() or (entry.roles is None and len(sizes) > 1)
            apart |= set(sizes.values()) if matrix else set()
            if entry.roles is None and len(set(sizes.values())) < len(sizes):
                continue
            for dim, size in sizes.items():
                made = [t.space(size) for t in outs if size in t.sizes]
                given = [t.space(size) for t in data if size in t.sizes]
                reads = roles.get(dim) == "in" or (matrix and entry.roles is None and not made)
                self.unite([_own(entry, dim), *(given if reads or not made else made)])
        alike: dict[Atom, list[Space]] = {}
        for tensor in (*data, *outs):
            for size in tensor.sizes - apart:
                alike.setdefault(size, []).append(tensor.space(size))
        for spaces in alike.values():
            self.unite(spaces)
        if name == "scaled_dot_product_attention":  # groups of queries share a head of keys and values
            few, many = (
                [s for s in alike if any(s in t.sizes for t in part)] for part in (data[1:2], data[:1])
            )
            for small in few:
                for large in many:
                    if _times(small, large) > 1:
                        self.made_of.append((alike[large][0], [[alike[small][0], _times(small, large)]]))

    def _reshaped(self, one: _Grown, other: _Grown) -> None:
        for ins, outs in matched(one.shape, other.shape):
            if len(ins) == len(outs) == 1:
                if ins[0] in one.grows and outs[0] in other.grows:
                    self.unite([one.at(ins[0]), other.at(outs[0])])
            elif len(ins) == 1 and ins[0] in one.grows:
                self.made_of.append((one.at(ins[0]), [other.parts(outs)]))
            elif len(outs) == 1 and outs[0] in other.grows:
                self.made_of.append((other.at(outs[0]), [one.parts(ins)]))

    def _taken(self, name: str, whole: _Grown, outs: list[_Grown]) -> bool:
        """Parts of an axis: one behind the other, or every other unit, or groups that a pool reads."""
        for dim in whole.grows:
            if any(len(out.shape) != len(whole.shape) for out in outs):
                return False
            parts = [out.parts([dim])[0] for out in outs]
            first = parts[0]
            if isinstance(first, int) or whole.at(dim)[1:] == first[1:]:
                continue
            size, times = (first.base, first.wide), _times((first.base, first.wide), whole.grows[dim])
            equal = all(isinstance(part, Space) and part[1:] == size for part in parts)
            if equal and times > 1:
                self.unite([part for part in parts if isinstance(part, Space)])
                behind = name in _PARTS or (name == "__getitem__" and outs[0].step(dim) == whole.step(dim))
                repeated = name == "repeat_interleave"
                if not repeated:
                    self.made_of.append((whole.at(dim), [[times, first] if behind else [first, times]]))
            elif sum(part if isinstance(part, int) else part.base for part in parts) == whole.shape[dim]:
                self.made_of.append((whole.at(dim), [[part] for part in parts]))
            elif (
                name in ("repeat_interleave", "repeat", "tile") and (n := _times(whole.grows[dim], size)) > 1
            ):
                few = whole.at(dim)
                self.made_of.append((first, [[few, n] if name == "repeat_interleave" else [n, few]]))
            self.unite_rest(whole, outs, {whole.grows[dim], size})
            return True
        return False

    def unite_rest(self, one: _Grown, others: list[_Grown], but: set[Atom]) -> None:
        """The other axes of an input, which its outputs keep."""
        for size in one.sizes - but:
            self.unite([t.space(size) for t in (one, *others) if size in t.sizes])

    def _joined(self, data: list[_Grown], out: _Grown) -> None:
        for dim, size in out.grows.items():
            if any(len(t.shape) != len(out.shape) for t in data):
                return
            parts = [t.parts([dim])[0] for t in data]
            if all(isinstance(part, Space) and part[1:] == size for part in parts):
                self.unite([out.at(dim), *(part for part in parts if isinstance(part, Space))])
            elif len({p if isinstance(p, int) else p[1:] for p in parts}) == 1:
                same = [part for part in parts if isinstance(part, Space)]
                self.unite(same)
                self.made_of.append((out.at(dim), [[len(parts), same[0]]]))
            else:
                self.made_of.append((out.at(dim), [[part] for part in parts]))

    def unite_parts(self) -> None:
        """What two calls say about one space: parts at the same place are one space."""
        known: dict[tuple[Space, tuple[object, ...]], list[Part]] = {}
        for whole, segments in self.made_of:
            if len(segments) == 1:
                shape = tuple(part if isinstance(part, int) else part[1:] for part in segments[0])
                before = known.setdefault((self.find(whole), shape), segments[0])
                for one, other in zip(before, segments[0], strict=True):
                    if isinstance(one, Space) and isinstance(other, Space):
                        self.unite([one, other])

    def layout(self, space: Space) -> Layout | None:
        """The layout of an axis; None if nothing shows more than its sizes."""
        inside: dict[Space, list[Segments]] = {}
        for whole, segments in self.made_of:
            inside.setdefault(self.find(whole), []).append(segments)
        found = [_product(atoms, self.draft.ways) for atoms in self._expanded(space, inside, _DEEP)]
        if not all(found):
            return None
        if len(set(found)) == 1 < len(found):
            return ((len(found), 1), *found[0])
        if len(found) > 1:
            return tuple(found)
        return found[0] if len(found[0]) > 1 else None

    def _expanded(self, space: Space, inside: Mapping[Space, list[Segments]], depth: int) -> list[list[Atom]]:
        """The segments of a space with all that is known of their factors; of several the finest."""
        best = [[(space.base, space.wide)]]
        for segments in inside.get(self.find(space), ()) if depth else ():
            found = [atoms for product in segments for atoms in self._followed(product, inside, depth)]
            if sum(map(len, found)) > sum(map(len, best)):
                best = found
        return best

    def _followed(
        self, product: list[Part], inside: Mapping[Space, list[Segments]], depth: int
    ) -> list[list[Atom]]:
        """The factors of a product in their factors; one of several segments is followed only where it stands alone."""
        each = [
            [[(part, part)]] if isinstance(part, int) else self._expanded(part, inside, depth - 1)
            for part in product
        ]
        if len(each) == 1:
            return each[0]
        whole = [[(part, part) if isinstance(part, int) else (part.base, part.wide)] for part in product]
        return [
            [
                atom
                for found, plain in zip(each, whole, strict=True)
                for atom in (found[0] if len(found) == 1 else plain)
            ]
        ]


class _Grown:
    """A tensor of both models: which of its axes grow."""

    def __init__(self, base: Tensor, wide: Tensor) -> None:
        self.tensor, self.shape = base, tuple(base.shape)
        pairs = enumerate(zip(base.shape, wide.shape, strict=False) if base.dim() == wide.dim() else ())
        self.grows: dict[int, Atom] = {d: (a, b) for d, (a, b) in pairs if a != b}
        self.sizes = set(self.grows.values())

    def at(self, dim: int) -> Space:
        return self.space(self.grows[dim])

    def space(self, size: Atom) -> Space:
        return Space(id(self.tensor), *size)

    def parts(self, dims: Sequence[int]) -> list[Part]:
        return [self.at(d) if d in self.grows else self.shape[d] for d in dims]

    def step(self, dim: int) -> int:
        return self.tensor.stride(dim)


def _times(small: Atom, large: Atom) -> int:
    """How many times longer an axis is in both models; 0 if it is not."""
    if small[0] and large[0] % small[0] == 0 and large[0] * small[1] == large[1] * small[0]:
        return large[0] // small[0]
    return 0


def _product(atoms: Sequence[Atom], ways: Ways) -> tuple[tuple[int, int, int], ...]:
    """The factors (size, k, pad) of a product, each grown in the way that its sizes ask for; none if that is not whole.

    >>> _product([(2, 4), (8, 8)], Ways()), _product([(2, 4), (8, 8)], Ways("units"))
    (((2, 2, 0), (8, 1, 0)), ((2, 1, 2), (8, 1, 0)))
    """
    found = []
    for i, (n, m) in enumerate(atoms):
        factor = Factor(n) if n == m else ways.grow(n, m, prod(a for a, _ in atoms[i + 1 :])) if n else None
        if factor is None or factor.k.denominator != 1:
            return ()
        found.append((factor.size, int(factor.k), factor.pad))
    return tuple(found)
