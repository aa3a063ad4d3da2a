"""What two models hold besides tensors: settings, state, hooks and patched methods of a trained base.

A wide model that was built anew has the settings and the state of its factory. The code of the class says which is which:

    self.p = p              in __init__(self, p)    a setting: the factory's value is kept, and named where it differs
    self.seen = 0           and a method adds to it a state of training: the base's value is carried
    self.sharpness = 1.0    any other               state as well: somebody has set it after building
    self.heads = n // 64    follows the width       expected to differ

Dicts, lists, namespaces and objects of the user's classes are looked into, and so is what was set on a parameter. A tensor or an
array is carried where its shape does not follow the width, and named otherwise.

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
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from fractions import Fraction
from itertools import islice
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..arguments import shown
from ..models.class_code import Code, code_of, of_library
from ..models.names import module_paths, named_tensors, strip_wrappers, unwrap
from .arrays import Array, arrays_in, equal_arrays, numbers_of, of_width, same_form
from .block_order import base_path, moved_blocks
from .plan import Plan

Kind = Literal["expected", "carried", "kept", "refused"]

_PLAIN = (bool, int, float, complex, str, type(None), Enum, np.generic)
_SEQUENCES = (tuple, list, set, frozenset, deque)
_ELSEWHERE = (nn.Module, nn.Parameter, RemovableHandle)
"""What is looked at elsewhere, wherever it is held: a plan carries modules and parameters, and hooks are compared as hooks."""
_BLOCKS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# What nn.Module keeps for itself; parameters, buffers and the training mode are carried elsewhere. transformers notes that
# its hooks which record outputs are there, and puts them in place at the first call of a model without this note.
CHECKPOINTING, CHECKPOINT = "gradient_checkpointing", "_gradient_checkpointing_func"
"""The flag of transformers' gradient checkpointing, and the function that a module with this flag calls."""
_OWN = {*vars(nn.Module()), "training", "_output_capturing_hooks_installed", CHECKPOINTING, CHECKPOINT}
_TOLERANCE = 1e-6
"""Relative: width constants are computed in float32 in some models."""
_DEPTH = 4
"""How far objects inside objects are followed; a model that refers to itself ends here."""
_MANY = 100
"""Differences inside one list or dict from which it is data, which is compared and carried as a whole: no configuration of two widths
differs in so many entries."""
_LONGEST = 80
"""Characters of a dict or a list that a provenance repeats."""
_NOTHING: Any = type("Nothing", (), {"__repr__": lambda _: "nothing"})()


@dataclass(frozen=True)
class AttributeDifference:
    """An attribute of one module that differs between base and wide."""

    path: str
    """Module path and attribute: "layers.0.norm.eps", "counts['seen']"."""
    base: Any
    wide: Any
    kind: Kind
    """Expected (it follows the width), carried (the base's value replaces the wide one's), kept (a setting of the
    factory of the wide model, or an object that cannot be copied), or refused (code, or a tensor that follows the width)."""
    module: str = ""
    """The path of its module."""
    keys: tuple[Any, ...] = ()
    """The attribute, and where inside its value the difference is."""
    matters: bool = False
    """A setting that is kept and may change training: a number or a flag, not a name."""


def compare_attributes(
    base: nn.Module, wide: nn.Module, plan: Plan | None = None
) -> list[AttributeDifference]:
    """Every plain value, tensor attribute, hook and patched method in which the two models differ, by module.

    In a deeper model blocks have moved: `plan` says from where. A new block is compared with nothing.
    """
    base, wide = unwrap(base), unwrap(wide)
    # Of a wrapper and what it wraps, which share a path, the latter.
    modules, others = (dict(module_paths(model)) for model in (base, wide))
    look = _Look(_Sizes.of(base, wide), {id(t) for model in (base, wide) for _, _, t in named_tensors(model)})
    moved = {} if plan is None else moved_blocks(plan)
    found: list[AttributeDifference] = []
    for path, module in others.items():
        source = base_path(path, moved)
        if source in modules:
            numbers = [[int(word) for word in text.split(".") if word.isdigit()] for text in (source, path)]
            renumbered = [(a, b) for a, b in zip(*numbers, strict=True) if a != b]
            differences = _attributes(path, modules[source], module, look)
            # A block that knows its number has another one where it has moved.
            found += [d for d in differences if type(d.base) is not int or (d.base, d.wide) not in renumbered]
            found += _hooks(path, modules[source], module)
    return found


