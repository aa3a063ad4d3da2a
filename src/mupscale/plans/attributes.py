"""What two models hold beside tensors: settings, state, hooks and patched methods of a trained base.

A wide model that was built anew has the settings and the state of its factory. The code of the class says which is which:

    self.p = p              in __init__(self, p)    a setting: the factory's value is kept, and named where it differs
    self.seen = 0           and a method adds to it a state of training: the base's value is carried
    self.sharpness = 1.0    any other               state as well: somebody has set it after building
    self.heads = n // 64    follows the width       expected to differ

Dicts, lists, namespaces and objects of the user's classes are looked into.

>>> base, wide = nn.Dropout(0.1), nn.Dropout(0.3)
>>> base.seen = {"words": 5}
>>> [(d.path, d.base, d.wide, d.kind) for d in compare_attributes(base, wide)]
[('p', 0.1, 0.3, 'kept'), ('seen', {'words': 5}, None, 'carried')]
"""

from __future__ import annotations

import copy
import math
import random
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..arguments import shown
from ..models.class_code import Code, code_of, of_library
from ..models.names import module_paths, strip_wrappers, unwrap
from .block_order import base_path, moved_blocks
from .plan import Plan

Kind = Literal["expected", "carried", "kept", "refused"]

_PLAIN = (bool, int, float, complex, str, type(None), Enum)
_SEQUENCES = (tuple, list, set, frozenset, deque)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
# What nn.Module keeps for itself; parameters, buffers and the training mode are carried elsewhere. transformers notes that
# its hooks which record outputs are there, and puts them in place at the first call of a model without this note. Its gradient
# checkpointing is switched on by a call that also sets functions, so the flag alone is not carried.
_OWN = {*vars(nn.Module()), "training", "_output_capturing_hooks_installed", "gradient_checkpointing"}
_TOLERANCE = 1e-6
"""Relative: width constants are computed in float32 in some models."""
_DEPTH = 4
"""How far objects inside objects are followed; a model that refers to itself ends here."""
_LONGEST = 80
"""Characters of a dict or a list that a provenance repeats."""
_NOTHING: Any = type("Nothing", (), {"__repr__": lambda _: "nothing"})()


@dataclass(frozen=True)
class Difference:
    """An attribute of one module that differs between base and wide."""

    path: str
    """Module path and attribute: "layers.0.norm.eps", "counts['seen']"."""
    base: Any
    wide: Any
    kind: Kind
    """Expected (it follows the width), carried (the base's value replaces the wide one's), kept (a setting of the
    factory of the wide model), or refused (code, or a tensor)."""
    module: str = ""
    """The path of its module."""
    keys: tuple[Any, ...] = ()
    """The attribute, and where inside its value the difference is."""
    matters: bool = False
    """A setting that is kept and may change training: a number or a flag, not a name."""


def compare_attributes(base: nn.Module, wide: nn.Module, plan: Plan | None = None) -> list[Difference]:
    """Every plain value, tensor attribute, hook and patched method in which the two models differ, by module.

    In a deeper model blocks have moved: `plan` says from where. A new block is compared with nothing.
    """
    base, wide = unwrap(base), unwrap(wide)
    sizes = _Sizes.of(base, wide)
    # Of a wrapper and what it wraps, which share a path, the latter.
    modules, others = (dict(module_paths(model)) for model in (base, wide))
    moved = {} if plan is None else moved_blocks(plan)
    found: list[Difference] = []
    seen: set[tuple[int, int]] = set()
    kinds: set[Any] = {type(module) for module in modules.values()}
    codes = {kind: code_of(kind) for kind in kinds}
    for path, module in others.items():
        source = base_path(path, moved)
        if source in modules:
            numbers = [[int(word) for word in text.split(".") if word.isdigit()] for text in (source, path)]
            renumbered = [(a, b) for a, b in zip(*numbers, strict=True) if a != b]
            differences = _attributes(
                path, modules[source], module, codes[type(modules[source])], sizes, seen
            )
            # A block that knows its number has another one where it has moved.
            found += [d for d in differences if (d.base, d.wide) not in renumbered]
            found += _hooks(path, modules[source], module)
    return found


def both_values(difference: Difference) -> str:
    """An attribute that differs, in words."""
    values = (v if difference.kind == "refused" else shown(v) for v in (difference.base, difference.wide))
    return "{} in the base, {} in the wide model".format(*values)


