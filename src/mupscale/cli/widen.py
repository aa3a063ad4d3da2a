"""`mupscale widen` and `mupscale upscale`: a checkpoint directory in, a wider one out, streamed and resumable.

Plans, runs the job, and prints the next steps. Running the same command again resumes an interrupted
job.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ..checkpoints.grow import check_free, existing_above, has_state, job_of, record
from ..checkpoints.recipe_state import notes_on
from ..checkpoints.request import Request, parse_noise
from ..checkpoints.rounding import ADVISE, lost_to_rounding
from ..errors import MupscaleError
from ..families.loaded import batch_losses, check_memory, read_batch
from ..families.multipliers import parse_multipliers
from ..files.directory import Directory, read_directory
from ..files.strict import printable
from ..jobs.job import Job
from ..jobs.progress import shown_progress
from ..jobs.worker import run_job, run_worker
from ..plans.names import pattern_of
from ..text import columns
from ..training.jump import is_jump, jump_message, smaller
from ..training.recipe import Recipe
from .next_steps import next_steps
from .plan import cost, describe, evidence, planned
from .resume import begun, is_done


def run(chosen: argparse.Namespace, request: Request, share: tuple[int, int] | None) -> int:
    chosen.out = Path(os.path.abspath(chosen.out))
    if chosen.batch is not None:
        read_batch(chosen.batch)
    if is_done(chosen, request):
        print(
            f"already complete: {chosen.out}\nto prove it: {shlex.join(['mupscale', 'check', str(chosen.base), str(chosen.out)])}"
        )
        return 0
    job = begun(chosen, request)
    if job is not None:
        print(f"resuming {chosen.out}", flush=True)
    else:
        check_free(chosen.out, chosen.base)
        job = _plan(chosen, request)
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
    if chosen.batch is not None:
        print("\n" + _losses(chosen))
    print("\n" + next_steps(chosen.base, chosen.out, job, chosen.declare))
    return 0


def _plan(chosen: argparse.Namespace, request: Request) -> Job:
    directory = read_directory(chosen.base)
    if chosen.batch is not None:
        needed = 4 * sum(prod(place.shape) for place in directory.tensors.values())
        check_memory(needed * max(parse_multipliers(chosen.multipliers).values()) ** 2, "--batch")
    recipe = None if request.recipe is None else Recipe.from_json(request.recipe)
    notes = [] if recipe is None else notes_on(recipe, directory, request.optimizer)
    print(f"planning on a small copy of {directory.path} …", flush=True)
    family = planned(directory, chosen, request)
    print(describe(directory, family, request) + "\n\n" + evidence(family) + "\n", flush=True)
    job = _job(directory, chosen.out, record(directory, family, request), has_state(directory, request))
    if directory.trainer and not has_state(directory, request):
        print("the optimizer state stored with the weights is not carried")
    for name, why in job.about["not_carried"].items():
        print(f"not carried: {printable(name)}, because {why}")
    if request.adds_noise:
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


def _losses(chosen: argparse.Namespace) -> str:
    try:
        before, after = batch_losses([chosen.base, chosen.out], chosen.batch)
    except MupscaleError as error:  # the result is complete all the same
        return f"the losses could not be measured: {error}"
    told = f"loss of {chosen.batch}: {before:.6f} before noise (the base's), {after:.6f} after"
    if not is_jump(before, after):
        return told
    scheme, size = (None, 0.0) if chosen.noise is None else parse_noise(chosen.noise)
    remedy = f"write --noise {scheme}={smaller(size):g}" if size > 0 else "write less noise"
    return f"{told}\nwarning: {jump_message(before, after, remedy)}"


def _job(directory: Directory, out: Path, about: dict[str, Any], state: bool) -> Job:
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
                "free some and run the same command again, or do not carry the state: --no-state"
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
