"""Describe the tensors of a plan: one of them in detail, or all of them as a table.

Reads units and registry rows; defines no rule.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..models.names import pattern_of
from ..rules.optimizer_rule import change_for, decay_factor
from ..rules.optimizers import RULES
from ..rules.sizes import noise_size
from ..text import columns
from .tensor_plan import TensorPlan

# One optimizer per degree of the learning rate: W/G, W, and W^½ G^-½.
_SHOWN = ("torch.optim.SGD", "torch.optim.AdamW", "torch.optim.Muon")


def kind_of(tensor: TensorPlan) -> str:
    """The paper's word for a tensor: matrix-, vector- or scalar-like, or a readout."""
    roles = {axis.role for axis in tensor.axes if axis.grows} - {None}  # rows of new words have none
    if tensor.kind == "buffer":
        return "buffer"
    if not roles:
        return "scalar-like"
    return "matrix-like" if roles == {"in", "out"} else "vector-like" if roles == {"out"} else "readout"


def explain(name: str, planned: str, tensor: TensorPlan) -> str:
    """Describe one tensor: its axes, s, c, r, its noise, and the factors of optimizer settings.

    `planned` is its name in the plan, which differs from `name` if the tensor is tied.
    """
    change = tensor.change
    lines = [f"{name}: {kind_of(tensor)}, {shape(tensor.base_shape)} -> {shape(tensor.wide_shape)}"]
    if planned != name:
        lines.append(f"  tied to   {planned}")
    if tensor.sources and tensor.sources != (planned,):
        lines.append(f"  made from {', '.join(tensor.sources)}")
    if not tensor.sources:
        woken = "wakes" if tensor.sleep.wakes else "leaves"
        like = "" if tensor.like is None else f", in the group of {tensor.like}; noise {woken} it"
        lines.append(f"  new       holds {tensor.fill}{like}")
    if tensor.rows is not None:
        woken = "makes them the mean of the others" if tensor.sleep.becomes == "mean" else "leaves them"
        lines.append(f"  {tensor.rows:9} new ones are zeros at the end; noise {woken}")
    for dim, axis in enumerate(tensor.axes):
        how = ", new entries are the mean of the others" if dim in tensor.mean else ""
        lines.append(f"  axis {dim}    {axis}{how}" if axis.grows else f"  axis {dim}    {axis} (fixed)")
    if not tensor.fold.is_one:
        lines.append(f"  fold      {tensor.fold}, a constant absorbed here")
    lines.append(f"  weight    s = {change.s}")
    lines.append(f"  copies    c = {change.c}")
    lines.append(f"  gradient  r = 1/(s c) = {change.r}")
    if tensor.kind == "parameter":
        lines.append(f"  noise     std = σ̄ · {noise_size(tensor.axes, tensor.fold)}")
        lines += [f"  {line}" for line in _optimizers(tensor)]
    return "\n".join(lines)


def _optimizers(tensor: TensorPlan) -> list[str]:
    lines = []
    for name in _SHOWN:
        rule = RULES[name].row({}, len(tensor.axes))
        if rule.of_matrices and len(tensor.axes) != 2:
            continue
        change = change_for(rule, {}, tensor.change, tensor.axes)
        lr = change.factor(rule.lr)
        decay = decay_factor(rule.decay, change, lr)
        parts = [f"lr x {lr}", f"weight_decay x {decay}"]
        eps = rule.hyper.get("eps")
        if eps is not None and not isinstance(eps, tuple):
            parts.append(f"eps x {change.factor(eps)}")
        lines.append(f"{name.rpartition('.')[2]:9} {', '.join(parts)}")
    return lines


def shape(sizes: tuple[int, ...]) -> str:
    """Format sizes for a table.

    >>> shape((4, 3)), shape(())
    ('4x3', 'scalar')
    """
    return "x".join(map(str, sizes)) or "scalar"


def table(tensors: Mapping[str, TensorPlan]) -> list[str]:
    """The lines of a table with one row per kind of tensor; equal layers share a row."""
    rows: dict[tuple[str, ...], int] = {}
    for name, tensor in tensors.items():
        row = (
            pattern_of(name),
            kind_of(tensor),
            f"{shape(tensor.base_shape)} -> {shape(tensor.wide_shape)}",
            " , ".join(str(axis) for axis in tensor.axes if axis.grows) or "-",
            str(tensor.change.s),
            str(tensor.change.c),
            str(tensor.change.r),
        )
        rows[row] = rows.get(row, 0) + 1
    head = ("tensor", "kind", "shape", "axes that grow", "s", "c", "r", "n")
    body = [(*row, str(count)) for row, count in rows.items()]
    return columns([head, *body], indent=0).splitlines()
