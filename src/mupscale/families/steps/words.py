"""More words and positions in stock models: what `--to vocab=+64` and `--to positions=512` say, and the plan that follows.

The plan is tried on a small copy with a few more of each: a loss over the base's words has the base's gradients, and the
new rows have none. Knows the fields of configurations that count words and positions; what it does not know is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from ...errors import Fault, raise_faults
from ...models.kinds import padding_rows
from ...models.need import Need
from ...plans.plan import Plan
from ...plans.rows import row_plan
from ...plans.tensor_plan import Rows
from ..config.checks import not_more_rows
from ..config.fields import FIELDS
from ..config.multipliers import To, counted
from ..config.nested import Path, nested_configs, with_edits
from ..copy.trial import End, Trial
from ..models import Config, as_data, config_from, on_meta
from .step import Step

_GOALS: Mapping[Rows, str] = {"words": "vocab", "positions": "positions"}
_FEW: Mapping[Rows, int] = {"words": 5, "positions": 9}
"""How many more a small copy gets; odd, so that no width is taken for them."""
_KNOWN_ROPE = {"default", "dynamic"}
"""Kinds of rotary embeddings that do the same at every position of the base, however many positions there are."""


@dataclass(frozen=True)
class More:
    """More words or more positions: the field that counts them, and both counts."""

    rows: Rows
    field: Path
    now: int
    new: int

    @property
    def added(self) -> int:
        return self.new - self.now


def more_of(data: Mapping[str, Any], to: To) -> list[More]:
    """What a goal adds to the tables of a configuration; refused where it counts them nowhere, or in several places.

    >>> more_of({"model_type": "llama", "vocab_size": 512}, To(0, vocab="+64"))
    [More(rows='words', field=('vocab_size',), now=512, new=576)]
    """
    wanted: dict[Rows, str] = {"words": to.vocab, "positions": str(to.positions) if to.positions else ""}
    found, faults = [], []
    for rows, text in wanted.items():
        if not text:
            continue
        where = [
            (*path, key)
            for path, part in nested_configs(data)
            for key, value in part.items()
            if key in FIELDS[rows].grows and type(value) is int
        ]
        if len(where) != 1:
            names = ", ".join(".".join(path) for path in where) or "no field"
            what = f"this configuration counts {rows} in {names}, expected one of {', '.join(FIELDS[rows].grows)}"
            faults.append(
                Fault("goal.rows_not_counted_once", f"--to {_GOALS[rows]}", what, f"leave {_GOALS[rows]} out")
            )
            continue
        now = _at(data, where[0])
        more = More(rows, where[0], now, counted(text, now))
        if more.added < 1:
            faults.append(not_more_rows(rows, _GOALS[rows], now, more.new))
        found.append(more)
    raise_faults("this model cannot grow like that", faults)
    return found


def small_more(data: Mapping[str, Any], full: list[More]) -> list[More]:
    """The same for a small copy: a few more of what the full model gets."""
    return [replace(m, now=_at(data, m.field), new=_at(data, m.field) + _FEW[m.rows]) for m in full]


def edits_of(more: list[More]) -> dict[Path, Any]:
    """Every field of the configuration that changes, by path."""
    return {each.field: each.new for each in more}


def with_more(config: Config, more: list[More]) -> Config:
    """The configuration with more words and positions; refused if its class changes what was set."""
    made = config_from(with_edits(as_data(config), edits_of(more)))
    data = as_data(made)
    faults = [
        Fault(
            "config.class_changes_field",
            ".".join(each.field),
            f"set to {each.new}, and its class makes {_at(data, each.field)} of it",
        )
        for each in more
        if _at(data, each.field) != each.new
    ]
    raise_faults("this configuration cannot be written with more rows", faults)
    return made


def table_plan(base: nn.Module, config: Config, cls: Any, more: list[More]) -> Plan:
    """The plan from a model to the one with more words and positions, both of one width; models may be on the meta device."""
    plan: Plan | None = None
    for each in more:
        config = with_more(config, [each])
        model = on_meta(config, cls)
        step = row_plan(base, model, each.rows, each.added)
        raise_faults(
            f"this model cannot have more {each.rows}", list(_wrong(base, model, step, each, config))
        )
        plan, base = step if plan is None else plan.then(step), model
    assert plan is not None
    return replace(plan, needs=plan.needs | {_need(each) for each in more})


def _need(more: More) -> Need:
    if more.rows == "positions":
        return Need(f"sequences of at most {more.now} positions, as in the base", "assumption")
    return Need(
        f"a loss over the base's {more.now} words, logits[..., :{more.now}]; over all words it rises by log(1 + new/Z), "
        "with Z the sum of exp(logit) over the base's words",
        "assumption",
    )


def _wrong(base: nn.Module, model: nn.Module, plan: Plan, more: More, config: Config) -> Iterator[Fault]:
    """What more words or positions would change besides their own rows."""
    if more.rows == "words":
        moved = padding_rows(base).items() ^ padding_rows(model).items()
        for name, row in sorted(moved)[:1]:
            what = f"its padding row is {row} at one end only: pad_token_id counts from the end"
            yield Fault(
                "words.padding_row_moves",
                name,
                what,
                "write pad_token_id as a number from 0 on, or null, in config.json",
            )
        return
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    tables = [n for n, t in plan.tensors.items() if t.rows == "positions" and t.kind == "parameter"]
    for name in [name for name in tables if name in frozen][:1]:
        what = "a table that the class computes and does not train, so that rows of zeros would be wrong"
        yield Fault("family.table_not_trained", name, what, "leave positions out")
    if not tables:
        yield from _rope(as_data(config), any(t.rows == "positions" for t in plan.tensors.values()), more)


def _rope(data: Mapping[str, Any], computed: bool, more: More) -> Iterator[Fault]:
    """Faults unless positions without a table are rotary, of a kind that keeps what it does at the base's positions."""
    part = _at(data, more.field[:-1])
    keep = "leave positions out: no tensor is as long, and longer sequences run as they are"
    if part.get("alibi"):
        yield Fault(
            "family.positions_are_distances",
            "alibi",
            "its positions are distances, with no number of positions to grow",
            keep,
        )
        return
    kinds = _rope_kinds(part.get("rope_parameters"))
    if not kinds and not computed:
        yield Fault(
            "family.no_positions_to_grow",
            more.field[-1],
            "this model has neither a table of positions nor rotary embeddings",
            keep,
        )
    for kind in sorted(kinds - _KNOWN_ROPE):
        what = f"rope {kind}: its frequencies were chosen for {more.now} positions, and others change the model at every length"
        yield Fault("family.rope_depends_on_length", "rope_parameters", what, keep)


