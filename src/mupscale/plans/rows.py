"""A plan for more words or positions: the tables get rows at their end that are zero, and nothing else changes.

The rows that the base has keep their weights and their optimizer state. A new word is a row of the embedding that no text
of the base reads, and a logit that a loss over the base's words does not count. So no gradient reaches its rows, and the
base's run continues to the last bit. A loss over all words is another loss: with Z the sum of exp(logit) over the base's
words at a position, n new words with logits 0 raise it there by log(1 + n/Z).

Worked example, 512 words that become 576, tied: `embed_tokens.weight` has the axes "512+64" and "64", and `lm_head.weight`
is the same tensor. At a position with Z = 10,000 the loss over all words rises by log(1 + 64/10,000) = 0.0064.

Awake, a new word is the mean of the base's words, for two reasons. Its logit is then the mean logit, so that by Jensen's
inequality the loss over all words rises by log(1 + n/V) at most, where zeros have no bound: logits of a trained model may
all be far below 0. And a norm divides a row of zeros by the root of its eps, so that the first gradient of a word that is
zero is far too large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from torch import Tensor, nn

from ..errors import Fault, raise_faults
from ..models.names import Kind, named_tensors, unique_tensors
from ..rules.axes import Axis
from ..rules.products import Factor
from .plan import Plan
from .tensor_plan import Rows, TensorPlan


def row_plan(base: nn.Module, more: nn.Module, rows: Rows, added: int) -> Plan:
    """The plan from a model to one with `added` more words or positions, both of one width; nothing has proved it yet.

    >>> plan = row_plan(nn.Embedding(5, 2), nn.Embedding(8, 2), "words", 3)
    >>> [str(axis) for axis in plan["weight"].axes], plan["weight"].rows
    (['5+3', '2'], 'words')
    """
    old = {name: tensor for name, _, tensor in named_tensors(base)}
    tensors: dict[str, TensorPlan] = {}
    faults: list[Fault] = []
    new, ties = unique_tensors(more)
    for name, (kind, tensor) in new.items():
        if (entry := _entry(name, kind, tensor, old, rows, added)) is None:
            before = tuple(old[name].shape) if name in old else "no such tensor"
            what = f"{before} in the base, {tuple(tensor.shape)} with {added} more {rows}"
            faults.append(
                Fault("model.not_just_rows", name, f"{what}, expected {added} more along one dimension")
            )
        else:
            tensors[name] = entry
    faults += [
        Fault("model.tensor_only_in_base", name, "in the base only")
        for name in old
        if name not in tensors and name not in ties
    ]
    raise_faults(f"more {rows} change this model otherwise than by rows of its tables", faults[:4])
    return Plan(tensors, ties)


def _entry(
    name: str, kind: Kind, tensor: Tensor, old: Mapping[str, Tensor], rows: Rows, added: int
) -> TensorPlan | None:
    """How one tensor is made; None if it differs from the base's by anything else than added rows."""
    if name not in old or old[name].dim() != tensor.dim():
        return None
    pairs = list(zip(old[name].shape, tensor.shape, strict=True))
    grown = [dim for dim, (a, b) in enumerate(pairs) if a != b]
    axes = tuple(Axis.of((Factor(a, Fraction(1), b - a),)) for a, b in pairs) if _adds(pairs) else ()
    if not grown:
        return TensorPlan((name,), axes, kind=kind)
    if kind == "buffer" and axes and (len(grown) > 1 or not tensor.is_floating_point()):
        # Numbers of positions, masks: the model computes them from its size.
        return TensorPlan((name,), axes, kind=kind, fill="own", rows=rows)
    table = axes and [b - a for a, b in pairs if a != b] == [added] and (kind == "buffer" or grown == [0])
    cut = () if rows == "words" else tuple(grown)
    return TensorPlan((name,), axes, kind=kind, rows=rows, cut=cut) if table else None


def _adds(pairs: Sequence[tuple[int, int]]) -> bool:
    return all(a <= b for a, b in pairs)


def without_rows(entry: TensorPlan) -> TensorPlan:
    """The entry of a plan that begins where the new rows are there already.

    >>> entry = row_plan(nn.Embedding(5, 2), nn.Embedding(8, 2), "positions", 3)["weight"]
    >>> [str(axis) for axis in without_rows(entry).axes], entry.cut, without_rows(entry).cut
    (['8', '2'], (0,), ())
    """
    added = [d for d, axis in enumerate(entry.axes) if entry.rows and axis.grows and axis.role is None]
    axes = tuple(Axis.fixed(axis.wide) if d in added else axis for d, axis in enumerate(entry.axes))
    return replace(entry, axes=axes, cut=tuple(d for d in entry.cut if d not in added), rows=None)


def old_words(plan: Plan) -> tuple[int, int] | None:
    """How many words the base of a plan has, and how many the wide model; None where both have the same.

    >>> old_words(row_plan(nn.Embedding(5, 2), nn.Embedding(8, 2), "words", 3)), old_words(Plan({}))
    ((5, 8), None)
    """
    for entry in plan.tensors.values():
        if entry.rows == "words" and entry.kind == "parameter":
            return entry.axes[0].base, entry.axes[0].wide
    return None
