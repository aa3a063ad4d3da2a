"""The command of the study: make the runs that are missing, print what is stored, or try everything at its smallest."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from mupscale import MupscaleError

from ..data import CACHE
from ..frontier import text
from ..frontier.command import compare
from ..frontier.train import Trainer
from ..store import RESULTS, Store
from .arms import LARGER, MIXTURE, ORDER, Sizes, missing
from .grow import grow
from .models import setting
from .page import FILE, show

SMOKE = Sizes(budget=6 * Sizes().budget // 4000, rates=(2**-7,), noises=(0.1,), extend=0, seeds=(1,))
SMOKE_LARGER = replace(SMOKE, width=LARGER.width, arms=LARGER.arms, share=LARGER.share)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; the exit code is 1 if runs are missing or the page differs, 2 where data are missing."""
    parser = argparse.ArgumentParser(prog="python -m reproduce.directions")
    parser.add_argument("--stage", choices=("all", "print", "smoke"), default="all")
    parser.add_argument("--runs", type=int, help="stop after so many runs; by default when all is done")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        if options.stage == "smoke":
            with TemporaryDirectory() as folder:
                return smoke(Path(folder))
        if options.stage == "all":
            train(trainer(), (Sizes(), LARGER, MIXTURE, ORDER), options.runs)
        return max(show(trainer().known, Sizes(), LARGER), compare())
    except MupscaleError as error:
        print(error)
        return 2


def trainer(results: Path = RESULTS, cache: Path = CACHE / "reproduce") -> Trainer:
    return Trainer(Store(results / FILE), cache / "directions", setting, grow)


def train(made: Trainer, studied: Sequence[Sizes], runs: int | None = None) -> None:
    """Make the runs that are missing, one after the other; each result may decide which come next."""
    for number in count():
        spec = next(filter(None, (missing(made.known, sizes) for sizes in studied)), None)
        if spec is None or number == runs:
            return
        made.run(spec)


def smoke(folder: Path) -> int:
    """Every arm at its smallest, on made-up data; nothing is kept."""
    small = partial(setting, tokens=text.made_up, measured=1)
    made = Trainer(Store(folder / FILE), folder / "cache", small, grow)
    order = replace(SMOKE, arms=ORDER.arms)
    mixture = replace(SMOKE, arms=MIXTURE.arms, experts=MIXTURE.experts, seeds=())
    train(made, (SMOKE, SMOKE_LARGER, order, mixture))
    return show(made.known, SMOKE, SMOKE_LARGER)
