"""The command of every setting: plan it, run its stages, go on where it stopped, account for it, draw it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import torch

from mupscale import MupscaleError

from .budget import check_hardware, tell
from .data import CACHE, ROOT
from .scale import Scale
from .setting import Setting
from .stages import Experiment, Job
from .store import RESULTS

STAGES = ("tune", "base", "scratch", "ours", "peers", "ledger", "figures")


def main(
    name: str,
    scales: Mapping[str, Mapping[str, Scale]],
    of: Callable[[Scale, str], Setting],
    arguments: Sequence[str] | None = None,
) -> int:
    """Do what the command line asks for; the exit code is 1 below a bar, 2 where data or hardware are missing."""
    variants = list(scales["here"])
    parser = argparse.ArgumentParser(prog=f"python -m reproduce.{name}")
    parser.add_argument("--scale", choices=list(scales), default="here")
    parser.add_argument("--smoke", action="store_true", help="every stage at its smallest; nothing is kept")
    parser.add_argument(
        "--variant", "--optimizer", choices=variants, help="one of the variants; by default all"
    )
    parser.add_argument("--stage", choices=STAGES, help="this stage and what it needs; by default all")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with seeds of its own")
    parser.add_argument("--plan", action="store_true", help="print runs, FLOPs, time and memory, and stop")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    scale = "smoke" if options.smoke else options.scale
    chosen = {v: s for v, s in scales[scale].items() if options.variant in (None, v)}
    try:
        if scale == "smoke":
            with TemporaryDirectory() as folder:
                return _do(name, chosen, of, options, Path(folder), Path(folder), Path(folder))
        suffix = "" if scale == "here" else f"_{scale}"
        results = RESULTS / f"{name}{suffix}"
        return _do(
            name,
            chosen,
            of,
            options,
            results,
            CACHE / "reproduce" / f"{name}{suffix}",
            ROOT / "docs" / "figures",
        )
    except MupscaleError as error:
        print(error)
        return 2


def _do(
    name: str,
    scales: Mapping[str, Scale],
    of: Callable[[Scale, str], Setting],
    options: argparse.Namespace,
    results: Path,
    cache: Path,
    figures: Path,
) -> int:
    experiments = [Experiment(name, of(s, v), s, results, cache) for v, s in scales.items()]
    large = any(experiment.scale.device != "cpu" for experiment in experiments)
    if options.plan or large:
        hours = tell(experiments, timed=not large)
        if not large:
            print(f"\nhours={hours:.2f}")
        if options.plan:
            return 0
    check_hardware(experiments)
    began = monotonic()
    wanted = STAGES if options.stage is None else (options.stage,)
    for experiment in experiments:
        _share(experiment, wanted, options.workers)
    experiments = [replace(experiment) for experiment in experiments]  # to read what the workers have kept
    held = True
    if "ledger" in wanted:
        from .books import print_books

        told = [print_books(experiment) for experiment in experiments]
        held = all(told)
    if "figures" in wanted:
        from .page import write_figures

        write_figures(experiments, figures)
        if figures == ROOT / "docs" / "figures":
            from .page import write_page

            write_page()
    done = sum(experiment.curve(job) is not None for experiment in experiments for job in experiment.jobs())
    print(f"\ncurves={done} seconds={monotonic() - began:.0f}")
    return 0 if held else 1


def _share(experiment: Experiment, wanted: Sequence[str], workers: int) -> None:
    """Train in several processes: they tune together, and each takes every so manieth seed from its base on."""
    if workers > 1 and experiment.scale.device != "cpu":
        raise MupscaleError(
            f"--workers {workers}: on a GPU there is one; start other variants on other devices"
        )
    fork = get_context("fork")  # settings hold functions, which other ways of starting cannot send
    others = [fork.Process(target=_train, args=(experiment, wanted, i, workers)) for i in range(1, workers)]
    for other in others:
        other.start()
    _train(experiment, wanted, 0, workers)
    for other in others:
        other.join()
        if other.exitcode:
            raise MupscaleError(
                f"a worker ended with {other.exitcode}; what it had done is kept, start again"
            )


def _train(experiment: Experiment, wanted: Sequence[str], worker: int = 0, workers: int = 1) -> None:
    """Make what is missing of the stages, with the time that is left, by FLOPs."""
    if "tune" in wanted:
        experiment.recipe()
        if experiment.scale.paired:
            experiment.recipe("paired")
    jobs = [job for job in experiment.jobs() if job.stage in wanted and job.seed % workers == worker]
    todo = [job for job in jobs if experiment.curve(job) is None]
    left = sum(_flops(experiment, job) for job in todo)
    spent, began = 0, monotonic()
    for job in todo:
        made = experiment.run(job)
        spent += _flops(experiment, job)
        more = (monotonic() - began) * (left - spent) / max(1, spent)
        losses = made["loss"]
        told = "diverged" if made["diverged"] else f"loss {losses[-1]:.4g}"
        print(
            f"{experiment.setting.name} {job.method} seed {job.seed}: {told} in {made['seconds']:.0f} s; "
            f"about {more / 60:.0f} min left",
            flush=True,
        )


def _flops(experiment: Experiment, job: Job) -> int:
    return job.steps * experiment.setting.flops(job.width)