def plain_value(value: Any) -> Any:
    """A value as JSON can store it: itself, or what it is."""
    if isinstance(value, (dict, list, tuple, set, deque)):
        return repr(value) if len(repr(value)) <= _LONGEST else shown(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else shown(value)


def carry_attributes_(wide: nn.Module, differences: list[Difference]) -> None:
    """Give the wide model the base's value of every difference that is carried.

    >>> base, wide = nn.Module(), nn.Module()
    >>> base.seen, wide.seen = {"words": 5}, {"words": 0}
    >>> carry_attributes_(wide, compare_attributes(base, wide))
    >>> wide.seen
    {'words': 5}
    """
    owners = dict(module_paths(wide))
    made: dict[
        int, Any
    ] = {}  # what two modules of the base share, a generator for example, two modules of the wide model share
    for difference in differences:
        if difference.kind == "carried":
            holder: Any = owners[difference.module]
            for key in difference.keys[:-1]:
                holder = holder[key] if isinstance(holder, (dict, list)) else getattr(holder, key)
            leaf, found = difference.keys[-1], difference.base
            value = made.setdefault(id(found), _copied(found)) if id(found) not in made else made[id(found)]
            if isinstance(holder, list) and leaf >= len(holder):
                holder.append(value)
            elif isinstance(holder, (dict, list)):
                holder[leaf] = value
            else:
                with suppress(
                    AttributeError, TypeError, ValueError
                ):  # a frozen object, which stays the factory's
                    setattr(holder, leaf, value)


def _copied(value: Any) -> Any:
    return value.clone_state() if isinstance(value, torch.Generator) else copy.deepcopy(value)


@dataclass(frozen=True)
class _Sizes:
    """What grows between two models."""

    ratios: tuple[float, ...]
    """The growth ratios of all axes, as logarithms."""
    grow: bool
    """Whether an axis grows: they shrink when a run is narrowed."""

    @classmethod
    def of(cls, base: nn.Module, wide: nn.Module) -> _Sizes:
        shapes = {strip_wrappers(name): tensor.shape for name, tensor in wide.named_parameters()}
        grown = {
            (a, b)
            for name, tensor in base.named_parameters()
            for a, b in zip(tensor.shape, shapes.get(strip_wrappers(name), tensor.shape), strict=False)
            if a and b and a != b
        }
        ratios = {Fraction(b, a) for a, b in grown}
        return cls(tuple(math.log(ratio) for ratio in ratios), any(b > a for a, b in grown))

    def follows(self, a: Any, b: Any) -> bool:
        """True if b is a times a power of a growth ratio, in quarters, for numbers and for each entry of a sequence."""
        if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
            return len(a) == len(b) and all(
                _same(x, y) or self.follows(x, y) for x, y in zip(a, b, strict=True)
            )
        numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (a, b))
        if not numbers or not a or not b or (a > 0) != (b > 0):
            return False
        change = math.log(b / a)
        # Up to the square: a number of entries of a matrix.
        powers = (j / 4 * ratio for ratio in self.ratios for j in range(-8, 9) if j)
        return any(abs(change - power) <= _TOLERANCE for power in powers)

    def went_back(self, a: Any, b: Any) -> bool:
        """True for a whole number that is smaller in the wide model, as a count is that begins again."""
        return self.grow and isinstance(a, int) and isinstance(b, int) and b < a


def _attributes(
    path: str, base: nn.Module, wide: nn.Module, code: Code, sizes: _Sizes, seen: set[tuple[int, int]]
) -> Iterator[Difference]:
    mine, other = vars(base), vars(wide)
    for key in sorted({*mine, *other} - _OWN):
        where = f"{path}.{key}" if path else key
        a, b = mine.get(key, _NOTHING), other.get(key, _NOTHING)
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            same = isinstance(a, Tensor) and isinstance(b, Tensor) and _equal(a, b)
            if not same:
                yield Difference(where, _shown(a), _shown(b), "refused", path, (key,))
        elif callable(getattr(type(base), key, None)):
            here, there = (key in vars(m) and not of_library(vars(m)[key]) for m in (base, wide))
            if here != there:
                words = {True: "patched on this object", False: "of its class"}
                yield Difference(where, words[here], words[there], "refused", path, (key,))
        else:
            for keys, x, y in _leaves(a, b, (key,), seen):
                inside = "".join(f"[{k!r}]" if isinstance(k, int) else f".{k}" for k in keys[1:])
                kind, matters = _kind(code, keys, x, y, sizes)
                x, y = (None if v is _NOTHING else v for v in (x, y))
                yield Difference(f"{where}{inside}", x, y, kind, path, keys, matters)


