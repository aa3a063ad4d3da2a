"""What a user asked to grow, as one value: `-k 2` and `--to hidden=96,layers=8` are two spellings of it.

A width n goes to k·n, or to a size N that `--to` names. By copies that is N = k·n + p: k copies of every unit, then p zeros.
By units it is n + p: the base's units, then zeros, which noise turns into new units. A small copy of a model grows in the same
way by other numbers (`small_goals`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from ...errors import Fault, MupscaleError, raise_faults
from ..types.symbols import explicit_head_size, symbols
from .fields import EXPERTS
from .multipliers import EVERY, NOTHING, TOWERS, Experts, Multipliers, To, parse_multipliers, parse_to

_SHORT = {"hidden": "E", "heads": "H", "kv_heads": "KV"}
"""Widths that `symbols` knows by a short name."""


Way = Literal["copies", "units"]
"""By copies of every unit, with zeros where a size is no whole multiple; or by new units, wherever zeros are possible."""


@dataclass(frozen=True)
class Goal:
    """By how much each width grows, and how deep the model becomes.

    >>> goal = Goal.parse("ffn=2", "hidden=160,layers=8")
    >>> goal.size("hidden", 64), goal.size("ffn", 176), goal.size("heads", 4), goal.to.layers
    (160, 352, 4, 8)
    >>> goal.copies("hidden", 64), goal.pads("hidden", 64)
    (2, 32)
    >>> goal = replace(goal, by="units")
    >>> goal.copies("hidden", 64), goal.pads("hidden", 64)
    (1, 96)
    """

    k: Multipliers = field(default_factory=dict)
    to: To = NOTHING
    by: Way = "copies"

    def __post_init__(self) -> None:
        if self.by not in get_args(Way):
            known = " or ".join(f'"{way}"' for way in get_args(Way))
            raise MupscaleError(
                f"by={self.by!r} is no way to grow a checkpoint; write {known}", code="argument.unknown_way"
            )

    @staticmethod
    def parse(multipliers: str | int | Multipliers, to: str | None = None, by: Way = "copies") -> Goal:
        """The goal that `-k`, `--to` and `--by` say together; a width is named by one of the first two."""
        goal = Goal(parse_multipliers(multipliers), NOTHING if to is None else parse_to(to), by)
        twice = [width for width in goal.sizes if width in goal.k]
        what = "both -k and --to name it, expected one of them"
        remedy = "leave it out of one"
        raise_faults(
            "the goal cannot be read",
            [Fault("goal.width_in_both_options", width, what, remedy) for width in twice],
        )
        return goal

    def __str__(self) -> str:
        """The goal as it is written on a command line.

        >>> print(Goal.parse(2)); print(Goal.parse("1", "layers=8")); print(Goal.parse("ffn=2", "vocab=+64"))
        -k 2
        --to layers=8
        -k ffn=2 --to vocab=+64
        >>> print(Goal.parse(2, by="units"))
        -k 2 --by units
        """
        width = [f"-k {self.k_text}"] if self.to_text is None or self.k_text != "1" else []
        to = [] if self.to_text is None else [f"--to {self.to_text}"]
        return " ".join([*width, *to, *(["--by units"] if self.by == "units" else [])])

    @property
    def k_text(self) -> str:
        """What `-k` says: `parse` reads it back."""
        return ",".join(str(k) if width == EVERY else f"{width}={k}" for width, k in self.k.items())

    @property
    def to_text(self) -> str | None:
        """What `--to` says; None where it says nothing.

        >>> Goal.parse(1, "hidden=96,layers=8,after=1:3").to_text
        'layers=8,after=1:3,hidden=96'
        """
        to, experts = self.to, self.to.experts
        parts: dict[str, object] = {
            "layers": to.layers,
            "after": "" if to.after is None else ":".join(map(str, to.after)),
            **dict(to.sizes),
            "vocab": to.vocab,
            "positions": to.positions,
        }
        if experts is not None:
            parts |= {"experts": experts.number, "top_k": experts.top_k, "expert_ffn": experts.ffn}
            parts["into"] = experts.into
        parts |= dict(to.further)
        return ",".join(f"{key}={value}" for key, value in parts.items() if value) or None

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes that `--to` names, by width."""
        return dict(self.to.sizes)

    @property
    def grows_width(self) -> bool:
        """Whether any width is asked to grow."""
        return bool(self.to.sizes) or any(k != 1 for k in self.k.values())

    @property
    def grows(self) -> bool:
        """Whether anything is asked to grow.

        >>> Goal.parse(1).grows, Goal.parse(1, "layers=8").grows, Goal.parse("text=2").grows
        (False, True, True)
        """
        return self.grows_width or self.to != NOTHING

    def size(self, width: str, now: int) -> int:
        """The size to which a width of `now` units goes."""
        if width == EXPERTS:
            return now * self.k.get(EXPERTS, 1)
        return self.sizes.get(width, now * self.k.get(width, self.k.get(EVERY, 1)))

    def within(self, path: Sequence[str]) -> Goal:
        """The goal of the part of a configuration that lies at a path: a tower that `-k` names has its own number.

        >>> goal = Goal.parse("text=2")
        >>> [goal.within(path).size("hidden", 64) for path in (("text_config",), ("vision_config",), ())]
        [128, 64, 64]
        """
        if not self.k.keys() & set(TOWERS):
            return self
        tower = next((tower for tower in TOWERS if f"{tower}_config" in path), EVERY)
        return replace(self, k={EVERY: self.k.get(tower, self.k.get(EVERY, 1))})

    @property
    def declared(self) -> Goal:
        """The goal by whose numbers declarations are read: k is the largest one where `-k` names towers."""
        named = self.k.keys() & set(TOWERS)
        return replace(self, k={EVERY: max(self.k.values())}) if named else self

    def copies(self, width: str, now: int) -> int:
        """How many copies each of its units gets."""
        return self.size(width, now) // now if now and self.by == "copies" else 1

    def pads(self, width: str, now: int) -> int:
        """How many zeros follow the copies."""
        return self.size(width, now) - now * self.copies(width, now) if now else 0

    def as_json(self) -> dict[str, Any]:
        return {
            "k": dict(self.k),
            "layers": self.to.layers,
            "after": None if self.to.after is None else list(self.to.after),
            "sizes": dict(self.to.sizes),
            "vocab": self.to.vocab,
            "positions": self.to.positions,
            **({} if self.to.experts is None else {"experts": list(self.to.experts)}),
            **({"further": dict(self.to.further)} if self.to.further else {}),
            **({} if self.by == "copies" else {"by": self.by}),
        }

    @staticmethod
    def of_json(entry: Mapping[str, Any]) -> Goal:
        after = entry["after"]
        sizes = tuple((str(width), int(size)) for width, size in sorted(entry["sizes"].items()))
        behind = None if after is None else tuple(map(int, after))
        experts = Experts(*entry["experts"]) if "experts" in entry else None
        further = tuple((str(key), str(value)) for key, value in sorted(entry.get("further", {}).items()))
        to = To(
            int(entry["layers"]),
            behind,
            sizes,
            str(entry["vocab"]),
            int(entry["positions"]),
            experts,
            further,
        )
        return Goal({str(width): int(k) for width, k in entry["k"].items()}, to, entry.get("by", "copies"))


