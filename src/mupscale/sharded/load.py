"""Load a narrow checkpoint, or a running base, directly into the shards of a wide job, with optimizer state.

No wide checkpoint is written and no rank holds a full tensor, but for new rows that carry the mean of all others: from files
it is taken in pieces, and from a running base a rank with such rows receives one whole base tensor at a time. Ranks agree on what a checkpoint holds, do not communicate
while they read its files, and at the end one collective shows whether all of them succeeded. If not, nothing that was
loaded can be used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..arguments import wrong_kind
from ..errors import Fault, MupscaleError, raise_faults
from ..families.record import FamilyPlan
from ..files.directory import CONFIG
from ..files.elsewhere import DCP_METADATA, megatron_faults
from ..models.fingerprint import changed_code
from ..models.names import named_tensors, strip_wrappers, unique_tensors, unwrap
from ..noise.kinds import Noise
from ..noise.measures import measured
from ..noise.resolved import NoisePlan
from ..noise.where import exempt_of
from ..plans.attributes import carry_attributes_, compare_attributes
from ..plans.direction import Direction
from ..plans.ends import check_end, expect_exact
from ..plans.plan import Plan
from ..rules.optimizer_rule import OptimizerRule
from ..runs.provenance import Growth
from ..runs.run import Run, Since, since_of
from ..storage.location import Location, Url, location
from ..storage.looking import exists
from .agreement import AllOrNone, is_first
from .dcp_source import dcp_source
from .directory_source import directory_source
from .fill import Filler, Filling
from .live import LiveSource
from .memory import give_memory_, home_of, poison_, recompute_buffers_, reshard_
from .node import shared_dcp
from .noise import noise_identity, shared_noise
from .source import AnySource
from .states import live_states, prepare_states
from .waiting import Ranks


def load_grown_(
    base: str | Location | Run,
    wide: Run | nn.Module,
    *,
    plan: Plan | FamilyPlan,
    noise: Noise | NoisePlan | None = None,
    seed: int = 0,
    since: Since | None = None,
    init: Callable[[nn.Module], Any] | None = None,
    device: torch.device | str | None = None,
    group: Ranks = None,
    prefix: str | None = None,
    prove: bool = True,
    rules: Mapping[str, OptimizerRule] | None = None,
) -> Run:
    """Fill a larger run from a smaller checkpoint or run, each rank its own shards.

    Parameters on the meta device get memory and remain the same objects. Optimizers get their state if the base has it; their
    settings and schedulers are not changed. On any error every rank raises the same error, and a model whose loading had
    begun is filled with NaN; arguments that do not fit are refused before anything is touched. All ranks must call it.

    Args:
        base: A directory of torch.distributed.checkpoint or of Hugging Face, here or at a URL, or the base run itself, live on
            the same ranks.
        wide: The larger run, or its model alone. Its optimizers must be in units, from `param_groups` or by `step_in_units_`.
        plan: The plan from the base to the wide model, from `plan_between` or `family_plan`.
        noise: What parts copies or wakes new units. Without it the result trains exactly like the base.
        seed: The number on which the noise depends.
        since: The plan from the reference to the base, or the base's run. By default the base is its own reference.
        init: `init(model)` computes buffers that are in no checkpoint. Models made by `on_meta` have them already.
        device: Where parameters on the meta device get memory.
        group: The process group whose ranks load together; by default all.
        prefix: The name of the set of tensors, where a checkpoint holds several.
        prove: False loads by a plan that nothing has proved.
        rules: Rows to use in place of the registry of optimizers, by full class name.

    Returns:
        The run `wide` with its provenance; for a model alone, a run around it.

    Raises:
        MupscaleError: If the plan is not proved, or the checkpoint does not fit it.

    >>> import tempfile, mupscale as mu, torch.distributed.checkpoint as dcp
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> base, plan, x = make(4), mu.plans.plan_between(make, 4, 8), torch.ones(1, 3)
    >>> with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
    ...     _ = dcp.save({"model": base.state_dict()}, checkpoint_id=folder)
    ...     wide = load_grown_(folder, mu.plans.on_meta(lambda: make(8)), plan=plan).model
    >>> torch.allclose(wide(x), base(x))
    True
    """
    family = plan if isinstance(plan, FamilyPlan) else None
    chosen: Plan = plan.plan if isinstance(plan, FamilyPlan) else plan
    target = wide if isinstance(wide, Run) else Run(wide)
    checked = False
    loader = _Loader(target, chosen, rules, init, torch.device(device) if device is not None else None)
    try:
        with AllOrNone(group) as together:
            early = _checked(base, target, chosen, since, noise, prove)
            checked = True
            if isinstance(base, Run):
                carry_attributes_(target.model, compare_attributes(base.model, target.model, chosen))
            reshard_(target.model)
            opened = _open(base, chosen, family, target, prefix, rules, together, group)
            try:
                return loader.load(opened, noise, seed, early, together, group)
            finally:
                opened.close()
    except BaseException:
        if checked:
            poison_(target.model)
            for optimizer in target.optimizers:
                optimizer.state.clear()
        raise


def _checked(
    base: str | Location | Run,
    wide: Run,
    plan: Plan,
    since: Since | None,
    noise: Noise | NoisePlan | None,
    prove: bool,
) -> Plan | None:
    """The plan from the reference to the base; raises unless both ends fit the plan, before a model is touched."""
    remedy = "write load_grown_(base, wide, plan=…): first the base's directory or mu.Run(base), then what is filled"
    faults = wrong_kind("base", base, (str, Path, Url, Run), remedy)
    faults += wrong_kind("plan", plan, Plan, "write plan=infer_plan(base, wide), or a family's plan")
    raise_faults("load_grown_ cannot use what it was given", faults)
    expect_exact(plan, prove, noise)
    if isinstance(base, Run):
        check_end(plan, base.model, "base")
    check_end(plan, wide.model, "wide")
    if since is None or isinstance(since, Plan):
        return since
    return since_of(since, base.model) if isinstance(base, Run) else since_of(since, since.model)


class _Loader:
    """The part of one load that this rank does."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        rules: Mapping[str, OptimizerRule] | None,
        init: Callable[[nn.Module], Any] | None,
        device: torch.device | None,
    ) -> None:
        self._run, self._plan, self._rules, self._init, self._device = run, plan, rules, init, device

    def load(
        self,
        source: AnySource,
        noise: Noise | NoisePlan | None,
        seed: int,
        since_base: Plan | None,
        together: AllOrNone,
        group: Ranks,
    ) -> Run:
        run, plan = self._run, self._plan
        early = since_base if since_base is not None else source.since
        since = plan if early is None else early.then(plan)
        together.identity = (
            f"{source.identity}, plan {since.hash}, noise {noise_identity(noise)}, seed {seed}"
        )
        if run.ema is not None:
            what = "load_grown_ fills one model at a time"
            remedy = "load the average in a separate call: load_grown_(base, ema, plan=plan, noise=noise, prefix=…)"
            raise MupscaleError(
                "the average was not loaded", [Fault("run.average_not_loaded", "ema", what, remedy)]
            )
        check_end(plan, run.model, "wide")
        self._make_room(source)
        exempt = exempt_of(run.model, plan, "wide")
        resolved = shared_noise(noise, plan, source, seed, early, together, group, exempt)
        fillings = self._weights(source, resolved)
        direction = Direction(plan, noise=resolved)
        states, moments, notes = prepare_states(run, source, direction, since, self._rules)
        changed = changed_code(plan.code, run.model)
        notes = [
            *notes,
            *([f"{changed}; prove it again with infer_plan(base, wide, loss=…)"] if changed else []),
        ]
        fillings += moments
        if not all(source.aligned(f.stored, f.making, f.wide) for f in fillings if f.stored is not None):
            together.check()  # ranks are going to wait for each other's slices
        filler = Filler(source)
        with torch.no_grad():
            filler.fill_all_(fillings)
        for optimizer, state in zip(run.optimizers, states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)
        for note in notes if is_first(group) else ():
            warnings.warn(note, stacklevel=4)
        loaded = {
            "source": source.identity,
            "bytes": source.bytes,
            "messages": source.messages,
            "beside": filler.room_bytes,
            "moments": len(moments),
        }
        growth = Growth.by(
            plan,
            early,
            noise=None if resolved is None else {"kind": type(noise).__name__, **resolved.as_json()},
            seed=None if resolved is None else resolved.seed if resolved is noise else seed,
            loaded=loaded,
        )
        grown = since if any(e.grows or e.spread != 1 for e in since.tensors.values()) else None
        return Run(
            run.model,
            run.optimizers,
            run.schedulers,
            ema=None,
            steps=run.steps,
            plan=plan,
            since=grown,
            provenance=source.provenance.grown(growth),
        )

    def _make_room(self, source: AnySource) -> None:
        model = self._run.model
        missing = {n for n, kind, _ in named_tensors(model) if kind == "buffer" and n not in source.weights}
        buffers = unwrap(model).named_buffers()
        empty = [name for name, buffer in buffers if strip_wrappers(name) in missing and buffer.is_meta]
        give_memory_(model, self._device or home_of(model))
        faults = recompute_buffers_(unwrap(model), empty, self._init)
        raise_faults("the wide model has buffers that were never computed", faults)

    def _weights(self, source: AnySource, noise: NoisePlan | None) -> list[Filling]:
        found = []
        for name, (kind, tensor) in unique_tensors(self._run.model)[0].items():
            planned = self._plan.planned(name)
            entry = self._plan[planned]
            unstored = kind == "buffer" and entry.sources and planned not in source.weights
            if entry.fill == "own" or unstored:
                continue  # computed by the wide model itself
            made = entry if noise is None else noise.woken(planned, entry)
            making = made.making(None if noise is None else noise.tensor(planned))
            # What wakes as a copy is read from where the tensor that it is like is.
            read = source.weights[measured(planned, self._plan)] if made.sources else None
            found.append(Filling(making, read, tensor))
        return found


