"""The command of the study: make what is missing of a stage, print what is stored, or try everything at its smallest."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from mupscale import MupscaleError

from .book import Book
from .order import STAGES, next_missing
from .page import books, differences
from .sizes import Sizes
from .studies import SMALLEST, STUDIES
from .tables import show
from .train import Trainer


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; the exit code is 1 if cited runs are missing, 2 where data are."""
    parser = argparse.ArgumentParser(prog="python -m reproduce.frontier")
    parser.add_argument("--stage", choices=("all", *STAGES, "print", "smoke"), default="all")
    parser.add_argument("--study", choices=tuple(STUDIES), default="mlp", help="the model that is trained")
    parser.add_argument("--runs", type=int, help="stop after so many runs; by default when all is done")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        if options.stage == "smoke":
            with TemporaryDirectory() as folder:
                return smoke(Path(folder))
        if options.stage != "print":
            study = STUDIES[options.study]
            train(study.trainer(), study.sizes, options.stage, options.runs)
        return max(show(books()), compare())
    except MupscaleError as error:
        print(error)
        return 2


def compare() -> int:
    """1 if the page says otherwise than the store."""
    found = differences()
    for line in found:
        print(line)
    return 1 if found else 0


def train(trainer: Trainer, sizes: Sizes, stage: str = "all", runs: int | None = None) -> None:
    """Make the runs that are missing, one after the other; each result may decide which come next."""
    for number in count():
        spec = next_missing(trainer.known, sizes, stage)
        if spec is None or number == runs:
            return
        trainer.run(spec)


def smoke(folder: Path) -> int:
    """Every stage of every study at its smallest, on made-up data; nothing is kept."""
    books = []
    for study in SMALLEST.values():
        trainer = study.trainer(folder, folder / "cache")
        train(trainer, study.sizes)
        books.append(Book.of(study, trainer))
    return show(books)
