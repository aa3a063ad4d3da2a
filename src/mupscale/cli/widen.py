"""`mupscale widen` and `mupscale upscale`: a checkpoint directory in, a wider one out, streamed and resumable.

Parses, plans, runs the job, and prints the next steps. Running the same command again resumes an interrupted
job.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ..checkpoints.grow import check_free, has_state, job_of, record
from ..checkpoints.recipe_state import notes_on
from ..checkpoints.request import Request, parse_dtype, parse_noise
from ..checkpoints.rounding import ADVISE, lost_to_rounding
from ..checkpoints.shards import SHARD_BYTES
from ..errors import MupscaleError
from ..families.configs import parse_multipliers
from ..families.loaded import batch_losses, check_memory, read_batch
from ..files.directory import Directory, read_directory
from ..files.strict import printable
from ..jobs.job import Job
from ..jobs.progress import shown_progress
from ..jobs.worker import run_job, run_worker
from ..plans.names import pattern_of
from ..text import columns
from ..training.jump import is_jump, jump_message, smaller
from ..training.recipe import Recipe
from .next_steps import DEFAULT_NOISE, next_steps
from .plan import add_source, cost, describe, evidence, planned
from .resume import begun, is_done
from .verb import add_verb


def add_to(verbs: Any) -> None:
    exact = "write a wider checkpoint that trains exactly like the base and cannot use its width yet"
    grown = "write a wider checkpoint with noise, so that it can use its new width"
    kept = ("./base ./wide -k 2", "./base ./wide -k 2 --dry-run")
    noisy = (f"./base ./wide -k 2 --noise {DEFAULT_NOISE}", "./base ./wide -k 2 --recipe tuning/recipe.json")
    more = "Streamed, with the optimizer state of a Trainer; run the same command again to resume."
    frees = "mupscale upscale adds the noise that lets it use its new width."
    for name, text, about, examples in (
        ("widen", exact, f"{frees} {more}", kept),
        ("upscale", grown, more, noisy),
    ):
        verb = add_verb(verbs, name, text, about, examples=examples)
        add_source(verb)
        verb.add_argument("out", type=Path, help="the directory to write")
        if name == "upscale":
            verb.add_argument(
                "--noise",
                metavar="SIZE",
                help="sigma=… (one reference constant for all tensors), t=… (relative to each weight's spectral norm) or "
                "paired=… (zero-sum over copies: the output does not move); without a tuned value start from "
                f"{DEFAULT_NOISE}",
            )
            verb.add_argument(
                "--recipe",
                type=Path,
                metavar="FILE",
                help="noise as mupscale tune found it, instead of --noise",
            )
            verb.add_argument(
                "--seed", type=int, default=0, metavar="N", help="seed of the noise (default: 0)"
            )
            verb.add_argument(
                "--batch",
                type=Path,
                metavar="FILE",
                help="inputs (safetensors or JSON, by argument name): print the loss before and after noise, and warn of a jump (default: none)",
            )
        _add_writing(verb)
        verb.set_defaults(run=run, noise=None, recipe=None, seed=0, batch=None, verb_name=name)


def _add_writing(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--dtype", metavar="TYPE", help="dtype of the weights: float32, bfloat16, … (default: as stored)"
    )
    verb.add_argument(
        "--no-state", action="store_true", help="do not carry the optimizer state stored with the weights"
    )
    verb.add_argument(
        "--optimizer",
        metavar="CLASS",
        help="class of the optimizer that wrote that state, such as torch.optim.AdamW (default: read from the file)",
    )
    verb.add_argument(
        "--shard-size",
        type=_bytes,
        default=SHARD_BYTES,
        metavar="SIZE",
        help="bytes of the largest file, as 500MB (default: 5GB)",
    )
    verb.add_argument(
        "--workers",
        type=int,
        default=min(2, os.cpu_count() or 1),
        metavar="N",
        help="writer threads, about 20 MiB of memory each (default: %(default)s)",
    )
    verb.add_argument(
        "--worker", metavar="I/N", help="do only share I (from 0) of N, for job arrays (default: all)"
    )
    verb.add_argument("--dry-run", action="store_true", help="plan and check everything, write nothing")
    verb.add_argument("--quiet", action="store_true", help="print no progress")


def run(chosen: argparse.Namespace) -> int:
    request = _request(chosen)
    share = _share(chosen.worker)
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
        check_free(chosen.out)
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
    print("\n" + next_steps(chosen.base, chosen.out, job))
    return 0


def _request(chosen: argparse.Namespace) -> Request:
    parse_multipliers(chosen.multipliers)
    if chosen.noise is not None and chosen.recipe is not None:
        raise MupscaleError("--recipe sets the noise: give --noise or --recipe, not both")
    if chosen.verb_name == "upscale" and chosen.noise is None and chosen.recipe is None:
        raise MupscaleError(
            "upscale needs a noise size: --noise sigma=… | t=… | paired=…, or --recipe FILE\n"
            f"  a size tuned on a proxy transfers; without one, start with --noise {DEFAULT_NOISE} (docs/continue.md shows why)\n"
            "  for the exact map without noise: mupscale widen"
        )
    if chosen.workers < 1:
        raise MupscaleError(f"--workers {chosen.workers}: expected a whole number, 1 or more")
    return Request(
        multipliers=chosen.multipliers,
        noise=None if chosen.noise is None else parse_noise(chosen.noise),
        seed=chosen.seed,
        dtype=None if chosen.dtype is None else parse_dtype(chosen.dtype),
        shard_bytes=chosen.shard_size,
        export=chosen.export,
        state=not chosen.no_state,
        optimizer=chosen.optimizer,
        recipe=None if chosen.recipe is None else replace(Recipe.read(chosen.recipe), tried=()).to_json(),
    )


def _plan(chosen: argparse.Namespace, request: Request) -> Job:
    directory = read_directory(chosen.base)
    if chosen.batch is not None:
        needed = 4 * sum(prod(place.shape) for place in directory.tensors.values())
        check_memory(needed * max(parse_multipliers(chosen.multipliers).values()) ** 2, "--batch")
    recipe = None if request.recipe is None else Recipe.from_json(request.recipe)
    notes = [] if recipe is None else notes_on(recipe, directory, request.optimizer)
    print(f"planning on a small copy of {directory.path} …", flush=True)
    family = planned(directory, chosen)
    print(describe(directory, family, request) + "\n\n" + evidence(family) + "\n", flush=True)
    job = _job(directory, chosen.out, record(directory, family, request), has_state(directory, request))
    if directory.trainer and not has_state(directory, request):
        print("the optimizer state stored with the weights is not carried")
    if directory.skipped:
        print(f"not carried: {', '.join(map(printable, directory.skipped))}")
    if request.adds_noise:
        print(_rounding(job))
    if recipe is not None:
        print(_recipe_notes(recipe, notes))
    if chosen.dry_run:
        print(cost(directory, family, request, chosen.out.absolute().parent))
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


def _share(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise MupscaleError(f"--worker {text}: expected I/N with I from 0 to N-1, such as 0/8")
    return int(found[1]), int(found[2])


def _bytes(text: str) -> int:
    """Bytes from a text.

    >>> _bytes("5GB"), _bytes("200MB")
    (5000000000, 200000000)
    """
    found = re.fullmatch(r"(\d+)\s*([kMGT]?)B?", text)
    if found is None or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size such as 5GB or 500MB")
    return int(found[1]) * int(1000 ** " kMGT".index(found[2] or " "))
