"""What two models hold beside tensors: numbers, flags and hooks that a trained base has and a new wide model has not.

A model that was built again has the settings of its factory. A setting that was changed after building (the eps of a
norm, an annealed weight) must be carried, one that follows the width (a head size, 1/sqrt(d)) must not.

>>> base, wide = nn.BatchNorm1d(4), nn.BatchNorm1d(8)
>>> base.eps = 0.1
>>> [(d.path, d.base, d.wide, d.kind) for d in compare_attributes(base, wide)]
[('eps', 0.1, 1e-05, 'carried'), ('num_features', 4, 8, 'expected')]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .moved_blocks import base_path, moved_blocks
from .names import strip_wrappers, unwrap
from .plan import Plan

Kind = Literal["expected", "carried", "refused"]

_PLAIN = (bool, int, float, complex, str, type(None))
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
# What nn.Module keeps for itself; parameters, buffers and the training mode are carried elsewhere. transformers notes that
# its hooks which record outputs are there, and puts them in place at the first call of a model without this note.
_OWN = {*vars(nn.Module()), "training", "_output_capturing_hooks_installed"}
_TOLERANCE = 1e-6
"""Relative: width constants are computed in float32 in some models."""


@dataclass(frozen=True)
class Difference:
    """An attribute of one module that differs between base and wide."""

    path: str
    """Module path and attribute: "layers.0.norm.eps"."""
    base: Any
    wide: Any
    kind: Kind
    """Expected (it follows the width), carried (the base's value replaces the wide one's), or refused."""


def compare_attributes(base: nn.Module, wide: nn.Module, plan: Plan | None = None) -> list[Difference]:
    """Every plain attribute, tensor attribute and hook in which the two models differ, in the order of modules.

    In a deeper model blocks have moved: `plan` says from where. A new block is compared with nothing.
    """
    base, wide = unwrap(base), unwrap(wide)
    ratios = _ratios(base, wide)
    modules = {_path(name): module for name, module in base.named_modules()}
    moved = {} if plan is None else moved_blocks(plan)
    found: list[Difference] = []
    for name, module in wide.named_modules():
        path = _path(name)
        source = base_path(path, moved)
        if source in modules:
            numbers = [[int(word) for word in text.split(".") if word.isdigit()] for text in (source, path)]
            renumbered = [(a, b) for a, b in zip(*numbers, strict=True) if a != b]
            differences = _attributes(path, modules[source], module, ratios)
            # A block that knows its number has another one where it has moved.
            found += [d for d in differences if (d.base, d.wide) not in renumbered]
            found += _hooks(path, modules[source], module)
    return found


def carry_attributes_(wide: nn.Module, differences: list[Difference]) -> None:
    """Give the wide model the base's value of every difference that is carried.

    >>> base, wide = nn.LayerNorm(4), nn.LayerNorm(8)
    >>> base.eps = 0.1
    >>> carry_attributes_(wide, compare_attributes(base, wide))
    >>> wide.eps, wide.normalized_shape
    (0.1, (8,))
    """
    owners = {_path(name): module for name, module in unwrap(wide).named_modules()}
    for difference in differences:
        if difference.kind == "carried":
            path, _, leaf = difference.path.rpartition(".")
            setattr(owners[path], leaf, difference.base)


def _path(name: str) -> str:
    return strip_wrappers(f"{name}.").rstrip(".")


def _ratios(base: nn.Module, wide: nn.Module) -> list[float]:
    """The growth ratios of all axes, as logarithms."""
    shapes = {_path(name): tensor.shape for name, tensor in wide.named_parameters()}
    found = set()
    for name, tensor in base.named_parameters():
        goal = shapes.get(_path(name), tensor.shape)
        found |= {Fraction(b, a) for a, b in zip(tensor.shape, goal, strict=False) if a and b > a}
    return [math.log(ratio) for ratio in found]


def _attributes(path: str, base: nn.Module, wide: nn.Module, ratios: list[float]) -> Iterator[Difference]:
    mine, other = vars(base), vars(wide)
    for key in sorted({*mine, *other} - _OWN):
        where = f"{path}.{key}" if path else key
        a, b = mine.get(key), other.get(key)
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            same = isinstance(a, Tensor) and isinstance(b, Tensor) and _equal(a, b)
            if not same:
                yield Difference(where, _shown(a), _shown(b), "refused")
        elif _plain(a) and _plain(b) and not _same(a, b):
            # What only the wide model has was set by its factory, and the base never had it. Whole numbers that are
            # not zero may be sizes that grow in another way than axes do, such as width + 3.
            sizes = _may_be_size(a) and _may_be_size(b)
            follows = key not in mine or sizes or (key in other and _follows(a, b, ratios))
            yield Difference(where, a, b, "expected" if follows else "carried")


def _hooks(path: str, base: nn.Module, wide: nn.Module) -> Iterator[Difference]:
    """Hooks that one of the models has more of; a hook holds code, so it is never copied."""
    for key in _HOOKS:
        counts = [len(hooks) if isinstance(hooks := vars(m).get(key), Mapping) else 0 for m in (base, wide)]
        if counts[0] != counts[1]:
            where = f"{path}.{key}" if path else key
            yield Difference(where, f"{counts[0]} hooks", f"{counts[1]} hooks", "refused")


def _plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_plain, value))
    return isinstance(value, _PLAIN)


def _same(a: Any, b: Any) -> bool:
    """Equal, and of the same type: a list that became a tuple counts as changed, 1 and 1.0 do not."""
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return bool(a == b) and isinstance(a, (tuple, list)) == isinstance(b, (tuple, list))


def _may_be_size(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_may_be_size, value))
    return isinstance(value, int) and not isinstance(value, bool) and value != 0


def _follows(a: Any, b: Any, ratios: list[float]) -> bool:
    """True if b is a times a power of a growth ratio, in quarters, for numbers and for each entry of a sequence."""
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(
            _same(x, y) or _follows(x, y, ratios) for x, y in zip(a, b, strict=True)
        )
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (a, b))
    if not numbers or not a or not b or (a > 0) != (b > 0):
        return False
    change = math.log(b / a)
    # Up to the square: a number of entries of a matrix.
    powers = (j / 4 * ratio for ratio in ratios for j in range(-8, 9) if j)
    return any(abs(change - power) <= _TOLERANCE for power in powers)


def _equal(a: Tensor, b: Tensor) -> bool:
    known = not (a.is_meta or b.is_meta)
    return a.shape == b.shape and a.dtype == b.dtype and (not known or bool(torch.equal(a.cpu(), b.cpu())))


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
