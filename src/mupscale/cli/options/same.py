"""Options of `mupscale same`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .verb import add_threads, add_verb, check_threads, location

PROFILES = ("strict", "standard", "relaxed")


def add_to(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "same",
        "show whether two checkpoints continue the same run",
        "Of the same or of different formats. Weights, float32 copies, moments, step counts, settings, schedule and random states are "
        "compared by name, in the memory of a few blocks; nothing of a pickle is executed. Exit status: 0 the same, 1 different, "
        "2 cannot tell.",
        examples=("./before ./after", "./hf ./dcp --profile standard --json same.json"),
    )
    for name in ("a", "b"):
        verb.add_argument(name, type=location, help="a checkpoint, here or at a URL")
    verb.add_argument(
        "--profile",
        choices=PROFILES,
        default="strict",
        help="strict (bit for bit), standard (one unit in the last place) or relaxed (sums in another order) (default: %(default)s)",
    )
    verb.add_argument(
        "--config",
        type=location,
        help="the config.json of the model, for names of Megatron or torchtitan where neither checkpoint tells the sizes of heads",
    )
    verb.add_argument(
        "--batch",
        type=Path,
        help="inputs by name, as JSON or safetensors: the stock model is run with both, for loss, gradients and one step of Adam",
    )
    add_threads(verb, "threads that read and compare")
    verb.add_argument("--quiet", action="store_true", help="print no progress")
    verb.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    check_threads(chosen)
    from .. import same

    return same.run(chosen)
