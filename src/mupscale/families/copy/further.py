"""A still smaller copy, where the one that keeps all blocks is too large to be tested: more fields are divided, on trial.

Nothing is known of these fields but that the copy builds, grows along the same dimensions and has fewer parameters. One of
them may decide the size of a block, and `lift` keeps the blocks of the copy. So there is a second copy, in which all of them
are twice as large: a plan from the first one is good only if it is exact there when it is lifted by the rule that brings
it to the full size.

A field that is called `width_of_block` here is 128 in the full model and 8 in the copy:

    copy      2 blocks of  8 rows    the search finds "2x2 * 8"
    second    2 blocks of 16 rows    lifted: "4x2 * 8", which mixes rows of a block: the gradients differ, so it is refused
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...errors import MupscaleError
from ..config.fields import FIELDS
from ..config.nested import Path, following, growing_fields, nested_configs, with_edits
from ..types.symbols import explicit_head_size, symbols

_DIVISORS = (16, 8, 4, 2)
_LEAST = 8  # units that are left: a norm over fewer channels is badly conditioned
_KEPT = ("heads", "kv_heads", "head_dim", "layers", "stages", "words", "positions", "experts", "top_k")
_KEPT_TOO = ("groups", "top_groups", "token", "other_list")
_Data = dict[str, Any]


def further(
    data: Mapping[str, Any],
    keeps: Callable[[_Data], bool],
    size: Callable[[_Data], int],
    enough: int,
) -> tuple[_Data, _Data | None]:
    """The data with more of its fields divided, larger ones first, and the data with those fields twice as large.

    `keeps` says whether a trial is still a copy of the model, `size` how large it is; nothing more is divided once that is
    `enough`. The second one is None where no field could be divided.

    >>> found = further({"width": 64, "depth": 3, "tokens": 7}, lambda trial: True, lambda trial: trial["width"], 20)
    >>> found
    ({'width': 8, 'depth': 3, 'tokens': 7}, {'width': 16, 'depth': 3, 'tokens': 7})
    """
    now, before, taken = dict(data), size(dict(data)), dict[Path, Any]()
    for together in _together(data):
        if before <= enough:
            break
        if taken.keys() & set(together):
            continue
        for edits in _edits(now, together):
            trial = with_edits(now, edits)
            trial = with_edits(trial, following(trial, now))
            try:
                less = size(trial)
            except MupscaleError:
                continue
            if less >= before:
                break  # it says nothing about sizes
            if keeps(trial):
                now, before = trial, less
                taken |= {path: edits[path] for path in together}
                break
    return now, _twice(now, taken) if taken else None


def numbers(value: Any) -> list[int]:
    """A number, or the numbers of a list."""
    return value if isinstance(value, list) else [value]


def divided(value: Any, by: int, kept: int = 0) -> Any:
    """A number, or every number of a list behind those that are kept, divided by one that divides it."""
    if not isinstance(value, list):
        return value // by
    return [*value[:kept], *(v // by for v in value[kept:])]


def _twice(data: Mapping[str, Any], taken: Mapping[Path, Any]) -> _Data:
    """The data with the fields that were taken twice as large."""
    edits = {path: [2 * v for v in new] if isinstance(new, list) else 2 * new for path, new in taken.items()}
    trial = with_edits(data, edits)
    return with_edits(trial, following(trial, data))


def _edits(data: Mapping[str, Any], together: tuple[Path, ...]) -> Iterator[dict[Path, Any]]:
    """Edits that divide some fields by one number, the smallest result first; heads keep a size that can be written."""
    values = {path: _value(data, path) for path in together}
    every = [v for value in values.values() for v in numbers(value)]
    if all(
        _is_stages(path[-1], values[path]) for path in together
    ):  # one layer for each stage, and two in the second copy
        yield {path: [1 for _ in value] for path, value in values.items()}
        return
    for by in _DIVISORS:
        if all(v % by == 0 and v // by >= _LEAST for v in every):
            yield _head_sizes(data, together) | {path: divided(value, by) for path, value in values.items()}


def _head_sizes(data: Mapping[str, Any], together: tuple[Path, ...]) -> dict[Path, Any]:
    """The sizes of heads, written out where they would follow from a stream that is divided."""
    found: dict[Path, Any] = {}
    for *path, name in together:
        part = _value(data, tuple(path))
        if name in growing_fields(part).get("hidden", ()) and not explicit_head_size(part):
            found |= {
                (*path, "head_dim"): size for size in [symbols(part).get("D")] if size and "head_dim" in part
            }
    return found


def _together(data: Mapping[str, Any]) -> list[tuple[Path, ...]]:
    """Fields to divide: layers of stages first, then the largest; each one alone, and with those that have the same value."""
    values = {
        (*path, name): part[name]
        for path, part in nested_configs(data)
        for name in part
        if _is_size(name, part[name]) or _is_stages(name, part[name])
    }
    alone = sorted(
        values, key=lambda path: (not _is_stages(path[-1], values[path]), -max(numbers(values[path])))
    )
    found = list[tuple[Path, ...]]()
    for path in alone:
        equal = tuple(other for other in alone if values[other] == values[path])
        near = tuple(other for other in equal if other[:-1] == path[:-1])
        found += dict.fromkeys(((path,), near, equal))
    return list(dict.fromkeys(found))


def _is_size(name: str, value: Any) -> bool:
    """Whether a field may be divided: whole numbers from 8 on that are no heads, layers, words or ids of them."""
    known = any(FIELDS[meaning].has(name) for meaning in (*_KEPT, *_KEPT_TOO))
    whole = bool(numbers(value)) and all(type(v) is int and v >= _LEAST for v in numbers(value))
    return whole and not known


def _is_stages(name: str, value: Any) -> bool:
    """Whether a field says how many layers each stage has."""
    return FIELDS["stages"].has(name) and isinstance(value, list) and all(type(v) is int for v in value)


def _value(data: Mapping[str, Any], path: Path) -> Any:
    for key in path:
        data = data[key]
    return data