def both_values(difference: AttributeDifference) -> str:
    """An attribute that differs, in words."""
    if isinstance(difference.base, Array) and same_form(difference.base, difference.wide):
        return "other values in the base than in the wide model"
    values = (
        v if difference.kind == "refused" and isinstance(v, str) else _shown(v)
        for v in (difference.base, difference.wide)
    )
    return "{} in the base, {} in the wide model".format(*values)


def plain_value(value: Any) -> Any:
    """A value as JSON can store it: itself, or what it is."""
    if isinstance(value, (dict, list, tuple, set, deque)):
        short = len(value) <= _LONGEST and not any(True for _ in arrays_in(value))
        return repr(value) if short and len(repr(value)) <= _LONGEST else shown(value)
    if isinstance(value, Array):
        return _shown(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else shown(value)


def carry_attributes_(wide: nn.Module, differences: list[AttributeDifference]) -> None:
    """Give the wide model the base's value of every difference that is carried.

    >>> base, wide = nn.Module(), nn.Module()
    >>> base.seen, wide.seen = {"words": 5}, {"words": 0}
    >>> carry_attributes_(wide, compare_attributes(base, wide))
    >>> wide.seen
    {'words': 5}
    """
    owners = dict(module_paths(wide))
    made: dict[int, Any] = {}  # what two modules of the base share, two modules of the wide model share
    for difference in differences:
        if difference.kind == "carried":
            holder: Any = owners[difference.module]
            for key in difference.keys[:-1]:
                holder = holder[key] if isinstance(holder, (dict, list)) else getattr(holder, key)
            leaf, value = difference.keys[-1], _copied(difference.base, made)
            if isinstance(holder, (dict, list)):
                holder[leaf] = value
            else:
                with suppress(
                    AttributeError, TypeError, ValueError
                ):  # a frozen object, which stays the factory's
                    setattr(holder, leaf, value)


def _copied(value: Any, made: dict[int, Any]) -> Any:
    if isinstance(value, torch.Generator) and id(value) not in made:
        made[id(value)] = value.clone_state()
    for array in arrays_in(value):
        if (
            isinstance(array, Tensor) and array.grad_fn is not None
        ):  # a value of a forward, which deepcopy refuses
            made.setdefault(id(array), array.detach().clone())
    return copy.deepcopy(value, made)


@dataclass(frozen=True)
class _Sizes:
    """What grows between two models."""

    ratios: tuple[float, ...]
    """The growth ratios of all axes, as logarithms."""
    grow: bool
    """Whether an axis grows: they shrink when a run is narrowed."""
    widths: frozenset[int]
    """The lengths in the base of the axes that change."""
    depths: frozenset[tuple[int, int]]
    """The lengths of lists of blocks in the base and in the wide model."""

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
        lists = [
            {path: len(m) for path, m in module_paths(model) if isinstance(m, _BLOCKS)}
            for model in (base, wide)
        ]
        return cls(
            tuple(math.log(ratio) for ratio in ratios),
            any(b > a for a, b in grown),
            frozenset(a for a, _ in grown),
            frozenset((n, lists[1][name]) for name, n in lists[0].items() if name in lists[1]),
        )

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


@dataclass
class _Look:
    """What one comparison of two models knows and has seen."""

    sizes: _Sizes
    own: set[int]
    """The ids of weights and buffers, which a plan carries."""
    seen: set[tuple[int, int]] = field(default_factory=set)
    codes: dict[type, Code] = field(default_factory=dict)

    def code(self, kind: type) -> Code:
        if kind not in self.codes:
            self.codes[kind] = code_of(kind)
        return self.codes[kind]


class _Leaf(NamedTuple):
    """A value that differs: the keys that lead to it, both values, and the class of the object that holds it."""

    keys: tuple[Any, ...]
    base: Any
    wide: Any
    owner: type


def _attributes(path: str, base: nn.Module, wide: nn.Module, look: _Look) -> Iterator[AttributeDifference]:
    mine, other = ({**_slots(m), **vars(m)} for m in (base, wide))
    for key in sorted({*mine, *other} - _OWN):
        if callable(getattr(type(base), key, None)):
            here, there = (key in vars(m) and not of_library(vars(m)[key]) for m in (base, wide))
            if here != there:
                words = {True: "patched on this object", False: "of its class"}
                where = f"{path}.{key}" if path else key
                yield AttributeDifference(where, words[here], words[there], "refused", path, (key,))
            continue
        leaves = _leaves(mine.get(key, _NOTHING), other.get(key, _NOTHING), (key,), type(base), look)
        yield from (_difference(path, leaf, type(base), look) for leaf in leaves)
    for name, parameter in base._parameters.items():
        marks, others = ({} if p is None else vars(p) for p in (parameter, wide._parameters.get(name)))
        for key in sorted(marks):
            if not key.startswith("_"):  # notes of libraries, made anew
                leaves = _leaves(marks[key], others.get(key, _NOTHING), (name, key), type(base), look)
                found = (_difference(path, leaf, type(base), look) for leaf in leaves)
                # Nothing but the training loop reads it, which a proof does not run.
                yield from (replace(d, kind="kept") if d.kind == "refused" else d for d in found)


def _difference(path: str, leaf: _Leaf, kind: type, look: _Look) -> AttributeDifference:
    keys, a, b, owner = leaf
    inside = "".join(f"[{k!r}]" if isinstance(k, int) else f".{k}" for k in keys)[1:]
    code = look.code(kind)
    if owner is not kind:
        own = look.code(owner)
        code = replace(code, counted=code.counted | own.counted, assigned=code.assigned | own.assigned)
    fate, matters = _kind(code, keys, a, b, look.sizes)
    a, b = (None if v is _NOTHING else v for v in (a, b))
    return AttributeDifference(f"{path}.{inside}" if path else inside, a, b, fate, path, keys, matters)


def _kind(code: Code, keys: tuple[Any, ...], a: Any, b: Any, sizes: _Sizes) -> tuple[Kind, bool]:
    """What becomes of a value that differs, and, if it is a setting that is kept, whether it may change training."""
    if a is _NOTHING:  # the factory of the wide model set it, and the base never had it
        return "expected", False
    both = b is not _NOTHING
    if not _is_data(a):
        return "kept", False
    if isinstance(a, Array) and isinstance(b, Array) and not same_form(a, b):
        return "refused", False
    if not isinstance(b, Array) and of_width(a, sizes.widths):
        return "refused", False
    a, b = numbers_of(a), numbers_of(b)
    names = {key for key in keys if isinstance(key, str)}
    if all(isinstance(v, (tuple, list, deque)) for v in (a, b)) and len(a) != len(b):
        return _kind_of_length(code, keys, a, b, sizes)
    sized = both and _may_be_sizes(a, b) and not _permuted(a, b)
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


def _kind_of_length(code: Code, keys: tuple[Any, ...], a: Any, b: Any, sizes: _Sizes) -> tuple[Kind, bool]:
    """What becomes of a list that has another length in the wide model."""
    if set(keys) & (code.counted | code.assigned):
        return "carried", False
    if keys[0] in code.settings:
        return "kept", len(keys) == 1
    begun = _begins(a, b) or _begins(b, a)  # entries were added or taken away
    if (len(a), len(b)) in sizes.depths or sizes.follows(len(a), len(b)):
        return ("kept" if begun else "expected"), False
    return ("carried" if begun or not _may_be_size(a) else "expected"), False


def _leaves(a: Any, b: Any, keys: tuple[Any, ...], owner: type, look: _Look) -> Iterator[_Leaf]:
    """Values that differ inside two values, with the keys that lead there; each pair of objects once."""
    if a is b or (id(a), id(b)) in look.seen or _equal_at_once(a, b):
        return
    whole = _Leaf(keys, a, b, owner)
    if isinstance(a, Array) or isinstance(b, Array):
        if id(a) not in look.own and not isinstance(a, nn.Parameter) and not equal_arrays(a, b):
            yield whole
        return
    if _plain(a) or a is _NOTHING:
        if ((_plain(b) or b is _NOTHING) and not _same(a, b)) or (
            a is not _NOTHING and a is not None and _inside(b) is not None
        ):
            yield whole
        return
    if (states := [_random_state(v) for v in (a, b)])[0] is not None:
        if states[0] != states[1]:
            yield whole
        return
    held, others = _inside(a), _inside(b)
    if held is None or len(keys) > _DEPTH or all(isinstance(v, _ELSEWHERE) for v in held.values()):
        return
    ordered = isinstance(a, (tuple, list, deque))
    if others is None or type(a) is not type(b) or (ordered and (len(a) != len(b) or _permuted(a, b))):
        if others is not None or b is _NOTHING or _plain(b):
            yield whole
        return
    look.seen.add((id(a), id(b)))
    found = _leaves_inside(held, others, whole, look)
    first = list(islice(found, _MANY + 1))
    if first and (isinstance(a, (tuple, deque)) or (isinstance(a, (list, dict)) and len(first) > _MANY)):
        yield whole
    else:
        yield from first
        yield from found


def _leaves_inside(
    held: Mapping[Any, Any], others: Mapping[Any, Any], whole: _Leaf, look: _Look
) -> Iterator[_Leaf]:
    container = isinstance(whole.base, (dict, list, tuple, deque))
    owner = whole.owner if container else type(whole.base)
    written = look.code(owner).counted | look.code(owner).assigned
    for key in {**held, **others}:
        if container or not str(key).startswith("_") or key in written:
            keys = (*whole.keys, key)
            yield from _leaves(held.get(key, _NOTHING), others.get(key, _NOTHING), keys, owner, look)


def _equal_at_once(a: Any, b: Any) -> bool:
    """True for equal lists, tuples and dicts, compared at once: a model may hold a long list of words."""
    if type(a) is not type(b) or not isinstance(a, (list, tuple, dict)):
        return False
    try:
        return bool(a == b)
    except (RuntimeError, TypeError, ValueError):  # arrays and tensors among them
        return False


def _inside(value: Any) -> Mapping[Any, Any] | None:
    """What a dict, a list, a tuple or an object of a user's class holds; None for what is not looked into."""
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    kind = type(value)
    if isinstance(value, (SimpleNamespace, Namespace)):
        return vars(value)
    held = {**_slots(value), **getattr(value, "__dict__", {})}
    if isinstance(value, (nn.Module, Tensor, type)) or callable(value) or not held:
        return None
    if kind.__module__.split(".")[0] in sys.stdlib_module_names - {"__main__"} or of_library(kind):
        return None
    if getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        return None
    return held


def _slots(value: Any) -> dict[str, Any]:
    """What an object holds in `__slots__` of its class and of the parents of that."""
    found = {}
    for parent in type(value).__mro__:
        slots = vars(parent).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _is_data(value: Any) -> bool:
    """True for what can be copied: numbers, words, tensors that are no weights, sources of random numbers, and lists of these."""
    if isinstance(value, dict):
        return all(map(_is_data, value.values()))
    if isinstance(value, _SEQUENCES):
        return all(map(_is_data, value))
    if isinstance(value, Array):
        return not isinstance(value, nn.Parameter)
    return isinstance(value, _PLAIN) or _random_state(value) is not None


def _random_state(value: Any) -> Any:
    """The state of a source of random numbers, to compare; None for anything else."""
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, random.Random):
        return value.getstate()
    if type(value).__module__.startswith("numpy.random"):
        return repr(getattr(value, "bit_generator", value).state)
    return None


