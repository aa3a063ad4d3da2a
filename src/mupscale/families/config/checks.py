"""Which goals a configuration refuses, and what can be asked for instead.

Knows configurations as plain data; needs no torch. Remedies are spelled as `-k` and `--to`, which a command line may spell as
the options of single parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from ...errors import Fault, raise_faults
from ..types.rows import row_for
from ..types.symbols import evaluate, explicit_head_size, symbols
from .fields import EXPERTS, WIDTHS
from .goal import Goal
from .multipliers import TOWERS
from .nested import Path, edits, expert_fields, growing_fields, nested_configs

CLAIM = "this configuration cannot grow exactly like that"
_COUNTED = {"hidden": "E", "heads": "H", "kv_heads": "KV"}


def refuse_nothing(data: Mapping[str, Any], goal: Goal) -> None:
    """Raise if no width of the configuration grows."""
    if edits(data, goal):
        return
    have = {width for _, part in nested_configs(data) for width in growing_fields(part)}
    what = f"nothing grows; this configuration has {', '.join(sorted(have)) or 'no known width'}"
    remedy = "write -k 2, or a number above 1 for one of them" if have else ""
    raise_faults(CLAIM, [Fault("goal.nothing_grows", "-k", what, remedy)])


def check_growth(data: Mapping[str, Any], goal: Goal) -> None:
    """Raise unless the configuration has these widths and their growth is known to be exact."""
    parts = [(path, part, growing_fields(part)) for path, part in nested_configs(data)]
    have = {width for _, _, fields in parts for width in fields}
    have |= {EXPERTS for _, part, _ in parts if expert_fields(part)}
    growing = [*(width for width, k in goal.k.items() if width in (*WIDTHS, EXPERTS) and k != 1), *goal.sizes]
    faults = [*_no_tower(goal, [path for path, _, _ in parts])]
    faults += [
        Fault(
            "goal.width_not_in_config",
            width,
            f"this configuration has no such width; it has {', '.join(sorted(have)) or 'none'}",
            f"leave {width} out",
        )
        for width in growing
        if width not in have and width != "head_dim"
    ]
    faults += _one_size(goal, parts)
    for path, part, fields in parts:
        row = row_for(str(part.get("model_type")))
        where = ".".join((*path, str(part.get("model_type"))))
        # What is known not to be exact is so in attention and in the stream; feed-forward layers can grow alone.
        others = {(name,) for width in fields if width != "ffn" for name in fields[width]}
        own = goal.within(path)
        if others & edits(part, own).keys():
            faults += [
                Fault(code, where, why)
                for condition, (code, why) in row.refused.items()
                if evaluate(condition, symbols(part))
            ]
        faults += [Fault(code, where, what, remedy) for code, what, remedy in _head_size(part, own)]
        if not row.head_size_grows:
            faults += [Fault(code, where, what, remedy) for code, what, remedy in _together(part, own)]
    raise_faults(CLAIM, faults)


def not_more_rows(rows: str, key: str, now: int, new: int) -> Fault:
    """The fault of a table that gets no more words or positions."""
    what = f"{now} -> {new}: growing only adds {rows}"
    return Fault("goal.size_not_larger", f"--to {key}", what, f"write a number above {now}")


def _no_tower(goal: Goal, paths: list[Path]) -> Iterator[Fault]:
    """A fault for each tower that `-k` names and the configuration does not have."""
    have = [tower for tower in TOWERS if any(f"{tower}_config" in path for path in paths)]
    for tower in (tower for tower in TOWERS if tower in goal.k and tower not in have):
        what = f"this configuration has no {tower} tower; it has {', '.join(have) or 'none'}"
        yield Fault(
            "goal.tower_not_in_config",
            tower,
            what,
            f"leave {tower} out; a number without a name is for every width",
        )


def _one_size(
    goal: Goal, parts: list[tuple[Any, Mapping[str, Any], dict[str, list[str]]]]
) -> Iterator[Fault]:
    """A size can be named where the configuration has the width once, and only to grow it."""
    for width in goal.sizes:
        found = {name: part[name] for _, part, fields in parts for name in fields.get(width, ())}
        inside = [".".join(path) for path, _, fields in parts if path and width in fields]
        if inside:
            what = f"it is a width of {', '.join(inside)}, and --to names sizes of a model without parts"
            yield Fault("goal.width_of_a_part", width, what, f"write -k {width}=2")
            continue
        several = len({str(value) for value in found.values()}) > 1
        if several or any(isinstance(value, list) for value in found.values()):
            listed = ", ".join(f"{name} = {value}" for name, value in found.items())
            yield Fault(
                "goal.several_sizes",
                width,
                f"it has several sizes here ({listed}), and --to names one",
                f"write -k {width}=2",
            )
        elif any(goal.size(width, value) < value for value in found.values()):
            (now,) = set(found.values())
            what = f"{now} -> {goal.size(width, now)}: growing only adds units"
            yield Fault("goal.size_not_larger", width, what, f"write a size above {now}")


def _head_size(part: Mapping[str, Any], goal: Goal) -> Iterator[tuple[str, str, str]]:
    """The size of a head stays."""
    now, new = symbols(part).get("D"), goal.sizes.get("head_dim")
    if new is not None and now is not None:
        what = f"head_dim {now} -> {new}: rotary frequencies depend on it"
        yield "goal.head_size_grows", what, "add heads instead"


def _together(part: Mapping[str, Any], goal: Goal) -> Iterator[tuple[str, str, str]]:
    """Hidden size and heads, and key heads and query heads, where one decides the other."""
    names, fields = symbols(part), growing_fields(part)
    if "H" not in names:
        return
    known = {width: key for width, key in _COUNTED.items() if key in names}
    size = {w: goal.size(w, names[key]) if w in fields else names[key] for w, key in known.items()}
    growth = {width: Fraction(size[width], names[key]) for width, key in known.items()}
    implicit = "E" in names and "heads" in fields and not explicit_head_size(part)
    if implicit and growth["hidden"] != growth["heads"]:
        most = max(growth["hidden"], growth["heads"])
        both = _spelled(goal, {width: (names[known[width]], most) for width in ("hidden", "heads")})
        yield (
            "goal.hidden_unlike_heads",
            f"its head size is hidden / heads, and hidden grows by {growth['hidden']}, heads by {growth['heads']}",
            f"give both the same multiplier{both and f': {both}'}",
        )
    if "kv_heads" in fields:
        yield from _key_heads(names, goal, size, growth)


def _key_heads(
    names: Mapping[str, Any], goal: Goal, size: Mapping[str, int], growth: Mapping[str, Fraction]
) -> Iterator[tuple[str, str, str]]:
    """Key heads and query heads."""
    heads, kv, group = size["heads"], size["kv_heads"], names["G"]
    if growth["kv_heads"] > growth["heads"]:
        pair = _pair(names, goal, growth["kv_heads"])
        yield (
            "goal.kv_heads_outgrow_heads",
            f"kv_heads {names['KV']} -> {kv} with heads {heads}: copies of a key head would serve different queries: "
            "outputs stay, training does not",
            f"write {pair}, or leave kv_heads out",
        )
    elif growth["heads"] > growth["kv_heads"] and group == 1 and growth.get("hidden", 1) > 1:
        yield (
            "goal.key_heads_left_behind",
            f"heads {names['H']} -> {heads} with kv_heads {kv}: every query head has its own key and value head, and would share it",
            f"write {_pair(names, goal, growth['heads'])}",
        )
    elif growth["heads"] > growth["kv_heads"] and {growth[w].denominator for w in ("heads", "kv_heads")} != {
        1
    }:
        with_keys = f"{_pair(names, goal, growth['heads'])}, or " if group and heads % group == 0 else ""
        yield (
            "goal.heads_outgrow_kv_heads",
            f"heads {names['H']} -> {heads} with kv_heads {kv}: a new query head on a trained key head cannot sleep",
            f"write {with_keys}--to heads={-(-heads // names['H']) * names['H']}",
        )
    elif heads % kv:
        what = f"{heads} query heads cannot share {kv} key heads"
        yield "goal.kv_heads_not_a_divisor", what, "choose kv_heads so that they divide heads"


def _pair(names: Mapping[str, Any], goal: Goal, growth: Fraction) -> str:
    """Query heads and key heads that grow alike."""
    return _spelled(goal, {"heads": (names["H"], growth), "kv_heads": (names["KV"], growth)})


def _spelled(goal: Goal, wanted: Mapping[str, tuple[int, Fraction]]) -> str:
    """Widths, each with its size and its growth, as the goal spells them; nothing where a size would not be whole.

    >>> heads = {"heads": (4, Fraction(3, 2)), "kv_heads": (2, Fraction(3, 2))}
    >>> _spelled(Goal.parse(1, "kv_heads=3"), heads), _spelled(Goal.parse(2), {"heads": (4, Fraction(2))})
    ('--to heads=6,kv_heads=3', '-k heads=2')
    """
    if any((now * growth).denominator != 1 for now, growth in wanted.values()):
        return ""
    if goal.sizes:
        return "--to " + ",".join(f"{width}={now * growth}" for width, (now, growth) in wanted.items())
    return "-k " + ",".join(f"{width}={growth}" for width, (_, growth) in wanted.items())
