"""Grow a checkpoint on disk or in a store: plan, resolve the noise, make the job, run it or resume it.

`grow_directory` does it for a request that is already a value, as the command line makes one. `grow_checkpoint` is its public
form. Neither prints: what happens is reported as events.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from math import isfinite
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..arguments import wrong_whole
from ..errors import Fault, MupscaleError, raise_faults
from ..families.config.goal import Goal, Way
from ..families.loaded import Losses, check_memory, choose_size, losses_with, stored_losses
from ..families.process import plan_in_process, with_ways
from ..families.record import JUMP, FamilyPlan
from ..families.types.declarations import FORM
from ..files.dcp.metadata import METADATA
from ..files.directory import CONFIG, Directory
from ..files.floats import FLOATS
from ..files.strict import printable, system_errors
from ..jobs.job import Job
from ..jobs.worker import run_job, run_worker
from ..noise.auto import AutoNoise, wrong_auto
from ..noise.kinds import CLASSES, AddedNoise, NewUnits, given_size, wrong_noise
from ..noise.resolve import unused_seed
from ..plans.plan import Plan
from ..rules.noise_defaults import DEFAULT_RISE, DEFAULT_T
from ..runs.growth_record import read_about
from ..storage.location import Location, absolute, location
from ..storage.looking import exists
from ..training.recipe import Recipe
from .about import check_record
from .base import Base
from .destination import check_free
from .events import (
    Event,
    Listener,
    Measured,
    NoiseChosen,
    NotCarried,
    NotMeasured,
    Planned,
    RecipeNotes,
    Resumed,
    RoundedAway,
    Working,
    Writing,
)
from .growth_job import job_of, record
from .lost_noise import lost_to_rounding
from .noise_words import AUTO
from .request import Request, parse_dtype
from .resume import begun, is_done
from .state.optimizer_state import has_state, state_left

if TYPE_CHECKING:
    from ..formats.format import Format

_DECLARED = frozenset(
    {
        "axis.roles_disagree",
        "layout.axis_not_named",
        "model.growing_integer_buffer",
        "plan.gain_declared_once",
        "search.tensor_undecided",
    }
)
"""Codes of refusals whose remedy is a declaration."""


@dataclass(frozen=True)
class Options:
    """How a result is made, apart from what the request says."""

    architecture: str | None = None
    """The class of transformers; None for the one that config.json names."""
    batch: Path | None = None
    """Inputs whose loss is measured; None for text that the model writes itself."""
    measure: bool = True
    """Whether the loss before and after noise is measured."""
    threads: int = 1
    share: tuple[int, int] | None = None
    """Which of how many shares is done here; None for all of it."""
    dry_run: bool = False


@dataclass(frozen=True)
class Grown:
    """What became of a growth."""

    out: Location
    outcome: Literal["written", "already there", "share written", "dry run"]
    job: Job | None = None
    """The job that wrote it; None for a result that was there already, and for other formats than Hugging Face's."""


@system_errors()
def grow_directory(
    base: Location,
    out: Location,
    request: Request,
    options: Options,
    on: Listener = lambda event: None,
) -> Grown:
    """Grow a Hugging Face directory into `out`. An unfinished growth of the same request is resumed."""
    start, out = Base(base), absolute(out)
    if options.batch is not None:
        from ..families.batches import read_batch

        read_batch(options.batch)
    if is_done(start, out, request):
        if options.batch is not None or _is_unmeasured(out, request, options):
            on(_stored(start, out, request, options, on))
        return Grown(out, "already there")
    job = begun(start, out, request, options.architecture)
    if job is not None:
        on(Resumed(out))
    else:
        check_free(out, base)
        job = _planned_job(start, out, request, options, on)
    if options.dry_run:
        return Grown(out, "dry run", job)

    def report(done: int, total: int) -> None:
        on(Writing(done, total))

    if options.share is None:
        run_job(job, options.threads, report)
    elif not run_worker(job, *options.share, report):
        return Grown(out, "share written", job)
    elif _is_unmeasured(out, request, options):
        on(_stored(start, out, request, options, on))
    return Grown(out, "written", job)


