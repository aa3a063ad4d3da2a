"""The command of the study: make what is missing of a stage, print what is stored, or try everything at its smallest."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from mupscale import MupscaleError

from ..data import CACHE
from ..store import RESULTS, Store
from .order import STAGES, next_missing
from .sizes import HERE, SMOKE, Sizes
from .tables import Book, show
from .task import made_up, task
from .train import Trainer

STORE = RESULTS / "frontier.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; the exit code is 1 if cited runs are missing, 2 where data are."""
    parser = argparse.ArgumentParser(prog="python -m reproduce.frontier")
    parser.add_argument("--stage", choices=("all", *STAGES, "print", "smoke"), default="all")
    parser.add_argument("--runs", type=int, help="stop after so many runs; by default when all is done")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        if options.stage == "smoke":
            with TemporaryDirectory() as folder:
                return smoke(Path(folder))
        trainer = Trainer(Store(STORE), CACHE / "reproduce" / "frontier", task)
        if options.stage != "print":
            train(trainer, HERE, options.stage, options.runs)
        return show(Book(trainer.known, HERE))
    except MupscaleError as error:
        print(error)
        return 2


def train(trainer: Trainer, sizes: Sizes, stage: str = "all", runs: int | None = None) -> None:
    """Make the runs that are missing, one after the other; each result may decide which come next."""
    for number in count():
        spec = next_missing(trainer.known, sizes, stage)
        if spec is None or number == runs:
            return
        trainer.run(spec)


def smoke(folder: Path) -> int:
    """Every stage at its smallest, on made-up rows; nothing is kept."""
    trainer = Trainer(
        Store(folder / "frontier.jsonl"),
        folder / "cache",
        lambda layers: task(layers, made_up, SMOKE.reference),
    )
    train(trainer, SMOKE)
    return show(Book(trainer.known, SMOKE))
