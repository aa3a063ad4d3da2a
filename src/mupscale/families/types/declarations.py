"""What a user declares about a model in a file: roles, layouts and folds, by pattern of tensor names.

The same that `infer_plan` takes, as JSON. A plan is found on a small copy and lifted, so layouts may be written with the
sizes of the configuration ("D" is the head size) and folds with the multiplier k. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import Fault, MupscaleError, raise_faults
from ...files.strict import parse_json, printable, read_regular
from ...rules.axes import Layout
from ...rules.scale import Scale
from .symbols import layout, power

FORM = '{"roles": {"*.router.weight": {"0": "out", "1": "in"}}, "layouts": {"*.conv.weight": {"0": "D"}}, "folds": {"norm.weight": "1/k"}, "plus_one": []}'
"""An example of every part of the file; each may be left out."""
_LONGEST = 1 << 20  # bytes; a declaration has a line or two per kind of tensor


@dataclass(frozen=True)
class Declarations:
    """Declarations as they are written; values follow for each configuration.

    >>> Declarations.of_json({"folds": {"norm.weight": "1/k"}}).scales(4)["norm.weight"] == Scale.of("1/4")
    True
    """

    roles: Mapping[str, str | dict[int, str]] = field(default_factory=dict)
    layouts: Mapping[str, str | dict[int, str]] = field(default_factory=dict)
    folds: Mapping[str, str] = field(default_factory=dict)
    plus_one: tuple[str, ...] = ()

    @staticmethod
    def of_json(entry: Any, where: str = "the declarations") -> Declarations:
        """Plain data as declarations; one error lists everything that is wrong with them."""
        claim = f"{where} cannot be used"
        if not isinstance(entry, dict):
            raise MupscaleError(
                f"{claim}: expected a JSON object such as {FORM}", code="plan.declarations_not_object"
            )
        known = ("roles", "layouts", "folds", "plus_one")
        faults = [
            Fault(
                "plan.unknown_declaration",
                printable(key),
                f"unknown; expected {', '.join(known)}",
                f"write {FORM}",
            )
            for key in entry
            if key not in known
        ]
        tables = {key: entry.get(key, {}) for key in known[:3]}
        plus_one = entry.get("plus_one", [])
        faults += [
            Fault("plan.declaration_not_by_name", key, "expected an object by name", f"write {FORM}")
            for key, t in tables.items()
            if not isinstance(t, dict)
        ]
        if not isinstance(plus_one, list) or not all(isinstance(name, str) for name in plus_one):
            faults.append(
                Fault("plan.plus_one_not_list", "plus_one", "expected a list of names", f"write {FORM}")
            )
        raise_faults(claim, faults)
        roles = {name: _by_axis("roles", name, value, faults) for name, value in tables["roles"].items()}
        layouts = {
            name: _by_axis("layouts", name, value, faults) for name, value in tables["layouts"].items()
        }
        for name, value in tables["folds"].items():
            if not isinstance(value, (str, int)) or not _is_scale(str(value)):
                faults.append(
                    Fault(
                        "plan.fold_not_a_factor",
                        f"folds, {printable(name)}",
                        f"{printable(value)}, expected a factor",
                        'write "1/2", "1/k" or "k^-1/4"',
                    )
                )
        raise_faults(claim, faults)
        return Declarations(
            roles, layouts, {name: str(value) for name, value in tables["folds"].items()}, tuple(plus_one)
        )

    def as_json(self) -> dict[str, Any]:
        def with_text_keys(table: Mapping[str, str | dict[int, str]]) -> dict[str, Any]:
            return {
                n: {str(d): v for d, v in e.items()} if isinstance(e, dict) else e for n, e in table.items()
            }

        return {
            "roles": with_text_keys(self.roles),
            "layouts": with_text_keys(self.layouts),
            "folds": dict(self.folds),
            "plus_one": list(self.plus_one),
        }

    def values(self, names: Mapping[str, Any], k: int) -> dict[str, Layout | dict[int, Layout]]:
        """The layouts for one configuration, whose sizes are `names`."""
        return {
            pattern: {d: layout(text, names, k) for d, text in spec.items()}
            if isinstance(spec, dict)
            else layout(spec, names, k)
            for pattern, spec in self.layouts.items()
        }

    def scales(self, k: int) -> dict[str, Scale]:
        """The folds at the multiplier k of the hidden size."""
        return {pattern: _scale(text, k) for pattern, text in self.folds.items()}


def read_declarations(path: Path) -> Declarations:
    """The declarations of a file."""
    return Declarations.of_json(
        parse_json(read_regular(path, _LONGEST), printable(str(path))), printable(str(path))
    )


def _by_axis(option: str, name: str, value: Any, faults: list[Fault]) -> str | dict[int, str]:
    """One value for a tensor, or one by axis; JSON writes the number of an axis as text."""
    example = (
        '"out" or {"0": "out", "1": "in"}' if option == "roles" else '1, "D" or {"0": "H*D: G*D | 2*KV*D: D"}'
    )
    if isinstance(value, dict) and value and all(axis.isdigit() for axis in value):
        found = {int(axis): inner for axis, inner in value.items()}
        if all(_is_one(option, inner) for inner in found.values()):
            return {axis: str(inner) for axis, inner in found.items()}
    elif _is_one(option, value):
        return str(value)
    faults.append(
        Fault(
            "plan.role_not_readable" if option == "roles" else "plan.layout_not_readable",
            f"{option}, {printable(name)}",
            f"{printable(value)}, expected {example}",
            f"write {example}",
        )
    )
    return ""


def _is_one(option: str, value: Any) -> bool:
    if option == "roles":
        return value in ("in", "out")
    return (type(value) is int and value > 0) or (isinstance(value, str) and bool(value.strip()))


def _scale(text: str, k: int) -> Scale:
    return power(text, k) if "k" in text else Scale.of(text)


def _is_scale(text: str) -> bool:
    try:
        _scale(text, 2)
    except (MupscaleError, ValueError, ZeroDivisionError):
        return False
    return True