def _open(
    base: str | Location | Run,
    plan: Plan,
    family: FamilyPlan | None,
    wide: Run,
    prefix: str | None,
    rules: Mapping[str, OptimizerRule] | None,
    together: AllOrNone,
    group: Ranks,
) -> AnySource:
    if isinstance(base, Run):
        reshard_(base.model)
        check_end(plan, base.model, "base")
        tensors = {name: t for name, _, t in named_tensors(base.model)}
        joined = [name for name, entry in plan.tensors.items() if entry.join is not None]
        raise_faults(
            "a running base is carried tensor by tensor",
            [
                Fault(
                    "run.joined_from_live_base",
                    n,
                    "joined or stacked from tensors of the base",
                    "save a checkpoint and load that",
                )
                for n in joined
            ],
        )
        weights = {name: tensors[e.sources[0]] for name, e in plan.tensors.items() if e.sources}
        states, settings = live_states(base, plan, rules) if wide.optimizers else ({}, {})
        return LiveSource("the running base", weights, states, settings, base.since, base.provenance)
    path = location(base)
    raise_faults("there is nothing to load from", megatron_faults(path))
    if exists(path / DCP_METADATA):
        together.check()  # ranks are going to wait for the one of their node that reads
        return dcp_source(shared_dcp(path, group), plan, prefix, bool(wide.optimizers), rules)
    if exists(path / CONFIG):
        return directory_source(path, plan, family, wide.model, bool(wide.optimizers))
    what = f"neither {DCP_METADATA} (torch.distributed.checkpoint) nor {CONFIG} (Hugging Face) is in it"
    remedy = "name the directory that holds one of them; a DCP save that was cut short has no .metadata"
    raise MupscaleError(
        "there is nothing to load from", [Fault("directory.nothing_to_load", str(path), what, remedy)]
    )