def plan_growth(base: Base, request: Request, architecture: str | None) -> FamilyPlan:
    """The plan, found and proved on a small copy in a process of its own, and the directory fits it."""
    directory = base.directory
    check_record(directory, base.about)
    if request.goal.to.experts is not None and base.about is not None:
        what = "this base was grown itself, and experts that its reference does not have would have no units there"
        remedy = "grow its own base in one command, as --to layers=8,experts=8,top_k=2,expert_ffn=64"
        raise MupscaleError(
            "experts can only be added to a base that was not grown before",
            [Fault("experts.base_was_grown", "--to experts", what, remedy)],
        )
    try:
        family = plan_in_process(
            directory.config,
            request.goal.k_text,
            to=request.goal.to_text,
            by=request.goal.by,
            architecture=architecture,
            export=request.export,
            stored=list(directory.tensors),
            declared=request.declared,
        )
    except MupscaleError as error:
        if not _DECLARED & set(error.codes):
            raise
        what = "takes what is to be declared, as JSON by pattern of names; each part may be left out"
        way = Fault("plan.can_be_declared", "--declare FILE", what, f"write {FORM}")
        raise with_ways(error, [way]) from None
    base.check_stored(family)
    return family


def _planned_job(base: Base, out: Location, request: Request, options: Options, on: Listener) -> Job:
    """The job of a growth that begins."""
    directory, recipe = base.directory, request.recipe
    notes: list[str] = []
    if recipe is not None:
        from .state.recipe_state import notes_on

        if recipe.by != request.goal.by:
            what = f"the recipe was tuned by {recipe.by}, and this grows by {request.goal.by}"
            fault = Fault(
                "recipe.other_growth", "--by", what, f"write --by {recipe.by}, or tune another recipe"
            )
            raise_faults("this recipe does not apply to this run", [fault])
        notes = notes_on(recipe, directory, request.optimizer)
    on(Working(f"planning on a small copy of {directory.path}"))
    family = plan_growth(base, request, options.architecture)
    if options.batch is not None:
        check_memory(4 * family.plan.parameters("wide"), "--inputs")
    on(Planned(base, family, request, out))
    if request.wakes:
        _refuse_jump(family)
    choice = _chosen_size(base, family, request, options, on)
    if request.adds_noise:
        on(Working("reading the weights, whose norms the noise is relative to"))
    about = record(
        base,
        family,
        request,
        choice,
        out=None if options.dry_run else out,
        share=options.share or (0, 1),
        threads=options.threads,
    )
    # New units wake without a change of the loss, so no model is loaded to measure it unless a batch is given.
    costs = (request.adds_noise and not request.wakes) or family.new_words or options.batch
    if costs and options.share is None and options.measure:
        about |= _planned_losses(base, about, request, options, choice, on)
    job = _job(base, out, about, has_state(directory, request))
    if left := {**job.about["not_carried"], **state_left(directory, request)}:
        on(NotCarried(left))
    if request.adds_noise and not request.wakes:
        on(Working("drawing some of the noise, to see how much of it rounding loses"))
        on(RoundedAway(lost_to_rounding(job)))
    if recipe is not None:
        on(RecipeNotes(recipe.optimizer, recipe.lr, (*notes, *recipe.differences())))
    return job


def _refuse_jump(family: FamilyPlan) -> None:
    """Raise if waking would change the loss, as it did on the small copy."""
    jump = family.evidence.jump
    if jump is not None and jump <= JUMP:
        return
    what = "the loss was not measured" if jump is None else f"the loss of its small copy moves by {jump:.1e}"
    remedy = "write --by copies --noise auto, which shows what it costs; or mupscale grow --by units, which does not wake it"
    raise_faults(
        "waking what is new would change the loss",
        [Fault("growth.waking_moves_loss", family.model_type, what, remedy)],
    )


def _chosen_size(
    base: Base, family: FamilyPlan, request: Request, options: Options, on: Listener
) -> dict[str, Any] | None:
    """The size of automatic noise, measured on the base with real weights; None if a size was given."""
    rise = request.rise
    if rise is None:
        return None
    # The base and one wide model at a time, in float32.
    check_memory(2 * 4 * family.plan.parameters("wide"), "noise chosen by its cost")
    on(Working("choosing the noise by what it costs"))
    seed = unused_seed(request.seed, base.early, base.history.seeds)
    usual = request.recipe is None and rise == DEFAULT_RISE
    choice = choose_size(base.path, family, base.early, None if usual else rise, seed, options.batch)
    on(NoiseChosen(choice))
    return choice


def _planned_losses(
    base: Base,
    about: dict[str, Any],
    request: Request,
    options: Options,
    choice: dict[str, Any] | None,
    on: Listener,
) -> dict[str, Any]:
    """What noise and new words cost, measured before anything is written; nothing where it cannot be measured."""
    dtype = request.dtype or _usual_dtype(base.directory)
    try:
        # What the choice measured, as nothing is rounded.
        if choice is not None and dtype == "F32" and about["words"] is None:
            found = Losses(choice["before"], choice["after"], choice["kind"], choice["text"])
        else:
            check_memory(2 * 4 * about["parameters"]["wide"], "the loss after noise")
            on(Working(f"measuring what {'the noise costs' if request.adds_noise else 'new words cost'}"))
            found = losses_with(base.path, about, base.early, dtype, options.batch)
    except MupscaleError as error:
        on(NotMeasured(error))
        return {}
    on(Measured(found, request))
    measured: dict[str, Any] = {}
    if request.adds_noise:
        measured["losses"] = found.as_json() if isfinite(found.after) else None
    if found.words is not None:
        measured["words"] = {**about["words"], "losses": found.words.as_json()}
    return measured


