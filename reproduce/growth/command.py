"""The command of the bench: make what is missing of a part, print what is stored, or try everything at its smallest."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from mupscale import MupscaleError

from .book import Book
from .choose import Arm, Known, scratch
from .methods import METHODS
from .page.marked import differences, show
from .page.stored import Stored, stored
from .questions import bench, directions, order
from .questions.order import STAGES, next_missing
from .settings import stock, text
from .spec import Spec
from .studies import DIRECTIONS, SMALLEST, STUDIES, directions_trainer
from .train import Trainer

Missing = Callable[[Known], Spec | None]
"""The first run of what is asked that is not stored; None when all are."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; the exit code is 1 if cited runs are missing, 2 where data are."""
    parser = argparse.ArgumentParser(prog="python -m reproduce.growth")
    parser.add_argument("--stage", choices=("all", *STAGES, "bench", "plan", "print", "smoke"), default="all")
    parser.add_argument("--study", choices=(*STUDIES, DIRECTIONS), default="mlp", help="what is trained")
    parser.add_argument("--method", choices=tuple(METHODS), help="of --stage bench: what grows")
    parser.add_argument("--runs", type=int, help="stop after so many runs; by default when all is done")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.stage == "bench" and options.method is None:
        parser.error("--stage bench: say which way of growing with --method")
    try:
        if options.stage == "smoke":
            with TemporaryDirectory() as folder:
                return smoke(Path(folder))
        if options.stage == "plan":
            return plan()
        if options.stage != "print":
            train(*asked(options.stage, options.study, options.method), options.runs)
        return max(show(stored()), compare())
    except MupscaleError as error:
        print(error)
        return 2


def asked(stage: str, study: str, method: str | None = None) -> tuple[Trainer, Missing]:
    """Who trains what is asked, and the run that comes next."""
    if method is not None:
        stocked = METHODS[method].kind != "width"
        sizes = STUDIES["text" if stocked else study].sizes
        made = directions_trainer() if stocked else STUDIES[study].trainer()
        runs = partial(bench.specs, sizes=sizes, name=method)
        return made, lambda known: next((spec for spec in runs(known) if known(spec) is None), None)
    if study == DIRECTIONS:
        return directions_trainer(), _missing_directions(directions.ALL)
    sizes = STUDIES[study].sizes
    return STUDIES[study].trainer(), lambda known: next_missing(known, sizes, stage)


def plan(say: Callable[[str], object] = print) -> int:
    """Core hours of what is stored, and of what is listed and lacks, by the FLOPs of a run. Tuning may ask for more runs."""
    parts = [
        (f"{name} {stage}", study.trainer(), partial(order.specs, sizes=study.sizes, stage=stage))
        for name, study in STUDIES.items()
        for stage in study.sizes.stages
    ]
    for sizes in directions.ALL:
        parts.append((DIRECTIONS, directions_trainer(), partial(directions.specs, sizes=sizes)))
    for name, trainer, listed in parts:
        results = [result for _, result in trainer.all() if result.get("cpu_seconds")]
        done = sum(one["flops"] for one in results) or 1
        rate = sum(one["cpu_seconds"] for one in results) / done / 3600
        runs = set(listed(trainer.known))
        lacking = [spec for spec in runs if trainer.known(spec) is None]
        left = rate * sum(spec.budget * (1 - spec.at % 1) for spec in lacking)
        say(f"{name}: {len(runs)} runs are listed, {len(lacking)} lack, {left:.1f} core hours")
    return 0


def compare() -> int:
    """1 if the page says otherwise than the store."""
    found = differences()
    for line in found:
        print(line)
    return 1 if found else 0


def train(trainer: Trainer, missing: Missing, runs: int | None = None) -> None:
    """Make the runs that are missing, one after the other; each result may decide which come next."""
    for number in count():
        spec = missing(trainer.known)
        if spec is None or number == runs:
            return
        trainer.run(spec)


def smoke(folder: Path) -> int:
    """Every part of every study and every method at its smallest, on made-up data; nothing is kept."""
    books, specs = [], []
    for study in SMALLEST.values():
        trainer = study.trainer(folder, folder / "cache")
        train(trainer, partial(next_missing, sizes=study.sizes))
        if study.name == "mlp":
            base = study.sizes.bases[0]
            _try_methods(trainer, scratch(trainer.known, study.sizes, base.width, base.units), ("width",))
        books.append(Book.of(study, trainer))
        specs += trainer.all()
    whole = directions.Sizes()
    small = replace(
        whole,
        budget=whole.budget * 6 // 4000,
        rates=(2**-7,),
        noises=(0.1,),
        extend=0,
        share=0.25,
        seeds=(0,),
    )
    parts = (
        small,
        replace(small, width=directions.LARGER.width, arms=directions.DEEP),
        replace(small, arms=directions.ORDER.arms),
        replace(small, arms=directions.MIXTURE.arms, experts=stock.MIXTRAL),
    )
    setting = partial(stock.setting, tokens=text.made_up, measured=1)
    made = directions_trainer(folder, folder / "cache", setting)
    train(made, _missing_directions(parts))
    _try_methods(made, directions.base(made.known, small), ("depth", "experts"))
    specs += made.all()
    return show(Stored(books, made.known, *parts, specs=[spec for spec, _ in specs]))


def _try_methods(trainer: Trainer, base: Arm, kinds: Sequence[str]) -> None:
    """Train every method of these kinds for a quarter of the base's FLOPs."""
    assert base.chosen is not None
    for method in METHODS.values():
        if method.kind in kinds:
            trainer.run(method.of(base.chosen, base.chosen.budget // 4))


def _missing_directions(parts: Sequence[directions.Sizes]) -> Missing:
    return lambda known: next(filter(None, (directions.missing(known, sizes) for sizes in parts)), None)
