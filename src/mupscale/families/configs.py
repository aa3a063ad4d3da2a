"""Which fields of a configuration grow, and by how much.

Knows configurations as plain nested data and the names of their fields; builds no model. `shrink.py` makes
them small, `rows.py` holds what is special about a type.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import Fault, raise_faults
from .models import Config, as_data, config_from
from .multipliers import EVERY, WIDTHS, Multipliers, multiplier
from .rows import row_for
from .symbols import evaluate, explicit_head_size, power, symbols
from .widths import USUAL

Path = tuple[str, ...]


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
    for width, names in (row.grows or USUAL).items():
        fields = [n for n in names if n not in row.keeps and _whole(data.get(n))]
        if fields:
            found[width] = fields
    return found


def edits(data: Mapping[str, Any], multipliers: Multipliers) -> dict[Path, Any]:
    """Every field that changes, by path, with its new value."""
    changed: dict[Path, Any] = {}
    for path, part in nested_configs(data):
        row = row_for(str(part.get("model_type")))
        for width, fields in growing_fields(part).items():
            k = multiplier(multipliers, width)
            for name in fields:
                if k != 1:
                    changed[(*path, name)] = _times(part[name], k)
        for name, text in row.config.items():
            k = multiplier(multipliers, "hidden")
            if k != 1 and isinstance(part.get(name), (int, float)):
                changed[(*path, name)] = part[name] * float(power(text, k))
    return changed


def with_edits(data: Mapping[str, Any], changed: Mapping[Path, Any]) -> dict[str, Any]:
    """A deep copy of plain data with some fields set."""
    new = copy.deepcopy(dict(data))
    for path, value in changed.items():
        owner = new
        for key in path[:-1]:
            owner = owner.setdefault(key, {})
        owner[path[-1]] = value
    return new


def grown(config: Config, multipliers: Multipliers) -> Config:
    """The wide configuration; raises an error that names every width that cannot grow like this."""
    data = as_data(config)
    check_growth(data, multipliers)
    return config_from(with_edits(data, edits(data, multipliers)))


def refuse_nothing(data: Mapping[str, Any], multipliers: Multipliers) -> None:
    """Raise if no width of the configuration grows."""
    if edits(data, multipliers):
        return
    have = {width for _, part in nested_configs(data) for width in growing_fields(part)}
    what = f"nothing grows; this configuration has {', '.join(sorted(have)) or 'no known width'}"
    remedy = "write -k 2, or a number above 1 for one of them" if have else ""
    raise_faults("this configuration cannot grow exactly like that", [Fault("-k", what, remedy)])


def check_growth(data: Mapping[str, Any], multipliers: Multipliers) -> None:
    """Raise unless the configuration has these widths and their growth is known to be exact."""
    faults: list[Fault] = []
    have = {width for _, part in nested_configs(data) for width in growing_fields(part)}
    faults += [
        Fault(
            width,
            f"this configuration has no such width; it has {', '.join(sorted(have)) or 'none'}",
            f"leave {width} out",
        )
        for width, k in multipliers.items()
        if width != EVERY and width not in have and k != 1
    ]
    for path, part in nested_configs(data):
        row = row_for(str(part.get("model_type")))
        where = ".".join((*path, str(part.get("model_type"))))
        # What is known not to be exact is so in attention and in the stream; feed-forward layers can grow alone.
        if any(multiplier(multipliers, width) > 1 for width in WIDTHS if width != "ffn"):
            faults += [
                Fault(where, why)
                for condition, why in row.refused.items()
                if evaluate(condition, symbols(part))
            ]
        faults += [
            Fault(where, what, remedy) for what, remedy in _together(part, multipliers, row.head_size_grows)
        ]
    raise_faults("this configuration cannot grow exactly like that", faults)


def _together(part: Mapping[str, Any], multipliers: Multipliers, free: bool) -> Iterator[tuple[str, str]]:
    names = symbols(part)
    fields = growing_fields(part)
    k = {width: multiplier(multipliers, width) if width in fields else 1 for width in WIDTHS}
    if "H" not in names or free:
        return
    if "E" in names and "heads" in fields and not explicit_head_size(part) and k["hidden"] != k["heads"]:
        yield (
            f"its head size is hidden / heads, and hidden grows by {k['hidden']}, heads by {k['heads']}",
            f"give both the same multiplier: hidden={k['hidden']},heads={k['hidden']}",
        )
    if "kv_heads" in fields and k["kv_heads"] > k["heads"]:
        yield (
            f"key heads grow by {k['kv_heads']} and query heads by {k['heads']}, so copies of a key head would serve different "
            "queries and train apart",
            f"write heads={k['kv_heads']},kv_heads={k['kv_heads']}, or leave kv_heads out",
        )
        return
    heads, kv = names["H"] * k["heads"], names["KV"] * (k["kv_heads"] if "kv_heads" in fields else k["heads"])
    if heads % kv:
        yield f"{heads} query heads cannot share {kv} key heads", "choose kv_heads so that they divide heads"


def _whole(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_whole(v) for v in value)
    return type(value) is int and value > 0


def _times(value: Any, k: int) -> Any:
    return [_times(v, k) for v in value] if isinstance(value, list) else value * k
