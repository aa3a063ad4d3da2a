"""Which fields of a configuration grow, and by how much.

Knows configurations as plain nested data and the names of their fields; builds no model. `grown.py` says which goals
are refused, `copy/shrink.py` makes configurations small, `types/rows.py` holds what is special about a type.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from ..types.rows import row_for
from ..types.symbols import power, symbols
from .fields import FIELDS, USUAL, first
from .goal import Goal

Path = tuple[str, ...]
_TEXTS = ("text_config", "llm_config", "language_config")


def nested_configs(data: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """A configuration and those nested in it, each with its path."""
    yield path, data
    for key, value in data.items():
        if isinstance(value, Mapping) and "model_type" in value:
            yield from nested_configs(value, (*path, key))


def growing_fields(data: Mapping[str, Any]) -> dict[str, list[str]]:
    """Width -> the fields of one configuration (without those nested in it) that it multiplies.

    >>> growing_fields({"model_type": "llama", "hidden_size": 64, "num_key_value_heads": None})
    {'hidden': ['hidden_size']}
    """
    row = row_for(str(data.get("model_type")))
    found = {}
    for width, names in (USUAL if row.grows is None else row.grows).items():
        fields = [n for n in names if n not in row.keeps and _whole(data.get(n))]
        if fields:
            found[width] = fields
    return found


def edits(data: Mapping[str, Any], goal: Goal) -> dict[Path, Any]:
    """Every field that changes, by path, with its new value."""
    changed: dict[Path, Any] = {}
    for path, part in nested_configs(data):
        row, own = row_for(str(part.get("model_type"))), goal.within(path)
        for width, fields in growing_fields(part).items():
            for name in fields:
                if (new := _sized(part[name], width, own)) != part[name]:
                    changed[(*path, name)] = new
        k = own.copies("hidden", symbols(part).get("E", 1))
        for name, text in row.config.items():
            if k != 1 and isinstance(part.get(name), (int, float)):
                changed[(*path, name)] = part[name] * float(power(text, k))
    return {**changed, **following(with_edits(data, changed), data)}


def following(data: Mapping[str, Any], before: Mapping[str, Any]) -> dict[Path, Any]:
    """Fields that must equal others and do not, with the value that they take; they may have been equal `before`.

    >>> def eyes(text: int, out: int) -> dict[str, object]:
    ...     return {"text_config": {"hidden_size": text}, "vision_config": {"model_type": "x", "out_hidden_size": out}}
    >>> following(eyes(128, 64), eyes(64, 64)), following(eyes(128, 32), eyes(64, 32))
    ({('vision_config', 'out_hidden_size'): 128}, {})
    """
    changed: dict[Path, Any] = {}
    for path, part in nested_configs(before):
        now, old = (_text_width(whole, path) for whole in (data, before))
        for inner, other in nested_configs(part, path) if now not in (None, old) else ():
            changed |= {(*inner, name): now for name in FIELDS["into_text"].every if other.get(name) == old}
    for path, part in nested_configs(data):
        for follower, leader in row_for(str(part.get("model_type"))).follows.items():
            value = _at(part, leader.split("."))
            if value is not None and _at(part, follower.split(".")) not in (None, value):
                changed[(*path, *follower.split("."))] = value
    return changed


def _text_width(data: Mapping[str, Any], path: Path) -> int | None:
    """The width of the text that is a part of one configuration."""
    for key in path:
        data = data.get(key) or {}
    texts = (data[name] for name in _TEXTS if isinstance(data.get(name), Mapping))
    return next((first(text, "hidden") for text in texts), None)


def _at(data: Mapping[str, Any], keys: list[str]) -> Any:
    for key in keys[:-1]:
        data = data.get(key) or {}
    return data.get(keys[-1])


def with_edits(data: Mapping[str, Any], changed: Mapping[Path, Any]) -> dict[str, Any]:
    """A deep copy of plain data with some fields set."""
    new = copy.deepcopy(dict(data))
    for path, value in changed.items():
        owner = new
        for key in path[:-1]:
            owner = owner.setdefault(key, {})
        owner[path[-1]] = value
    return new


def _whole(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_whole(v) for v in value)
    return type(value) is int and value > 0


def _sized(value: Any, width: str, goal: Goal) -> Any:
    return [_sized(v, width, goal) for v in value] if isinstance(value, list) else goal.size(width, value)
