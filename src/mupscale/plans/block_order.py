"""Where the blocks of a deeper model come from, by the names of its tensors: what belongs to a module moves with its block."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from .plan import Plan

Moved = Mapping[str, str | None]
"""Block of the wide model -> the block of the base that it is, or None for a new one; blocks that did not move are left out."""


def moved_blocks(plan: Plan) -> Moved:
    """The blocks of the wide model that are new, or have another number than in the base.

    >>> from mupscale.plans import TensorPlan
    >>> from mupscale.rules import Axis
    >>> new, old = TensorPlan((), (Axis.fixed(1),), like="h.0.w"), TensorPlan(("h.0.w",), (Axis.fixed(1),))
    >>> moved_blocks(Plan({"h.0.w": new, "h.1.w": old}))
    {'h.1': 'h.0', 'h.0': None}
    """
    found: dict[str, str | None] = {}
    for name, tensor in plan.tensors.items():
        origin = tensor.like if tensor.new else tensor.sources[0] if len(tensor.sources) == 1 else None
        at = None if origin is None else _other_number(name.split("."), origin.split("."))
        if at is not None and origin is not None:
            block, old = (".".join(text.split(".")[: at + 1]) for text in (name, origin))
            found[block] = None if tensor.new else old
    lists = {block.rpartition(".")[0] for block in found}
    # A block of which something comes from the base is not new, whatever else it gets.
    kept = {
        block for name, tensor in plan.tensors.items() if tensor.sources for block in _blocks(name, lists)
    }
    for name in (name for name, tensor in plan.tensors.items() if tensor.new):
        found.update(dict.fromkeys(block for block in _blocks(name, lists) if block not in kept))
    return found


def new_blocks(plan: Plan) -> dict[str, str]:
    """The new blocks of the wide model, each with the block of the base that it is like.

    >>> from mupscale.plans import TensorPlan
    >>> from mupscale.rules import Axis
    >>> new_blocks(Plan({"h.1.w": TensorPlan((), (Axis.fixed(1),), like="h.0.w", repeats=True)}))
    {'h.1': 'h.0'}
    """
    found: dict[str, str] = {}
    for name, like in ((name, tensor.like) for name, tensor in plan.tensors.items() if tensor.repeats):
        at = None if like is None else _other_number(name.split("."), like.split("."))
        if at is not None and like is not None:
            block, old = (".".join(text.split(".")[: at + 1]) for text in (name, like))
            found[block] = old
    return found


def _blocks(name: str, lists: Collection[str]) -> Iterator[str]:
    """The blocks of these lists that a tensor is in."""
    parts = name.split(".")
    yield from (".".join(parts[: i + 1]) for i in range(1, len(parts)) if ".".join(parts[:i]) in lists)


def base_path(path: str, moved: Moved) -> str | None:
    """The path in the base of a module of the wide model; None if it is in a new block.

    >>> [base_path(path, {"h.1": "h.0", "h.0": None}) for path in ("h.1.mlp", "h.0.mlp", "head")]
    ['h.0.mlp', None, 'head']
    """
    parts = path.split(".")
    for i in range(len(parts), 0, -1):
        block = ".".join(parts[:i])
        if block in moved:
            old = moved[block]
            return None if old is None else ".".join([old, *parts[i:]])
    return path


def in_wide_order(names: Sequence[str], base: Sequence[str], plan: Plan) -> list[str]:
    """Names of the wide model, of which `base` are the origins in the base's order, in the order of the wide model.

    Optimizers are saved by position, so the new blocks must stand where the wide model has them. The base's order is kept
    where no block moved, and where its order is not that of its blocks.

    >>> from mupscale.plans import TensorPlan
    >>> from mupscale.rules import Axis
    >>> entry = {"sources": ("h.0.a",)}, {"sources": ("h.0.b",)}, {"sources": (), "like": "h.0.a"}, {"sources": (), "like": "h.0.b"}
    >>> plan = Plan(dict(zip(["h.0.a", "h.0.b", "h.1.a", "h.1.b"], [TensorPlan(axes=(Axis.fixed(1),), **e) for e in entry])))
    >>> in_wide_order(["h.0.a", "h.1.a", "h.0.b", "h.1.b"], ["h.0.a", "h.0.b"], plan)
    ['h.0.a', 'h.0.b', 'h.1.a', 'h.1.b']
    """
    lists = {block.rpartition(".")[0] for block in moved_blocks(plan)}
    if len(lists) != 1:
        return list(names)
    prefix = f"{lists.pop()}."
    inside = [name for name in base if name.startswith(prefix)]
    ranks: dict[str, int] = {}
    for name in inside:
        ranks.setdefault(name.removeprefix(prefix).partition(".")[2], len(ranks))
    places = {name: i for i, name in enumerate(base)}

    def key(name: str, origin: str) -> tuple[int, int, int]:
        number, _, rest = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and number.isdigit():
            return places[inside[0]], int(number), ranks.get(rest, len(ranks))
        return places[origin], 0, 0

    if not inside or sorted(base, key=lambda name: key(name, name)) != list(base):
        return list(names)
    origins = {n: t.like or (t.sources[0] if t.sources else n) for n, t in plan.tensors.items()}
    return sorted(names, key=lambda name: key(name, origins[name]))


def _other_number(name: list[str], origin: list[str]) -> int | None:
    """Where two names have different numbers and are equal otherwise; None if that is not so.

    >>> _other_number(["h", "2", "w"], ["h", "1", "w"]), _other_number(["a", "w"], ["b", "w"])
    (1, None)
    """
    if len(name) != len(origin):
        return None
    differ = [i for i, (a, b) in enumerate(zip(name, origin, strict=True)) if a != b]
    numbers = len(differ) == 1 and name[differ[0]].isdigit() and origin[differ[0]].isdigit()
    return differ[0] if numbers else None
