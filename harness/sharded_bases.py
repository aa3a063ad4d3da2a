"""Trained bases on the disk for jobs in shards, what one process makes of them, and streams that are killed in the middle."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import mupscale as mu
from harness.forks import fork
from harness.models import CASES
from harness.runs import step
from harness.sharded_cases import (
    NOISES,
    SEED,
    SIZES,
    adamw,
    llama_model,
    model_named,
    request,
    save,
    words_loss,
)
from mupscale.checkpoints.base import Base
from mupscale.checkpoints.growth_job import job_of, record
from mupscale.checkpoints.request import Request
from mupscale.checkpoints.state.trainer_state import trainer_order
from mupscale.families.process import plan_in_process
from mupscale.families.record import FamilyPlan
from mupscale.jobs.job import Job
from mupscale.jobs.partial import partial
from mupscale.jobs.worker import run_job
from mupscale.plans.ends import identity_plan


def train(name: str, model: torch.nn.Module, steps: int = 3) -> mu.Run:
    """A base with moments that are not zero."""
    run = mu.Run(model, adamw(model, identity_plan(model)))
    for number in range(steps):
        step(run, CASES[name].loss(model, number) if name in CASES else words_loss(model, number))
    return run


def save_directory(run: mu.Run, path: Path) -> None:
    """What the stock Trainer leaves: weights, config, and optimizer state by position."""
    model = run.model
    model.save_pretrained(path)  # type: ignore[operator]
    named = dict(model.named_parameters())
    decayed, bare = ([named[n] for n in names] for names in trainer_order(model, {}))
    stock = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": bare, "weight_decay": 0.0}]
    )
    stock.state.update(run.optimizers[0].state)
    torch.save(stock.state_dict(), path / "optimizer.pt")


def write_llama(folder: Path, goals: Iterable[str], **options: Any) -> mu.Run:
    """A trained Llama as a checkpoint of torch.distributed and as a directory, with a family plan for every goal."""
    torch.manual_seed(0)
    run = train("llama", llama_model(SIZES))
    save(run, folder / "llama.dcp1", flat=True)
    save_directory(run, folder / "hf")
    for goal in goals:
        asked = request(goal, None)
        grown = plan_in_process(folder / "hf", asked.goal.k_text, to=asked.goal.to_text, **options)
        (folder / f"family{goal}.json").write_text(grown.to_json())
    return run


def grown_here(run: mu.Run, name: str, goal: str, noise: str) -> mu.Run:
    """What `grow` or `upscale` make of a base in one process."""
    model, kind = model_named(name), NOISES[noise][0]
    make, plan = functools.partial(model.wide, goal), model.plan(goal)
    if kind is None:
        return mu.grow(run, make, plan=plan)
    return mu.upscale(run, make, kind, seed=SEED, plan=plan)


def grow(base: Path, out: Path, family: FamilyPlan, request: Request, kill: bool) -> bool:
    """What `mupscale upscale` writes, undisturbed, or by a process that is killed in the middle and run again."""
    start = Base(base)
    job = job_of(start, out, record(start, family, request), block_bytes=4096)
    cut_short = kill and kill_in_the_middle(job)
    run_job(job)
    return cut_short


def kill_in_the_middle(job: Job, workers: int = 1) -> bool:
    """Run a job in a process that is killed once it has written something; whether that was before it had finished."""
    child = fork(lambda: run_job(job, workers=workers))
    journals = partial(job.folder)
    while not list(journals.glob("*journal*")) and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return not job.folder.exists()