def _usual_dtype(directory: Directory) -> str:
    """The dtype that most of the weights are stored in."""
    counts: Counter[str] = Counter()
    for place in directory.tensors.values():
        counts[place.dtype] += place.bytes * (place.dtype in FLOATS)
    return counts.most_common(1)[0][0]


def _is_unmeasured(out: Location, request: Request, options: Options) -> bool:
    """Whether the finished directory has noise, and its record says nothing of what that costs."""
    if not request.adds_noise or request.wakes or not options.measure:
        return False
    about = read_about(out)
    return about is None or about.get("losses") is None


def _stored(base: Base, out: Location, request: Request, options: Options, on: Listener) -> Event:
    """What the noise of a finished directory costs."""
    try:
        about = read_about(out)
        assert about is not None
        check_memory(4 * about["parameters"]["wide"], "the loss after noise")
        on(Working("measuring what the noise costs"))
        return Measured(stored_losses(base.path, out, options.batch), request)
    except MupscaleError as error:
        return NotMeasured(error)


def _job(base: Base, out: Location, about: dict[str, Any], state: bool) -> Job:
    """The job; with optimizer state it is made in another process, because only transformers knows its groups."""
    if not state:
        return job_of(base, out, about)
    # The child ignores interrupts; this process handles them.
    quiet = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(1, get_context("spawn"), signal.signal, quiet) as pool:
        try:
            return pool.submit(job_of, base, out, about).result()
        except BrokenProcessPool:
            raise MupscaleError(
                "the process that reads the optimizer state was killed, most often for lack of memory; "
                "free some and run the same command again, or do not carry the state: --no-state",
                code="state.process_died",
            ) from None


def grow_checkpoint(
    base: Location | str,
    out: Location | str,
    multipliers: int | str | Mapping[str, int] | None = None,
    *,
    to: str | None = None,
    by: Way | None = None,
    plan: Plan | None = None,
    noise: AddedNoise | NewUnits | AutoNoise | None = None,
    recipe: Recipe | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    with_state: bool = True,
    optimizer_class: str | None = None,
    batch_file: Path | str | None = None,
    threads: int = 2,
    dry_run: bool = False,
    on: Listener = lambda event: None,
) -> Grown:
    """Grow a checkpoint into a larger one of the same format, as `mupscale grow` and `mupscale upscale` do.

    `base` and `out` are Hugging Face directories, here or at a URL such as s3://bucket/model. `multipliers` says how many times
    wider, for every width or by name (`{"hidden": 2, "ffn": 4}`), and `to` names sizes, layers, words and experts as the command
    line does (`"layers=8,hidden=96"`). Without `noise` and `recipe` the result trains exactly like the base; with one of
    them it can use its new width. `noise=mu.NewUnits()` is what `mupscale upscale` does without options: the width grows by
    new units, `by="units"`, and they wake without a change of the loss; so does a recipe that was tuned so. Otherwise it grows by
    copies unless `by` says so.

    A checkpoint of Megatron, of DeepSpeed (universal) or of Lightning grows by the `plan` from its model to the wide one, as
    by `mu.trainers.grow_megatron_checkpoint` and its like; for what only one of them takes, call that one.

    The state of a Trainer next to the weights is carried unless `with_state` is False; `optimizer_class` is the class that
    left it, where the file does not tell. `batch_file` holds inputs whose loss is measured before and after noise; without
    it the model writes text itself.

    Tensors are streamed, so memory does not depend on the size of the model. A call that was interrupted is resumed by the
    same call, and a result that is there already is not written again. `on` is called with events: what was planned and
    measured, what is not carried, and how many bytes are written. With `dry_run` everything is planned and checked, and
    nothing is written.

    >>> import tempfile, transformers
    >>> config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...     num_attention_heads=2, num_key_value_heads=1)
    >>> folder = tempfile.TemporaryDirectory()
    >>> transformers.LlamaForCausalLM(config).save_pretrained(f"{folder.name}/base")
    >>> grow_checkpoint(f"{folder.name}/base", f"{folder.name}/wide", 2).outcome
    'written'
    >>> transformers.LlamaForCausalLM.from_pretrained(f"{folder.name}/wide").config.hidden_size
    32
    >>> folder.cleanup()
    """
    path, target = location(base), location(out)
    other = _other_format(path)
    faults = wrong_whole("seed", seed) + wrong_whole("threads", threads, least=1)
    if noise is not None and recipe is not None:
        what, remedy = "a recipe sets the noise, and noise is given too", "leave out one of them"
        faults.append(Fault("recipe.with_other_settings", "noise", what, remedy))
    goal = multipliers is not None or to is not None
    if other is None:
        faults += _without_plan(plan, goal)
    else:
        options = {
            "by": by,
            "dtype": dtype,
            "with_state": not with_state,
            "batch_file": batch_file,
            "dry_run": dry_run,
        }
        faults += _by_plan(goal or recipe is not None, [name for name, value in options.items() if value])
    raise_faults("the checkpoint cannot be grown like that", faults)
    if other is not None:
        with system_errors():
            left = other.grown(path, target, plan, noise, seed, optimizer_class)
        if left:
            on(NotCarried(left))
        return Grown(target, "written")
    request = Request(
        Goal.parse(
            1 if multipliers is None else multipliers,
            to,
            by or ("units" if isinstance(noise if recipe is None else recipe.noise, NewUnits) else "copies"),
        ),
        noise=None if noise is None else _scheme_of(noise),
        seed=seed,
        dtype=None if dtype is None else parse_dtype(str(dtype).removeprefix("torch.")),
        state=with_state,
        optimizer=optimizer_class,
        recipe=None if recipe is None else replace(recipe, tried=()),
    )
    batch = None if batch_file is None else Path(batch_file)
    return grow_directory(path, target, request, Options(batch=batch, threads=threads, dry_run=dry_run), on)


