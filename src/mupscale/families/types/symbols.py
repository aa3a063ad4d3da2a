"""Short expressions about a configuration: "G*D", "heads*D: G*D | 2*kv*D: D", "multi_query and not alibi".

Rows of the registry are written in them, once for all sizes. Knows integer arithmetic, comparisons and the
names of a configuration's fields; evaluates nothing else.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from ...errors import MupscaleError
from ...rules.axes import Layout
from ...rules.scale import Scale
from ..config.fields import FIELDS, first, first_of
from .rows import row_for

# What an expression may use. There are no calls, attributes or subscripts, so it cannot run code.
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
}


def symbols(data: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of a configuration, and short names: E hidden size, H heads, KV key heads, D head size, G = H/KV.

    >>> found = symbols({"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2})
    >>> found["D"], found["G"]
    (8, 4)
    """
    found = dict(data)
    named = (row_for(str(data.get("model_type"))).grows or {}).get("hidden", ())
    hidden, heads = first_of(data, (*named, *FIELDS["hidden"].main)), first(data, "heads")
    if hidden:
        found["E"] = hidden
    if heads:
        found["H"] = heads
        found["KV"] = first(data, "kv_heads") or heads
        found["G"] = heads // found["KV"]
        size = first(data, "head_dim")
        if size is None and hidden is not None:
            size = hidden // heads
        if size is not None:
            found["D"] = size
    return found


def explicit_head_size(data: Mapping[str, Any]) -> bool:
    """True when the head size is a field of its own, so that heads and hidden size are independent."""
    return first(data, "head_dim") is not None


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression; a field that a configuration lacks counts as None.

    >>> evaluate("G*D + 1", {"G": 4, "D": 8}), evaluate("tied and not parallel", {"tied": True})
    (33, True)
    """
    return _value(ast.parse(text.strip(), mode="eval").body, names, text)


def _value(node: ast.AST, names: Mapping[str, Any], text: str) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _value(node.operand, names, text)
    if isinstance(node, ast.BoolOp):
        values = [_value(v, names, text) for v in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        pair = (_value(node.left, names, text), _value(node.right, names, text))
        if not all(isinstance(v, int) for v in pair):
            raise MupscaleError(
                f"{text!r} needs a field that this configuration does not have", code="family.field_missing"
            )
        return _OPERATORS[type(node.op)](*pair)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        pair = (_value(node.left, names, text), _value(node.comparators[0], names, text))
        return _OPERATORS[type(node.ops[0])](*pair)
    raise MupscaleError(
        f"{text!r} is not an arithmetic expression about a configuration", code="family.not_an_expression"
    )


def layout(text: str, names: Mapping[str, Any], k: int) -> Layout:
    """The layout that an expression gives for one configuration: a block, or segments "size: block | size: block".

    Here H·D = 32 query rows in blocks of G·D = 16, then 2·KV·D = 32 key and value rows in blocks of 8, each
    copied 3 times:

    >>> layout("H*D: G*D | 2*KV*D: D", {"H": 4, "KV": 2, "G": 2, "D": 8}, 3)
    (((2, 3), (16, 1)), ((4, 3), (8, 1)))
    """
    parts = text.split("|")
    if len(parts) == 1:
        return int(evaluate(text, names))
    segments = []
    for part in parts:
        size, _, block = part.partition(":")
        inner = int(evaluate(block, names))
        segments.append(((int(evaluate(size, names)) // inner, k), (inner, 1)))
    return tuple(segments)


def in_units(found: Layout, share: Fraction) -> Layout:
    """A layout by copies as one by new units, which take every segment to `share` times its size.

    >>> in_units((((2, 3), (16, 1)), ((4, 3), (8, 1))), Fraction(3))
    (((2, 1, 4), (16, 1)), ((4, 1, 8), (8, 1)))
    """
    if isinstance(found, int):
        return found
    segments: Any = found
    return tuple(((n, 1, int(n * share) - n), *inner) for (n, *_), *inner in segments)


def power(text: str, k: int) -> Scale:
    """A power of the width multiplier: "1/k", "k", "k^-1/2".

    >>> str(power("k^-1/2", 2)), str(power("1/k", 3))
    ('2^(-1/2)', '1/3')
    """
    exponent = {"1": "0", "k": "1", "1/k": "-1"}.get(text) or text.removeprefix("k^")
    return Scale.of(k) ** Fraction(exponent)
