"""A plan for a deeper model: its blocks are the base's in order, with new ones behind or between them that sleep.

A new block is zero, but for the gains of its norms. It passes its input on, and no gradient reaches its weights,
because every path through it has two weights that are zero. So the deeper run is the base's run until the block wakes:
its weights become those of the block of the base that it is like, except those that write into the stream, which are
quiet. They learn in the first step, and everything else from the second step on.

By default new blocks are in stack order: all blocks of the base, then all of them again. Two blocks become four with
(0, 1, 0, 1): a number that comes again is a new block, like the block of that number. It is the order of G_stack, without
the jump of its loss. (0, None, 1, None) puts a new block behind each: None is like the block before it, so block 1 is like
block 0, and block 3 like the base's block 1.

A bias that writes into the stream cannot sleep: nothing stands between it and the stream, so it has a gradient. It is
the gradient of the last bias that the block before writes, because the stream passes through new blocks unchanged. So
that bias is split: with m new blocks of two such biases each, it and they are the c = 2m + 1 parts of the one that the
base has, each with s = 1/c and r = 1. They add up to it, and so do their steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction

from torch import nn

from ..errors import Fault, MupscaleError, raise_faults
from ..models.names import named_tensors, pattern_of, unique_tensors
from ..rules.axes import Axis
from ..rules.scale import ONE, Scale
from ..tensors.making import Fill
from .plan import Plan
from .tensor_plan import TensorPlan

Order = tuple[int | None, ...]
"""For every block of the deeper model the block of the base that it is. A new block is a number that was there before, of
the block that it is like, or None if that is the one before it."""


def order_of(layers: int, deeper: int, after: Sequence[int] | None = None) -> Order:
    """Where new blocks go: behind the blocks `after`, or by default in stack order, all blocks and then all blocks again.

    >>> order_of(2, 4), order_of(4, 6), order_of(2, 3, after=[0])
    ((0, 1, 0, 1), (0, 1, 2, 3, 0, 1), (0, None, 1))
    """
    new = deeper - layers
    if new < 1:
        raise MupscaleError(
            f"layers {layers} -> {deeper}: a model grows deeper; write a number above {layers}",
            code="depth.not_deeper",
        )
    if after is None:
        return tuple(i % layers for i in range(deeper))
    places = list(after)
    if len(places) != new or any(not 0 <= place < layers for place in places):
        raise MupscaleError(
            f"after={':'.join(map(str, places))}: expected {new} blocks of the base, numbered 0 to {layers - 1}, behind "
            "which the new ones go",
            code="depth.wrong_places",
        )
    return tuple(block for i in range(layers) for block in (i, *[None for place in places if place == i]))


def spread_order(layers: int, deeper: int) -> Order:
    """New blocks behind the blocks that they are like, evenly spread: the j-th of n behind the first j · layers / n.

    >>> spread_order(2, 4), spread_order(4, 6)
    ((0, None, 1, None), (0, 1, None, 2, 3, None))
    """
    new = deeper - layers
    return order_of(layers, deeper, [(j * layers + new - 1) // new - 1 for j in range(1, new + 1)])


def new_in(order: Order) -> list[int]:
    """The numbers of the new blocks.

    >>> new_in((0, None, 1)), new_in((0, 1, 0, 1))
    ([1], [2, 3])
    """
    return [i for i, block in enumerate(order) if block is None or block in order[:i]]


def first_values(model: nn.Module) -> dict[str, Fill]:
    """Name pattern -> what a new vector of a block holds, as the freshly built model holds it: ones or zeros.

    >>> first_values(nn.ModuleList([nn.LayerNorm(2)]))
    {'*.weight': 'one', '*.bias': 'zero'}
    """
    return {
        pattern_of(name): "one" if bool((tensor == 1).all()) else "zero"
        for name, kind, tensor in named_tensors(model)
        if kind == "parameter" and tensor.dim() < 2
    }


@dataclass(frozen=True)
class NewBlocks:
    """What the tensors of new blocks hold while they sleep, by name pattern; tensors that no pattern matches are zero."""

    values: Mapping[str, Fill]
    """What new vectors hold."""
    quiet: Sequence[str]
    """Tensors that write into the stream, and stay as they are when the others wake."""
    silenced: Mapping[str, Fill] = field(default_factory=dict)
    """Gains behind a branch, and what silences them: zero, or -1 where they are used as (1 + w)."""
    biases: Sequence[str] = ()
    """Biases that write into the stream."""

    def entry(self, name: str, axes: tuple[Axis, ...], like: str) -> TensorPlan:
        """A new parameter."""
        off = next((fill for pattern, fill in self.silenced.items() if fnmatchcase(name, pattern)), None)
        fill = off or self.values.get(pattern_of(name), "zero")
        quiet = _matches(name, self.quiet)
        return TensorPlan((), axes, fill=fill, like=like, quiet=quiet, repeats=not quiet)


def block_plan(base: nn.Module, deeper: nn.Module, order: Order, blocks: NewBlocks) -> Plan:
    """The plan from a model to one with new blocks, both of one width; nothing has proved it yet."""
    old = {name: (kind, tensor) for name, kind, tensor in named_tensors(base)}
    prefix = _list_of_blocks(list(old), [name for name, _, _ in named_tensors(deeper)], order)
    tensors: dict[str, TensorPlan] = {}
    odd: list[Fault] = []
    new_tensors, ties = unique_tensors(deeper)
    for name, (kind, tensor) in new_tensors.items():
        axes = tuple(map(Axis.fixed, tensor.shape))
        source, new = source_of(name, prefix, order)
        if not new:
            tensors[name] = TensorPlan((source,), axes, kind=kind)
        elif kind == "buffer":
            tensors[name] = TensorPlan((), axes, kind=kind, fill="own")
        else:
            if source not in old or tuple(old[source][1].shape) != tuple(tensor.shape):
                odd.append(
                    Fault(
                        "depth.no_tensor_alike",
                        name,
                        f"new, and {source}, which it would be like, is not of its kind",
                    )
                )
                continue
            tensors[name] = blocks.entry(name, axes, source)
    raise_faults("the new blocks are not like those before them", odd[:4])
    return Plan(_split(tensors, prefix, order, blocks.biases), ties)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _split(
    tensors: Mapping[str, TensorPlan], prefix: str, order: Order, patterns: Sequence[str]
) -> dict[str, TensorPlan]:
    """The entries with every bias that writes into the stream before new blocks split over theirs."""
    written: dict[int, list[str]] = {}
    for name, entry in tensors.items():
        if entry.kind == "parameter" and name.startswith(f"{prefix}.") and _matches(name, patterns):
            written.setdefault(int(name.removeprefix(f"{prefix}.").partition(".")[0]), []).append(name)
    found, faults = dict(tensors), []
    for live, new in _runs_of_new(order):
        parts = [name for block in new for name in written.get(block, ())]
        shared = [] if live is None else written.get(live, [])[-1:]
        if parts and not shared:
            what = "a bias that writes into the stream, and no block before it has one to share with it"
            faults.append(
                Fault(
                    "depth.bias_without_partner",
                    parts[0],
                    what,
                    "put the new blocks behind a block of the base that has one",
                )
            )
        elif parts:
            c = len(parts) + 1
            one = replace(tensors[shared[0]], fold=ONE / Scale.of(c), spread=Fraction(c))
            found |= dict.fromkeys([*shared, *parts], one)
    raise_faults("these new blocks cannot sleep", faults)
    return found


def _runs_of_new(order: Order) -> list[tuple[int | None, list[int]]]:
    """The new blocks that follow each other, by number, and the number of the block before them.

    >>> _runs_of_new((None, 0, None, None, 1))
    [(None, [0]), (1, [2, 3])]
    """
    runs: list[tuple[int | None, list[int]]] = []
    new = new_in(order)
    for number in new:
        if number - 1 in new:
            runs[-1][1].append(number)
        else:
            runs.append((number - 1 if number else None, [number]))
    return runs


def _list_of_blocks(old: Iterable[str], names: Iterable[str], order: Order) -> str:
    """The name of the list that has more blocks in the deeper model; refused unless there is exactly one, and the rest
    of the two models is equal."""
    base, deep = lists_of_blocks(old), lists_of_blocks(names)
    layers = len(order) - len(new_in(order))
    grown = [name for name, blocks in deep.items() if len(blocks) != len(base.get(name, ()))]
    fitting = [name for name in grown if (len(base.get(name, ())), len(deep[name])) == (layers, len(order))]
    if len(fitting) != 1:
        counts = [f"{name} with {len(base.get(name, ()))} and {len(deep[name])} blocks" for name in grown]
        what = f"found {', '.join(counts) or 'no list'}, expected one with {layers} and {len(order)} blocks"
        raise_faults(
            "the deeper model is not the base with more blocks in one list",
            [Fault("depth.no_single_list", "blocks", what)],
        )
    prefix = fitting[0]
    rest = [{n for n in of if not n.startswith(f"{prefix}.")} for of in (old, names)]
    faults = [
        Fault("depth.tensor_in_one_model", name, "one of the two models only")
        for name in sorted(rest[0] ^ rest[1])
    ]
    for number, tensors in deep[prefix].items():
        like = nearest(order)[number]
        if odd := sorted(tensors ^ base[prefix][like]):
            what = f"it is like block {like} of the base, and only one of the two has {odd[0]}"
            faults.append(Fault("depth.blocks_differ", f"{prefix}.{number}", what))
    raise_faults("the deeper model is not the base with more blocks in one list", faults)
    return prefix


def lists_of_blocks(names: Iterable[str]) -> dict[str, dict[int, set[str]]]:
    """Every list of blocks by name: for each block, by number, the names of its tensors in it.

    >>> lists_of_blocks(["h.0.w", "h.1.w", "head.w"])
    {'h': {0: {'w'}, 1: {'w'}}}
    """
    found: dict[str, dict[int, set[str]]] = {}
    for parts in (name.split(".") for name in names):
        for at in (i for i, word in enumerate(parts) if word.isdigit()):
            blocks = found.setdefault(".".join(parts[:at]), {})
            blocks.setdefault(int(parts[at]), set()).add(".".join(parts[at + 1 :]))
    return found


def nearest(order: Order) -> list[int]:
    """For every block the block of the base that it is, or is like: for None the one before it, or the first.

    >>> nearest((None, 0, None, 1)), nearest((0, 1, 0))
    ([0, 0, 0, 1], [0, 1, 0])
    """
    found: list[int] = []
    for block in order:
        found.append(block if block is not None else found[-1] if found else 0)
    return found


def source_of(name: str, prefix: str, order: Order) -> tuple[str, bool]:
    """The base tensor that a tensor of the deeper model is, or is like, and whether it is new.

    >>> order = (None, 0, None, 1)
    >>> [source_of(f"h.{i}.w", "h", order) for i in range(4)]
    [('h.0.w', True), ('h.0.w', False), ('h.0.w', True), ('h.1.w', False)]
    """
    if not name.startswith(f"{prefix}."):
        return name, False
    number, _, rest = name.removeprefix(f"{prefix}.").partition(".")
    return f"{prefix}.{nearest(order)[int(number)]}.{rest}", int(number) in new_in(order)