def _hooks(path: str, base: nn.Module, wide: nn.Module) -> Iterator[AttributeDifference]:
    """Hooks that one of the models has more of; a hook holds code, so it is never copied."""
    for key in HOOKS:
        held = [vars(m).get(key) for m in (base, wide)]
        counts = [
            sum(not of_library(h) for h in hooks.values()) if isinstance(hooks, Mapping) else 0
            for hooks in held
        ]
        if counts[0] != counts[1]:
            where = f"{path}.{key}" if path else key
            yield AttributeDifference(
                where, f"{counts[0]} hooks", f"{counts[1]} hooks", "refused", path, (key,)
            )


def _plain(value: Any) -> bool:
    if isinstance(value, _SEQUENCES):
        return all(map(_plain, value))
    return isinstance(value, _PLAIN)


def _same(a: Any, b: Any) -> bool:
    """Equal, and of the same type: a list that became a tuple counts as changed, 1 and 1.0 do not."""
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return bool(a == b) and isinstance(a, _SEQUENCES) == isinstance(b, _SEQUENCES)


def _permuted(a: Any, b: Any) -> bool:
    """True for two lists that hold the same in another order."""
    if not isinstance(a, list) or not isinstance(b, list) or len(a) != len(b):
        return False
    return (
        not any(True for _ in arrays_in(a)) and _is_data(a) and Counter(map(repr, a)) == Counter(map(repr, b))
    )


def _begins(a: Any, b: Any) -> bool:
    """True if the entries of one list are the first or the last of a longer one."""
    a, b = list(a), list(b)
    return len(a) < len(b) and any(_equal_at_once(a, part) for part in (b[: len(a)], b[len(b) - len(a) :]))


def _may_be_sizes(a: Any, b: Any) -> bool:
    """True if two values differ in a whole number that is not zero."""
    if all(isinstance(v, (tuple, list)) for v in (a, b)) and len(a) == len(b):
        return any(not _same(x, y) and _may_be_sizes(x, y) for x, y in zip(a, b, strict=True))
    return _may_be_size(a) and _may_be_size(b)


def _may_be_size(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_may_be_size, value))
    return isinstance(value, int) and not isinstance(value, bool) and value != 0


def _shown(value: Any) -> str:
    if not isinstance(value, Array):
        return shown(value)
    return f"{'a tensor' if isinstance(value, Tensor) else 'an array'} of shape {tuple(value.shape)}"
