"""`mupscale grow` and `mupscale upscale`: a checkpoint directory in, a wider one out, streamed and resumable.

Plans, runs the job, and prints the next steps. Running the same command again resumes an interrupted
job.
"""

from __future__ import annotations

import argparse
import shlex
import signal
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from math import isfinite
from multiprocessing import get_context
from typing import Any

from ..checkpoints.about import read_about
from ..checkpoints.grow import earlier_growths, earlier_plan, job_of, record
from ..checkpoints.noise_words import AUTO, DEFAULT_NOISE, parse_noise
from ..checkpoints.recipe_state import notes_on
from ..checkpoints.request import Request
from ..checkpoints.room import check_free, existing_above
from ..checkpoints.rounding import ADVISE, lost_to_rounding
from ..checkpoints.state import has_state, state_left
from ..errors import MupscaleError
from ..families.batches import read_batch
from ..families.loaded import Losses, check_memory, choose_size, losses_with, stored_losses
from ..families.record import FamilyPlan
from ..files.directory import Directory, read_directory
from ..files.floats import FLOATS
from ..files.strict import printable
from ..jobs.job import Job
from ..jobs.progress import shown_progress
from ..jobs.worker import run_job, run_worker
from ..models.names import pattern_of
from ..noise.resolve import unused_seed
from ..rules.noise_defaults import DEFAULT_RISE
from ..storage.location import Location, absolute
from ..text import columns
from ..training.grow.loss_rise import is_jump, jump_message, smaller
from ..training.recipe import Recipe
from .next_steps import next_steps
from .plan import cost, describe, evidence, planned
from .resume import begun, is_done
from .working import working


def run(chosen: argparse.Namespace, request: Request, share: tuple[int, int] | None) -> int:
    chosen.out = absolute(chosen.out)
    if chosen.batch is not None:
        read_batch(chosen.batch)
    if is_done(chosen, request):
        print(
            f"already complete: {chosen.out}\nto prove it: {shlex.join(['mupscale', 'check', str(chosen.base), str(chosen.out)])}"
        )
        if chosen.batch is not None or _unmeasured(chosen, request):
            print(_stored_losses(chosen, request))
        return 0
    job = begun(chosen, request)
    if job is not None:
        print(f"resuming {chosen.out}", flush=True)
    else:
        check_free(chosen.out, chosen.base)
        job = _plan(chosen, request, share)
    if chosen.dry_run:
        print("\ndry run: nothing was written")
        return 0
    with shown_progress("writing", chosen.quiet) as report:
        if share is None:
            run_job(job, chosen.workers, report)
        whole = share is None or run_worker(job, *share, report)
    if not whole:
        print(f"share {chosen.worker} is done; the worker that finishes last moves {chosen.out} into place")
        return 0
    if share is not None and _unmeasured(chosen, request):
        print("\n" + _stored_losses(chosen, request), flush=True)
    told = next_steps(chosen.base, chosen.out, job, chosen.declare)
    print(told.splitlines()[0] if chosen.quiet else f"\n{told}")
    return 0


def _unmeasured(chosen: argparse.Namespace, request: Request) -> bool:
    """Whether the finished directory has noise, and its record says nothing of what that costs."""
    told = read_about(chosen.out)
    return request.adds_noise and not chosen.no_loss and (told is None or told.get("losses") is None)


def _plan(chosen: argparse.Namespace, request: Request, share: tuple[int, int] | None) -> Job:
    directory = read_directory(chosen.base)
    recipe = None if request.recipe is None else Recipe.from_json(request.recipe)
    notes = [] if recipe is None else notes_on(recipe, directory, request.optimizer)
    working(f"planning on a small copy of {directory.path}", chosen)
    family = planned(directory, chosen, request)
    if chosen.batch is not None:
        check_memory(4 * family.plan.parameters("wide"), "--batch")
    if not chosen.quiet:
        print(describe(directory, family, request) + "\n\n" + evidence(family) + "\n", flush=True)
    choice = _chosen_size(directory, family, request, chosen)
    if request.adds_noise:
        working("reading the weights, whose norms the noise is relative to", chosen)
    about = record(
        directory,
        family,
        request,
        choice,
        out=None if chosen.dry_run else chosen.out,
        share=share or (0, 1),
        threads=chosen.workers,
    )
    if (request.adds_noise or family.new_words) and share is None and not chosen.no_loss:
        about |= _planned_losses(directory, about, chosen, request, choice)
    job = _job(directory, chosen.out, about, has_state(directory, request))
    for name, why in {**job.about["not_carried"], **state_left(directory, request)}.items():
        print(f"not carried: {printable(name)}, because {why}")
    if request.adds_noise:
        working("drawing some of the noise, to see how much of it rounding loses", chosen)
        print(_rounding(job))
    if recipe is not None:
        print(_recipe_notes(recipe, notes))
    if chosen.dry_run:
        print(cost(directory, family, request, existing_above(chosen.out)))
    return job


def _recipe_notes(recipe: Recipe, notes: list[str]) -> str:
    """The part of a recipe that a directory cannot store: the learning rate, and notes."""
    rate = f"the recipe's learning rate from now on, with {recipe.optimizer}: lr={recipe.lr:g} (at the reference)"
    return "\n".join([rate, *(f"note: {note}" for note in [*notes, *recipe.differences()])])


