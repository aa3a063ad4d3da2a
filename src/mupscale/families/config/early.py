"""What config.json alone says about a goal: refusals that come at once, before torch is imported and anything is planned.

What it does not refuse, or cannot read, the planner looks at in full.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from ...errors import Fault, MupscaleError, raise_faults
from ...files.strict import parse_json, read_regular
from ...storage.location import Location
from .checks import check_growth, not_more_rows
from .fields import FIELDS
from .goal import Goal
from .multipliers import NOTHING, counted, parse_to
from .nested import growing_fields, nested_configs

ANY_SIZE = ("llama", "mistral", "qwen2", "qwen3", "gemma2")
"""Types whose widths were grown by one half, by new units and by copies; the nightly tests do it again."""
_NAME = "config.json"
_DECIDED = (
    "goal.heads_outgrow_kv_heads",
    "goal.key_heads_left_behind",
    "goal.kv_heads_not_a_divisor",
    "goal.kv_heads_outgrow_heads",
    "goal.size_not_larger",
)
"""Refusals of fields that are there: a class that has defaults for others refuses the same."""


def refuse_gguf(base: Location) -> None:
    """Raise for weights in GGUF, which hold nothing that could be trained."""
    if not isinstance(base, Path):
        return
    inside = [path.suffix for path in base.iterdir()] if base.is_dir() else []
    if base.suffix == ".gguf" or (".gguf" in inside and ".safetensors" not in inside):
        what = "weights in GGUF, which are quantised for inference and cannot be trained"
        remedy = "name the directory of safetensors that they were converted from"
        raise MupscaleError(
            "this checkpoint cannot be grown", [Fault("directory.is_gguf", str(base), what, remedy)]
        )


def refuse_fewer_layers(base: Location, to: str | None) -> None:
    """Raise where `--to` names no more layers than the one field of the configuration that counts them."""
    data = _config(base)
    counts = {data[key] for key in data if FIELDS["layers"].has(key) and type(data[key]) is int}
    asked = 0 if to is None else parse_to(to).layers
    if not asked or len(counts) != 1 or isinstance(data.get("text_config"), Mapping):
        return
    layers = counts.pop()
    if asked <= layers:
        what = f"{layers} -> {asked}: a model grows deeper"
        fault = Fault("depth.not_deeper", "layers", what, f"write a number above {layers}")
        raise MupscaleError("this model cannot grow like that", [fault])


def refuse_fewer_rows(base: Location, to: str | None) -> None:
    """Raise where `--to` names no more words or positions than the one field of the configuration that counts them."""
    asked = NOTHING if to is None else parse_to(to)
    faults = []
    for rows, key, text in (
        ("words", "vocab", asked.vocab),
        ("positions", "positions", str(asked.positions)),
    ):
        counts = [
            part[name]
            for _, part in nested_configs(_config(base))
            for name in FIELDS[rows].grows
            if type(part.get(name)) is int
        ]
        if text in ("", "0") or len(counts) != 1 or counted(text, counts[0]) > counts[0]:
            continue
        faults.append(not_more_rows(rows, key, counts[0], counted(text, counts[0])))
    raise_faults("this model cannot grow like that", faults)


def refuse_goal(base: Location, goal: Goal) -> None:
    """Raise for sizes and heads that are refused whatever the fields are that config.json leaves to a default."""
    data = _config(base)
    try:
        if data:
            check_growth(data, goal)
    except MupscaleError as error:
        raise_faults(error.claim, [fault for fault in error.faults if fault.code in _DECIDED])
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return  # the planner says what is wrong with the configuration


def refuse_fraction(base: Location, k: str) -> None:
    """Raise for `-k 1.5`, and show the sizes that it means where every width stays whole."""
    if re.fullmatch(r"\d+\.\d+", k):
        sizes = sizes_for(base, k)
        what = f"{k}, expected a whole number: copies come whole"
        remedy = "write 2, 3, …" if sizes is None else f"write {sizes}"
        fault = Fault("goal.not_a_multiplier", "-k", what, remedy)
        raise MupscaleError("the multipliers cannot be read", [fault])


def sizes_for(base: Location, k: str) -> str | None:
    """The options that grow every width by a factor with a fraction.

    None where a width would not stay whole, where config.json leaves a size to a default, and for types that were not tried: a
    norm that subtracts a mean, for example, cannot have zeros.

    >>> import json, tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    ...     config |= {"intermediate_size": 176}
    ...     _ = (Path(name) / "config.json").write_text(json.dumps(config))
    ...     sizes_for(Path(name), "1.5"), sizes_for(Path(name), "1.1")
    ('--hidden 96 --heads 6 --kv-heads 3 --ffn 264', None)
    """
    data, times = _config(base), Fraction(k)
    grows = growing_fields(data)
    if data.get("model_type") not in ANY_SIZE or "kv_heads" not in grows or times <= 1:
        return None
    found = []
    for width, fields in grows.items():
        values = {data[name] for name in fields}
        size = values.pop() * times if values and all(type(value) is int for value in values) else None
        if values or size is None or size.denominator != 1:
            return None
        found.append(f"--{width.replace('_', '-')} {size}")
    return " ".join(found) or None


def _config(base: Location) -> dict[str, Any]:
    """What config.json says, and nothing where it cannot be read without a store."""
    if not isinstance(base, Path):
        return {}
    try:
        data = parse_json(read_regular(base / _NAME if base.is_dir() else base), _NAME)
    except MupscaleError:
        return {}
    return data if isinstance(data, dict) and "model_type" in data else {}