def small_goals(
    goal: Goal, full: Mapping[str, Any], small: Mapping[str, Any], ffn: str | None
) -> Iterator[Goal]:
    """Goals for a small copy of a configuration that grows as the full one does: to the same multiple, or between the same two.

    Two goals differ in the share of the stream and of the feed-forward layers that is filled, so that a fold that is right
    for one share only is found out. Where every width grows to a whole multiple there is one goal: by units too, because the
    copy then fills the same share as the full model. `ffn` is the field of that width.

    >>> full = {"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128}
    >>> small = {"hidden_size": 56, "num_attention_heads": 2, "head_dim": 128}
    >>> [found.sizes for found in small_goals(Goal.parse(1, "hidden=5120"), full, small, None)]
    [{'hidden': 70}, {'hidden': 84}]
    """
    names, now = symbols(full), symbols(small)
    for share in (4, 2):
        sizes: dict[str, int] = {}
        for width in sorted(goal.sizes, key=("kv_heads", "heads", "ffn", "hidden").index):
            key = _SHORT.get(width, ffn or "")
            n, m = names.get(key), now.get(key)
            if type(n) is not int or type(m) is not int:
                continue
            whole, rest = divmod(goal.size(width, n), n)
            copied, zeros = whole * m, rest
            unit = 1
            if width == "heads":
                partial = "kv_heads" in sizes and goal.size("kv_heads", names["KV"]) % names["KV"]
                unit = now["G"] if partial else 1
            elif width == "hidden":
                unit = sizes.get("heads", now.get("H", 1))
            least = m // share if width in ("hidden", "ffn") else 1
            size = copied + (-(-max(least, 1) // unit) * unit if zeros else 0)
            if width == "hidden" and zeros:
                size = -(-(copied + least) // unit) * unit  # classes want a multiple of the heads
                if not explicit_head_size(full) and "heads" in sizes:
                    size = sizes["heads"] * now["D"]
            sizes[width] = size
        yield replace(goal, to=To(0, None, tuple(sorted(sizes.items()))))
        if not _partial(goal, names, ffn):
            return


def _partial(goal: Goal, names: Mapping[str, Any], ffn: str | None) -> bool:
    """Whether any width of a configuration grows to a size that is no whole multiple."""
    sizes = [(width, names.get(_SHORT.get(width, ffn or ""))) for width in goal.sizes]
    return any(goal.size(width, n) % n for width, n in sizes if type(n) is int)