def _chosen_size(
    directory: Directory, family: FamilyPlan, request: Request, chosen: argparse.Namespace
) -> dict[str, Any] | None:
    """The size of automatic noise, measured on the base with real weights; None if a size was given."""
    rise = request.rise
    if rise is None:
        return None
    # The base and one wide model at a time, in float32.
    check_memory(2 * 4 * family.plan.parameters("wide"), "noise chosen by its cost")
    working("choosing the noise by what it costs", chosen)
    early = earlier_plan(directory.path)
    seed = unused_seed(request.seed, early, earlier_growths(directory.path).seeds)
    usual = request.recipe is None and rise == DEFAULT_RISE
    choice = choose_size(directory.path, family, early, None if usual else rise, seed, chosen.batch)
    if choice["kind"] == "loss":
        told = f"the loss goes from {choice['before']:.4f} to {choice['after']:.4f}, {choice['found']:.0%} of the way to"
        end = f"an untrained model's {choice['untrained']:.4f}"
    else:
        told = f"the cosines between outputs change by {choice['after']:.3f} (root mean square), {choice['found']:.0%} of"
        end = f"an untrained model's {choice['untrained']:.3f}"
    print(f"noise t={choice['t']:g}, by {choice['text']}: {told} {end}\n", flush=True)
    return choice


def _planned_losses(
    directory: Directory,
    about: dict[str, Any],
    chosen: argparse.Namespace,
    request: Request,
    choice: dict[str, Any] | None,
) -> dict[str, Any]:
    """What noise and new words cost, measured before anything is written; nothing where it cannot be measured."""
    dtype = request.dtype or _dtype(directory)
    try:
        # What the choice measured, as nothing is rounded.
        if choice is not None and dtype == "F32" and about["words"] is None:
            found = Losses(choice["before"], choice["after"], choice["kind"], choice["text"])
        else:
            check_memory(2 * 4 * about["parameters"]["wide"], "the loss after noise")
            working(f"measuring what {'the noise costs' if request.adds_noise else 'new words cost'}", chosen)
            found = losses_with(directory.path, about, earlier_plan(directory.path), dtype, chosen.batch)
    except MupscaleError as error:  # the result is right all the same
        print(_not_measured(error))
        return {}
    told: dict[str, Any] = {}
    if request.adds_noise:
        print(_costs(found, chosen, request), flush=True)
        told["losses"] = found.as_json() if isfinite(found.after) else None
    if found.words is not None:
        print(found.words, flush=True)
        told["words"] = {**about["words"], "losses": found.words.as_json()}
    return told


def _dtype(directory: Directory) -> str:
    """The dtype that most of the weights are stored in."""
    counts: Counter[str] = Counter()
    for place in directory.tensors.values():
        counts[place.dtype] += place.bytes * (place.dtype in FLOATS)
    return counts.most_common(1)[0][0]


def _stored_losses(chosen: argparse.Namespace, request: Request) -> str:
    """What the noise of a finished directory costs."""
    try:
        about = read_about(chosen.out)
        assert about is not None
        check_memory(4 * about["parameters"]["wide"], "the loss after noise")
        working("measuring what the noise costs", chosen)
        return _costs(stored_losses(chosen.base, chosen.out, chosen.batch), chosen, request)
    except MupscaleError as error:
        return _not_measured(error)


def _not_measured(error: MupscaleError) -> str:
    return (
        f"loss not measured: {error}\n  the smallest noise that is documented is {DEFAULT_NOISE}; to see "
        "what it costs, run this command again where base and result fit into memory: it measures a finished result"
    )


def _costs(found: Losses, chosen: argparse.Namespace, request: Request) -> str:
    """What the noise costs, with a warning of a jump."""
    scheme, size = (None, 0.0) if chosen.noise is None else parse_noise(chosen.noise)
    if not is_jump(found.before, found.after):
        return str(found)
    remedy = f"write --noise {AUTO}, or {scheme}={smaller(size):g}" if size > 0 else "write less noise"
    if found.kind == "outputs":
        told = f"noise changes the cosines between outputs by {found.after:.3f}: what they mean is lost; {remedy}"
    else:
        told = jump_message(found.before, found.after, remedy)
    return f"{found}\nwarning: {told}"


def _job(directory: Directory, out: Location, about: dict[str, Any], state: bool) -> Job:
    """The job; with optimizer state it is made in another process, because only transformers knows its groups."""
    if not state:
        return job_of(directory, out, about)
    # The child ignores interrupts; this process handles them.
    quiet = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(1, get_context("spawn"), signal.signal, quiet) as pool:
        try:
            return pool.submit(job_of, directory, out, about).result()
        except BrokenProcessPool:
            raise MupscaleError(
                "the process that reads the optimizer state was killed, most often for lack of memory; "
                "free some and run the same command again, or do not carry the state: --no-state",
                code="state.process_died",
            ) from None


def _rounding(job: Job) -> str:
    """How much of the noise is lost to rounding, by kind of tensor."""
    worst: dict[str, float] = {}
    for name, share in lost_to_rounding(job).items():
        worst[pattern_of(name)] = max(share, worst.get(pattern_of(name), 0.0))
    lossy = {name: share for name, share in worst.items() if share > ADVISE}
    head = (
        f"noise lost to rounding: at most {max(worst.values(), default=0.0):.1%} of the entries of a tensor"
    )
    if not lossy:
        return head
    rows = [(name, f"{share:.0%}") for name, share in sorted(lossy.items(), key=lambda item: -item[1])]
    advice = "above 10 %: write float32 masters (--dtype float32), or use more noise"
    return f"{head}\n{columns(rows, right=(1,))}\n  {advice}"
