"""Two snapshots under the same names: without wrappers and prefixes, fused projections joined, tied tensors once.

Only names and shapes decide here; that the tensors are equal is measured afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..errors import Fault
from ..formats.snapshot import Filed, Heads, Made, Snapshot, joined, plain_name
from ..formats.spellings import MEGATRON, spelling_of, with_stock_names

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "Wqkv": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules whose rows are those of others below each other, as Phi-3, ModernBERT and vLLM have them."""


VOCABULARY = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


@dataclass
class Matched:
    """Two snapshots whose tensors have the same names, as far as names are known."""

    a: Snapshot
    b: Snapshot
    notes: list[str] = field(default_factory=list)
    """What was taken for the same, in words."""
    unknown: list[Fault] = field(default_factory=list)
    """What keeps names from being matched."""

    @property
    def both(self) -> list[str]:
        """Names of weights that both have."""
        return [n for n in _weights(self.a) if n in _weights(self.b)]


def matched(a: Snapshot, b: Snapshot, heads: Heads | None = None) -> Matched:
    """Give two snapshots the same names; `heads` are those of the model, where neither of them has them."""
    a, b = (one.renamed({name: plain_name(name) for name in _every(one)}) for one in (a, b))
    found = Matched(a, b)
    _translate(found, heads)
    a, b = found.a, found.b
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


def _translate(found: Matched, heads: Heads | None) -> None:
    """Give stock names to both where they have those of two trainers, or one of them has those of a trainer."""
    known = {side: spelling_of(getattr(found, side)) or (None, "") for side in ("a", "b")}
    spellings = {side: spelling for side, (spelling, _) in known.items()}
    if spellings["a"] is spellings["b"]:
        return
    model_heads = heads or next((o.heads for o in (found.a, found.b) if o.heads and o.heads.kind), None)
    model_heads = model_heads or found.a.heads or found.b.heads
    for side, spelling in spellings.items():
        if spelling is None:
            continue
        own, before = getattr(found, side), known[side][1]
        plain = own.renamed({name: name.removeprefix(before) for name in _every(own)})
        new = with_stock_names(plain, spelling, model_heads)
        if isinstance(new, Fault):
            found.unknown.append(new)
            continue
        setattr(found, side, new)
        found.notes.append(f"names and rows of {side.upper()} are read as {spelling.trainer}'s")
    for side, other in (("a", "b"), ("b", "a")):
        if spellings[side] is MEGATRON:
            _without_padding(found, side, other)


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
    held = _weights(parts_of)
    made = {}
    for name in sorted(_weights(getattr(found, fused)).keys() - held.keys()):
        path, _, leaf = name.rpartition(".")
        above, _, module = path.rpartition(".")
        how = Made(tuple(f"{above}.{part}.{leaf}" for part in FUSED.get(module, ())), joined)
        if how.sources and how.of(held) is not None:
            made[name] = how
    if made:
        setattr(found, split, parts_of.remade(made))
        found.notes.append(
            f"{len(made)} fused tensors of {fused.upper()} are compared with those of {split.upper()} joined"
        )


def _first_rows(count: int, held: Sequence[Filed]) -> Filed:
    return held[0].rows(0, count)


def _without_padding(found: Matched, padded: str, plain: str) -> None:
    """Leave out the rows that a trainer adds to a vocabulary so that ranks can divide it."""
    own: Snapshot = getattr(found, padded)
    ours, theirs = _weights(own), _weights(getattr(found, plain))
    for name in VOCABULARY & ours.keys() & theirs.keys():
        count = theirs[name].shape[0]
        if ours[name].shape[1:] == theirs[name].shape[1:] and ours[name].shape[0] > count:
            own = own.remade({name: Made((name,), partial(_first_rows, count))})
            found.notes.append(
                f"rows of {name} from {count} on, which only {padded.upper()} has, are taken as padding"
            )
    setattr(found, padded, own)
