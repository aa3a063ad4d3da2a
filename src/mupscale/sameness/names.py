"""Two snapshots under the same names: without wrappers and prefixes, fused projections joined, tied tensors once.

Only names and shapes decide here; that the tensors are equal is measured afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .snapshot import Filed, Snapshot, joined, plain_name

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "Wqkv": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules whose rows are those of others below each other, as Phi-3, ModernBERT and vLLM have them."""


@dataclass
class Matched:
    """Two snapshots whose tensors have the same names, as far as names are known."""

    a: Snapshot
    b: Snapshot
    notes: list[str] = field(default_factory=list)
    """What was taken for the same, in words."""

    @property
    def both(self) -> list[str]:
        """Names of weights that both have."""
        return [n for n in _weights(self.a) if n in _weights(self.b)]


def matched(a: Snapshot, b: Snapshot) -> Matched:
    """Give two snapshots the same names."""
    a, b = (one.renamed({name: plain_name(name) for name in _every(one)}) for one in (a, b))
    found = Matched(a, b)
    prefixes = [("", "")]
    prefixes += [(prefix, "") for prefix in _prefixes(_weights(a), _weights(b))]
    prefixes += [("", prefix) for prefix in _prefixes(_weights(b), _weights(a))]
    cut_a, cut_b = max(prefixes, key=lambda cut: len(_cut(_weights(a), cut[0]) & _cut(_weights(b), cut[1])))
    for cut, side in ((cut_a, "a"), (cut_b, "b")):
        if cut:
            own: Snapshot = getattr(found, side)
            setattr(found, side, own.renamed({name: name.removeprefix(cut) for name in _every(own)}))
            found.notes.append(f"names of {side.upper()} are read without {cut!r}")
    _join_fused(found, "a", "b")
    _join_fused(found, "b", "a")
    return found


def _every(one: Snapshot) -> set[str]:
    return {*one.names, *one.steps, *one.settings}


def _weights(one: Snapshot) -> dict[str, Filed]:
    return {**one.masters, **one.weights}


def _cut(names: Iterable[str], prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in names}


def _prefixes(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """What stands before the names of some of the others."""
    ends = [*others][:3]
    return sorted({name[: -len(end)] for name in names for end in ends if name.endswith(f".{end}")})


def _join_fused(found: Matched, split: str, fused: str) -> None:
    """Join the tensors of one snapshot that the other holds as one."""
    parts_of: Snapshot = getattr(found, split)
    whole: Snapshot = getattr(found, fused)
    names = _weights(whole).keys() - _weights(parts_of).keys()
    done = 0
    for name in sorted(names):
        path, _, leaf = name.rpartition(".")
        above, _, module = path.rpartition(".")
        parts = [f"{above}.{part}.{leaf}" for part in FUSED.get(module, ())]
        if not parts or not all(part in _weights(parts_of) for part in parts):
            continue
        if _joined_into(parts_of, parts, name):
            done += 1
    if done:
        found.notes.append(
            f"{done} fused tensors of {fused.upper()} are compared with those of {split.upper()} joined"
        )


def _joined_into(one: Snapshot, parts: list[str], name: str) -> bool:
    """Put the joined tensors of a snapshot in the place of their parts; settings and steps only where the parts agree."""
    made = {}
    for held in (one.weights, one.masters):
        if all(part in held for part in parts):
            whole = joined([held[part] for part in parts])
            if whole is None:
                return False
            made[id(held)] = whole
    for held in (one.weights, one.masters):
        for part in parts:
            held.pop(part, None)
        if id(held) in made:
            held[name] = made[id(held)]
    states = [one.moments.pop(part, {}) for part in parts]
    for slot in set.intersection(*map(set, states)):
        if (whole := joined([state[slot] for state in states])) is not None:
            one.moments.setdefault(name, {})[slot] = whole
    held_values: tuple[dict[str, Any], ...] = (one.steps, one.settings)
    for values in held_values:
        own = [values.pop(part, None) for part in parts]
        if own[0] is not None and all(value == own[0] for value in own):
            values[name] = own[0]
    return True
