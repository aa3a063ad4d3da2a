"""Grow a Hugging Face directory: plan, resolve the noise, make the job, run it or resume it.

The request is a value, as the command line makes one. Nothing is printed: what happens is reported as events.
"""

from __future__ import annotations

import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from ..errors import Fault, MupscaleError, raise_faults
from ..families.process import plan_in_process, with_ways
from ..families.record import JUMP, FamilyPlan
from ..families.types.declarations import FORM
from ..files.strict import system_errors
from ..jobs.job import Job
from ..jobs.worker import run_job, run_worker
from ..plans.more_experts import refuse_equal_scores
from ..runs.growth_record import read_about
from ..storage.location import Location, absolute
from .about import check_record
from .base import Base
from .destination import check_free
from .events import (
    Listener,
    NotCarried,
    Planned,
    RecipeNotes,
    Resumed,
    RoundedAway,
    Working,
    Writing,
)
from .growth_job import job_of, record
from .request import Request, refuse_unmeasurable
from .resume import begun, is_done
from .state.optimizer_state import has_state, state_left

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
            _report_cost(start, out, request, options, on)
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
    elif not run_worker(job, *options.share, report, threads=options.threads):
        return Grown(out, "share written", job)
    elif _is_unmeasured(out, request, options):
        _report_cost(start, out, request, options, on)
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
            centred=request.centred,
        )
    except MupscaleError as error:
        if not _DECLARED & set(error.codes):
            raise
        what = "takes what is to be declared, as JSON by pattern of names; each part may be left out"
        way = Fault("plan.can_be_declared", "--declare FILE", what, f"write {FORM}")
        raise with_ways(error, [way]) from None
    base.check_stored(family)
    return family


def _refuse_uncomposed(base: Base, family: FamilyPlan, request: Request, options: Options) -> None:
    """Raise if the plan does not compose with the growths before it; new units are tried then, and named if they do."""
    if base.early is None:
        return
    try:
        base.early.then(family.plan)
    except MupscaleError as error:
        ways = []
        if request.goal.by == "copies":
            units = replace(request, goal=replace(request.goal, by="units"))
            with suppress(MupscaleError):
                base.early.then(plan_growth(base, units, options.architecture).plan)
                what = "new units, which were tried and are exact, fit behind the units of the growth before"
                ways.append(
                    Fault("growth.units_compose", "--by units", what, "write --by units, without --noise")
                )
        raise with_ways(error, ways) from None


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
    if request.rise is not None and options.batch is None:
        refuse_unmeasurable(directory)
    on(Working(f"planning on a small copy of {directory.path}"))
    family = plan_growth(base, request, options.architecture)
    _refuse_uncomposed(base, family, request, options)
    if options.batch is not None:
        from ..families.loaded import check_memory

        check_memory(4 * family.plan.parameters("wide"), "--inputs")
    on(Planned(base, family, request, out))
    if request.wakes:
        refuse_jump(family)
    elif not request.adds_noise:
        refuse_equal_scores(family.plan)
    choice = None
    if request.rise is not None:
        from .measured_cost import chosen_size

        choice = chosen_size(base, family, request, request.rise, options.batch, on)
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
    jumps = request.adds_noise and (not request.wakes or family.plan.parts_tokens)
    costs = jumps or family.new_words or options.batch
    if costs and options.share is None and options.measure:
        from .measured_cost import planned_losses

        about |= planned_losses(base, about, request, options.batch, choice, on)
    job = _job(base, out, about, has_state(directory, request))
    if left := {**job.about["not_carried"], **state_left(directory, request)}:
        on(NotCarried(left))
    if request.adds_noise and not request.wakes:
        on(Working("drawing some of the noise, to see how much of it rounding loses"))
        from .lost_noise import lost_to_rounding

        on(RoundedAway(lost_to_rounding(job)))
    if recipe is not None:
        on(RecipeNotes(recipe.optimizer, recipe.lr, (*notes, *recipe.differences())))
    return job


def refuse_jump(family: FamilyPlan) -> None:
    """Raise if waking would change the loss, as it did on the small copy."""
    jump = family.evidence.jump
    if family.plan.parts_tokens or (jump is not None and jump <= JUMP):
        return
    what = "the loss was not measured" if jump is None else f"the loss of its small copy moves by {jump:.1e}"
    remedy = "write --by copies --noise auto, which shows what it costs; or mupscale grow --by units, which does not wake it"
    raise_faults(
        "waking what is new would change the loss",
        [Fault("growth.waking_moves_loss", family.model_type, what, remedy)],
    )


def _is_unmeasured(out: Location, request: Request, options: Options) -> bool:
    """Whether the finished directory has noise, and its record says nothing of what that costs."""
    if not request.adds_noise or request.wakes or not options.measure:
        return False
    about = read_about(out)
    return about is None or about.get("losses") is None


def _report_cost(base: Base, out: Location, request: Request, options: Options, on: Listener) -> None:
    """Report what the noise of a finished directory costs."""
    from .measured_cost import stored_cost

    on(stored_cost(base, out, request, options.batch, on))


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