def _kind(code: Code, keys: tuple[Any, ...], a: Any, b: Any, sizes: _Sizes) -> tuple[Kind, bool]:
    """What becomes of a value that differs, and, if it is a setting that is kept, whether it may change training."""
    if a is _NOTHING:  # the factory of the wide model set it, and the base never had it
        return "expected", False
    names = {key for key in keys if isinstance(key, str)}
    both = b is not _NOTHING
    sized = both and _may_be_size(a) and _may_be_size(b)
    # A size that is added up while a model is built is larger in the wide model; a count that begins again is not.
    if names & code.counted and not (sized and not sizes.went_back(a, b)):
        return "carried", False
    follows = both and not (code.torchs and isinstance(a, float)) and sizes.follows(a, b)
    if names & code.assigned and (not follows or sizes.went_back(a, b)):
        return "carried", False
    if follows:
        return "expected", False
    # Whole numbers that are not zero may be sizes that grow in another way than axes do, such as width + 3.
    if sized:
        return ("kept", True) if sizes.went_back(a, b) else ("expected", False)
    if keys[0] in code.settings:
        named = isinstance(a, str) or isinstance(b, str) or len(keys) > 1
        return ("kept", code.torchs or not named) if both else ("expected", False)
    # Names and paths inside of a configuration that no method writes are the factory's, whose object it may be.
    named = isinstance(a, str) and isinstance(b, str) and len(keys) > 1
    return ("kept", False) if named else ("carried", False)


def _leaves(
    a: Any, b: Any, keys: tuple[Any, ...], seen: set[tuple[int, int]]
) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Plain values that differ inside two values, with the keys that lead there; each pair of objects once."""
    if a is b or (id(a), id(b)) in seen or _equal_at_once(a, b):
        return
    if _plain(a) or a is _NOTHING:
        if ((_plain(b) or b is _NOTHING) and not _same(a, b)) or (
            a is not _NOTHING and a is not None and _inside(b) is not None
        ):
            yield keys, a, b
        return
    if (states := [_random_state(v) for v in (a, b)])[0] is not None:
        if states[0] != states[1]:
            yield keys, a, b
        return
    held, others = _inside(a), _inside(b)
    if held is None or len(keys) > _DEPTH:
        return
    if others is None or type(a) is not type(b):
        if (b is _NOTHING or _plain(b)) and type(a) is dict and held and all(map(_plain, held.values())):
            yield keys, a, b
        return
    seen.add((id(a), id(b)))
    hidden = not isinstance(a, (dict, list))
    for key in {**held, **others}:
        if not (hidden and str(key).startswith("_")):
            yield from _leaves(held.get(key, _NOTHING), others.get(key, _NOTHING), (*keys, key), seen)


def _equal_at_once(a: Any, b: Any) -> bool:
    """True for equal lists, tuples and dicts, compared at once: a model may hold a long list of words."""
    if type(a) is not type(b) or not isinstance(a, (list, tuple, dict)):
        return False
    try:
        return bool(a == b)
    except (RuntimeError, TypeError, ValueError):  # arrays and tensors among them
        return False


def _inside(value: Any) -> Mapping[Any, Any] | None:
    """What a dict, a list or an object of a user's class holds; None for what is not looked into."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list):
        return dict(enumerate(value))
    kind = type(value)
    if isinstance(value, (SimpleNamespace, Namespace)):
        return vars(value)
    if isinstance(value, (nn.Module, Tensor, type)) or not hasattr(value, "__dict__"):
        return None
    if kind.__module__.split(".")[0] in sys.stdlib_module_names - {"__main__"} or of_library(kind):
        return None
    if getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        return None
    return dict(vars(value))


def _random_state(value: Any) -> Any:
    """The state of a source of random numbers, to compare; None for anything else."""
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, random.Random):
        return value.getstate()
    if type(value).__module__.startswith("numpy.random"):
        return repr(getattr(value, "bit_generator", value).state)
    return None


def _hooks(path: str, base: nn.Module, wide: nn.Module) -> Iterator[Difference]:
    """Hooks that one of the models has more of; a hook holds code, so it is never copied."""
    for key in _HOOKS:
        held = [vars(m).get(key) for m in (base, wide)]
        counts = [
            sum(not of_library(h) for h in hooks.values()) if isinstance(hooks, Mapping) else 0
            for hooks in held
        ]
        if counts[0] != counts[1]:
            where = f"{path}.{key}" if path else key
            yield Difference(where, f"{counts[0]} hooks", f"{counts[1]} hooks", "refused", path, (key,))


def _plain(value: Any) -> bool:
    if isinstance(value, _SEQUENCES):
        return all(map(_plain, value))
    return isinstance(value, _PLAIN)


def _same(a: Any, b: Any) -> bool:
    """Equal, and of the same type: a list that became a tuple counts as changed, 1 and 1.0 do not."""
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return bool(a == b) and isinstance(a, _SEQUENCES) == isinstance(b, _SEQUENCES)


def _may_be_size(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_may_be_size, value))
    return isinstance(value, int) and not isinstance(value, bool) and value != 0


def _equal(a: Tensor, b: Tensor) -> bool:
    known = not (a.is_meta or b.is_meta)
    return a.shape == b.shape and a.dtype == b.dtype and (not known or bool(torch.equal(a.cpu(), b.cpu())))


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