def _other_format(base: Location) -> Format | None:
    """The format of a checkpoint that is no Hugging Face directory. Such a directory may hold the state of other trainers too.

    >>> _other_format(Path("nothing/here"))              # whoever reads the directory says what is missing
    """
    if exists(base / CONFIG):
        return None
    from ..formats.format import format_at

    found = format_at(base)
    if found is None and exists(base / METADATA):
        what = "a checkpoint of torch.distributed, which grows while a wide job loads it"
        fault = Fault(
            "checkpoint.grows_while_loading", printable(str(base)), what, "call mu.load_grown_ in that job"
        )
        raise_faults("this checkpoint cannot be grown like that", [fault])
    return found


def _without_plan(plan: Plan | None, goal: bool) -> list[Fault]:
    """What is wrong with a call for a Hugging Face directory, whose plan is found from a goal."""
    if plan is not None:
        what = "a Hugging Face directory describes its model, and its plan is found"
        return [Fault("checkpoint.plan_is_found", "plan", what, "leave it out, and write multipliers=2")]
    what, remedy = "nothing says what grows", "write multipliers=2"
    return [] if goal else [Fault("goal.not_given", "multipliers", what, remedy)]


def _by_plan(goal: bool, others: Sequence[str]) -> list[Fault]:
    """What is wrong with a call for another format, which grows by a plan: a goal, or options that it would not follow."""
    faults = []
    if goal:
        what = "this checkpoint grows by a plan, which says what grows"
        remedy = "leave out multipliers, to and recipe"
        faults.append(Fault("checkpoint.plan_is_the_goal", "multipliers", what, remedy))
    what = "it is for Hugging Face directories, and this is no such directory"
    return faults + [Fault("checkpoint.not_for_format", name, what, "leave it out") for name in others]


def _scheme_of(noise: AddedNoise | NewUnits | AutoNoise) -> tuple[str, float]:
    """Noise as a request stores it: a scheme and its size.

    >>> from mupscale import SignalNoise
    >>> _scheme_of(SignalNoise(0.05)), _scheme_of(AutoNoise())
    (('t', 0.05), ('auto', 0.05))
    """
    if isinstance(noise, AutoNoise) and noise.untrained is None:
        raise_faults("this noise cannot be used", wrong_auto(noise))
        return AUTO, noise.share
    if not isinstance(noise, AutoNoise):
        raise_faults("this noise cannot be used", wrong_noise(noise))
        if isinstance(noise, NewUnits):
            return noise.readers, float(noise.size)
        size = given_size(noise)
        for scheme, kind in CLASSES.items():
            if isinstance(size, int | float) and kind(size) == noise:
                return scheme, float(size)
    what = f"{noise} has sizes or settings that a directory does not record; expected one size"
    remedy = f"write noise=mu.SignalNoise({DEFAULT_T})"
    raise_faults("this noise cannot be used", [Fault("noise.not_one_size", "noise", what, remedy)])
    raise AssertionError
