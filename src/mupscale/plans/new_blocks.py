"""A plan for a deeper model: its blocks are the base's in order, with new ones between them that sleep.

A new block is zero, but for the gains of its norms. It passes its input on, and no gradient reaches its weights,
because every path through it has two weights that are zero. So the deeper run is the base's run until noise wakes the
block: all weights get noise then, except those that write into the stream, which are quiet. They learn in the first
step, and everything else from the second step on.

Worked example, two blocks that become four with order (0, None, 1, None): block 0 stays, block 1 is new and like
block 0, block 2 is the base's block 1, and block 3 is new and like the base's block 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from ..errors import Fault, MupscaleError, raise_faults
from ..rules.axes import Axis
from .names import named_tensors, pattern_of
from .plan import Kind, Plan, TensorPlan
from .tensor_plan import Fill

Order = tuple[int | None, ...]
"""For every block of the deeper model the block of the base that it is, or None for a new one."""


def order_of(layers: int, deeper: int, after: Sequence[int] | None = None) -> Order:
    """Where new blocks go: behind the blocks `after`, or evenly spread.

    >>> order_of(2, 4), order_of(4, 6), order_of(2, 3, after=[0])
    ((0, None, 1, None), (0, 1, None, 2, 3, None), (0, None, 1))
    """
    new = deeper - layers
    if new < 1:
        raise MupscaleError(
            f"layers {layers} -> {deeper}: a model grows deeper; write a number above {layers}"
        )
    # Spread evenly: the j-th of n new blocks stands behind the first j · layers / n blocks of the base.
    places = [(j * layers + new - 1) // new - 1 for j in range(1, new + 1)] if after is None else list(after)
    if len(places) != new or any(not 0 <= place < layers for place in places):
        raise MupscaleError(
            f"after={':'.join(map(str, places))}: expected {new} blocks of the base, numbered 0 to {layers - 1}, behind "
            "which the new ones go"
        )
    return tuple(block for i in range(layers) for block in (i, *[None for place in places if place == i]))


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


def block_plan(
    base: nn.Module,
    deeper: nn.Module,
    order: Order,
    values: Mapping[str, Fill],
    quiet: Sequence[str],
    silenced: Mapping[str, Fill],
) -> Plan:
    """The plan from a model to one with new blocks, both of one width; nothing has proved it yet.

    - `values` are what new vectors hold, by name pattern; other new tensors are zero.
    - `quiet` are patterns of the tensors that write into the stream.
    - `silenced` are patterns of gains behind a branch, and what silences them: zero, or -1 where they are used as (1 + w).
    """
    old = {name: (kind, tensor) for name, kind, tensor in named_tensors(base)}
    prefix = _list_of_blocks(old, deeper, order)
    tensors: dict[str, TensorPlan] = {}
    ties: dict[str, str] = {}
    first: dict[int, str] = {}
    odd: list[Fault] = []
    for name, kind, tensor in named_tensors(deeper):
        if (owner := first.setdefault(id(tensor), name)) != name:
            ties[name] = owner
            continue
        axes = tuple(map(Axis.fixed, tensor.shape))
        kind_: Kind = "buffer" if kind == "buffer" else "parameter"
        source, new = _source(name, prefix, order)
        if not new:
            tensors[name] = TensorPlan((source,), axes, kind=kind_)
        elif kind_ == "buffer":
            tensors[name] = TensorPlan((), axes, kind=kind_, fill="own")
        else:
            if source not in old or tuple(old[source][1].shape) != tuple(tensor.shape):
                odd.append(Fault(name, f"new, and {source}, which it would be like, is not of its kind"))
                continue
            off = next((fill for pattern, fill in silenced.items() if fnmatchcase(name, pattern)), None)
            tensors[name] = TensorPlan(
                (),
                axes,
                fill=off if off else values.get(pattern_of(name), "zero"),
                like=source,
                quiet=any(fnmatchcase(name, pattern) for pattern in quiet),
            )
    raise_faults("the new blocks are not like those before them", odd[:4])
    return Plan(tensors, ties)


def _list_of_blocks(old: Mapping[str, tuple[str, Tensor]], deeper: nn.Module, order: Order) -> str:
    """The name of the list that has more blocks in the deeper model; refused unless there is exactly one."""
    names = [name for name, _, _ in named_tensors(deeper)]
    layers = sum(block is not None for block in order)
    grown: dict[str, set[int]] = {}
    odd = [name for name in old if name not in names]
    for name in (n for n in names if n not in old):
        parts = name.split(".")
        at = next((i for i, word in enumerate(parts) if word.isdigit() and int(word) >= layers), None)
        if at is None:
            odd.append(name)
        else:
            grown.setdefault(".".join(parts[:at]), set()).add(int(parts[at]))
    if len(grown) != 1:
        found = ", ".join(grown) or "no list"
        odd.append(f"blocks: {found}, expected one list that has {len(order)} blocks in place of {layers}")
    faults = [Fault(name, "one of the two models only") for name in odd]
    raise_faults("the deeper model is not the base with more blocks in one list", faults)
    return next(iter(grown))


def _source(name: str, prefix: str, order: Order) -> tuple[str, bool]:
    """The base tensor that a tensor of the deeper model is, or is like, and whether it is new.

    >>> order = (None, 0, None, 1)
    >>> [_source(f"h.{i}.w", "h", order) for i in range(4)]
    [('h.0.w', True), ('h.0.w', False), ('h.0.w', True), ('h.1.w', False)]
    """
    if not name.startswith(f"{prefix}."):
        return name, False
    number, _, rest = name.removeprefix(f"{prefix}.").partition(".")
    block = order[int(number)]
    before = [b for b in order[: int(number) + 1] if b is not None]
    like = block if block is not None else before[-1] if before else 0
    return f"{prefix}.{like}.{rest}", block is None
