"""What growing a checkpoint of any format needs: groups and state by name in new units, small files, and the job that writes it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import Fault, raise_faults
from ..files.pickles.torch_settings import strange
from ..files.places import OutFile
from ..files.strict import printable, raise_few
from ..jobs.digests import make_job
from ..jobs.job import Move, Text
from ..jobs.norms.measured import measured_in
from ..jobs.norms.norm_journal import NormJournal
from ..jobs.worker import run_job
from ..models.names import resolve
from ..noise.kinds import Noise
from ..noise.measures import Wanted
from ..noise.resolve import norms_wanted, resolve_noise, unused_seed
from ..optimizers.carry import carry_optimizer
from ..optimizers.identify import identify
from ..optimizers.named import NamedOptimizer
from ..optimizers.positions import named_orders
from ..optimizers.read import Names, read_positions
from ..plans.direction import Direction, Noises
from ..plans.plan import Plan
from ..rules.optimizer_rule import OptimizerRule
from ..rules.optimizers import rule_for
from ..runs.growth_record import FORMAT, earlier_growths, earlier_plan
from ..runs.provenance import reference_of
from ..storage.location import Location, absolute
from ..tensors.making import Making
from ..version import __version__

OTHER_PLAN = "use the plan that starts at this checkpoint's model, or plan.rename"
NEW_TENSOR = "a new tensor, or one with other names in the base, which this format does not get"
_NAME_IT = 'name it with optimizer_class="torch.optim.AdamW"; for a class without a row, with rules={its name: its row} as well'
_LISTS = "list the names of every group's tensors in names=[[...], ...], one list for each group"


@dataclass(frozen=True)
class Growing:
    """What decides a growth besides the checkpoint: the plan, its noise, and what the user says about the optimizer."""

    plan: Plan
    noise: Noises | None = None
    optimizer: str | None = None
    """Its name; without one it is known from what it keeps."""
    names: Names | None = None
    """The names of the tensors of every group, for formats that do not store them."""
    rules: Mapping[str, OptimizerRule] | None = None

    def making(self, name: str) -> Making:
        """How a weight of the wide model is made."""
        return self.plan[name].making(None if self.noise is None else self.noise.tensor(name))


@dataclass(frozen=True)
class WideFiles:
    """A wide checkpoint as files with their moves, and what a user should know."""

    files: list[OutFile] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    not_carried: dict[str, str] = field(default_factory=dict)

    def plain(self, entries: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The entries that hold plain values; the others are noted as not carried."""
        kept: dict[str, Any] = {}
        for key, value in entries.items():
            odd = next(strange(value), None)
            if odd is None:
                kept[key] = value
            else:
                self.not_carried[f"{where}: {printable(str(key))}"] = (
                    f"it holds {odd[1]}, and code is not run"
                )
        return kept


@dataclass(frozen=True)
class NamedState:
    """The groups of an optimizer, the names that are in each, and the state of each name."""

    settings: Sequence[Mapping[str, Any]]
    members: Names
    states: Mapping[str, Mapping[str, Any]]
    label: str
    """Its name in messages."""

    def carried(self, growing: Growing, claim: str) -> NamedOptimizer:
        """Groups and state in new units."""
        plan = growing.plan
        raise_few(claim, [*self._misnamed(plan), *self._odd(plan)])
        groups: list[dict[str, Any]] = []
        held: dict[int, Mapping[str, Any]] = {}
        first = 0
        for settings, names in zip(self.settings, self.members, strict=True):
            groups.append({**settings, "params": list(range(first, first + len(names)))})
            held |= {first + at: self.states[name] for at, name in enumerate(names) if self.states.get(name)}
            first += len(names)
        order, _ = named_orders(groups, plan, self.members)
        if growing.optimizer:
            rule = rule_for(growing.optimizer, rules=growing.rules)
        else:
            rule = identify(groups, held.values(), growing.rules, remedy=_NAME_IT)
        raise_few(claim, self._no_numbers(rule))
        named, unread = read_positions(groups, held, order, rule, self.label)
        carried, uncarried = carry_optimizer(named, Direction(plan, noise=growing.noise))
        raise_few(claim, unread + uncarried)
        return carried

    def _misnamed(self, plan: Plan) -> Iterator[Fault]:
        """Names that are not in the plan, and lists of names that are not one for each group."""
        if isinstance(self.members, str) or any(isinstance(names, str) for names in self.members):
            yield Fault(
                "state.names_not_lists", self.label, "names= is a list of lists of names, found text", _LISTS
            )
        elif len(self.members) != len(self.settings):
            what = f"{len(self.settings)} groups, and names of {len(self.members)}"
            yield Fault("state.names_not_per_group", self.label, what, _LISTS)
        else:
            known = {*plan.sources, *plan.ties}
            for name in (name for names in self.members for name in names):
                if resolve(name, known) is None:
                    yield Fault(
                        "plan.unknown_tensor",
                        printable(name),
                        "no tensor of the plan has this name",
                        OTHER_PLAN,
                    )

    def _odd(self, plan: Plan) -> Iterator[Fault]:
        """State of tensors in no group, state that has less than that of others alike, and settings that are objects."""
        alike = {
            name: (at, len(plan[name].axes) if name in plan.tensors else 0)
            for at, names in enumerate(self.members)
            for name in names
        }
        kept: dict[tuple[int, int], set[str]] = {}
        for name, state in self.states.items():
            if name in alike:
                kept.setdefault(alike[name], set()).update(state)
        for name, state in self.states.items():
            if name not in alike:
                yield Fault(
                    "state.in_no_group", printable(name), "it has state, and no group holds it", _LISTS
                )
            elif state and (lost := kept[alike[name]] - state.keys()):
                what = f"it has no {', '.join(sorted(lost))}, which others of its group have"
                yield Fault("state.entry_missing", printable(name), what, "save the checkpoint again")
        for at, settings in enumerate(self.settings):
            for where, what in strange(dict(settings)):
                yield Fault(
                    "state.setting_is_object",
                    f"{self.label}: group {at}",
                    f"{printable(where)} is {what}, and code is not run",
                )

    def _no_numbers(self, rule: OptimizerRule) -> Iterator[Fault]:
        for at, settings in enumerate(self.settings):
            for key in ({"lr"} | rule.constants - rule.neutral) & settings.keys():
                if isinstance(value := settings[key], str | None | list | dict):
                    what = f"{key} = {printable(str(value))}, expected a number"
                    yield Fault(
                        "state.setting_not_a_number",
                        f"{self.label}: group {at}",
                        what,
                        "save the checkpoint again",
                    )