def _rope_kinds(rope: Any) -> set[str]:
    """The kinds of rotary embeddings of a configuration, which may have one for every kind of layer.

    >>> sorted(_rope_kinds({"full": {"rope_type": "yarn"}, "sliding": {"rope_type": "default", "rope_theta": 1e4}}))
    ['default', 'yarn']
    """
    if not isinstance(rope, Mapping):
        return set()
    own = rope.get("rope_type", rope.get("type"))
    inner = [_rope_kinds(value) for value in rope.values()]
    return set().union(*inner, {str(own)} if own is not None else set())


@dataclass(frozen=True)
class Words(Step):
    """More words, more positions, or both: rows of zeros in the tables of a model."""

    more: list[More]

    @cached_property
    def end(self) -> End:
        return End(with_more(self.start.config, self.more), self.start.cls)

    @property
    def edits(self) -> Mapping[Path, Any]:
        return edits_of(self.more)

    @property
    def makes_tensors(self) -> bool:
        return False

    def plan(self, base: nn.Module, wide: nn.Module, copy: End) -> Plan:
        return table_plan(base, *self.start, self.more)

    def small(self, copy: End) -> Words:
        return Words(copy, small_more(as_data(copy.config), self.more))

    def judged(self, done: Trial) -> float:
        """Raises unless a loss over the base's words has the base's gradients."""
        found = done.measured()
        if not found.exact:
            kinds = " and ".join(each.rows for each in self.more)
            what = f"with more {kinds} the loss over the base's words is off by {found.gap:.1e}, and its gradient by {found.worst:.1e}"
            raise_faults(
                f"this model cannot have more {kinds}",
                [Fault("family.rows_change_the_loss", found.where, what)],
            )
        return found.worst


def step_of(start: End, to: To) -> Words | None:
    """The rows that a goal adds; None where it adds none."""
    more = more_of(as_data(start.config), to)
    return Words(start, more) if more else None


def _at(data: Mapping[str, Any], path: Path) -> Any:
    found: Any = data
    for key in path:
        found = found[key]
    return found