def plain_file(name: str, tree: Any) -> OutFile:
    """A torch.save file of plain values and single numbers."""
    return fixed_file(name, archive_of(tree))


def archive_of(tree: Any) -> bytes:
    """What torch.save writes for plain values and single numbers."""
    raw = io.BytesIO()
    torch.save(tree, raw)
    return raw.getvalue()


def fixed_file(name: str, raw: bytes) -> OutFile:
    """A file whose bytes are known."""
    return OutFile(name, len(raw), ((0, raw),))


def write_grown(
    base: Location,
    out: Location | str,
    growing: Growing,
    noise: Noise | None,
    seed: int,
    *,
    weights: Sequence[Move],
    make: Callable[[Growing], WideFiles],
    record: Location | None = None,
) -> dict[str, str]:
    """Write what `make` returns once the sizes of the noise are known, and return what was not carried.

    `record` is the folder that says whether the base was grown; norms are measured on `weights`, where they lie.
    """
    plan, folder = growing.plan, base if record is None else record
    means = [name for name, entry in plan.tensors.items() if entry.mean]
    what = "its new channels carry the mean of the others, which is not written into this format"
    remedy = 'write plan=mu.infer_plan(base, wide, by="units", loss=…), which copies such channels'
    raise_faults(
        "this plan cannot be carried out here",
        [Fault("plan.mean_in_format", name, what, remedy) for name in means],
    )
    early, history = earlier_plan(folder), earlier_growths(folder)
    resolved = None
    if noise is not None:
        norms = _norms(base, absolute(out), weights, list(norms_wanted(noise, plan=plan, since=early)))
        resolved = resolve_noise(
            lambda name, what: norms[name, what],
            noise,
            plan=plan,
            seed=unused_seed(seed, early, history.seeds),
            since=early,
        )
    wide = make(replace(growing, noise=resolved))
    about: dict[str, Any] = {
        "format": FORMAT,
        "version": __version__,
        "torch": str(torch.__version__),
        "plan_hash": plan.hash,
        "plan": plan.as_json(),
        "since_reference": (plan if early is None else early.then(plan)).as_json(),
        "reference": reference_of(early),
        "noise": None if resolved is None else {"kind": type(noise).__name__, **resolved.as_json()},
        "seed": seed,
        "not_carried": wide.not_carried,
        "grown_from": history.as_json(),
    }
    run_job(make_job(base, absolute(out), wide.files, wide.moves, texts=wide.texts, about=about))
    return wide.not_carried


def _norms(
    base: Location, out: Location, weights: Sequence[Move], wanted: Sequence[Wanted]
) -> dict[Wanted, Tensor]:
    """What is measured of the base; on this machine, kept next to the result until that is complete."""
    files = [source.file for move in weights for source in move.sources]
    journal = NormJournal(out, base, files) if isinstance(out, Path) and wanted else None
    return measured_in(base, weights, {}, wanted, journal=journal)
