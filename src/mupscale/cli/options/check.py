"""Options of `mupscale check`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ...errors import MupscaleError
from .verb import add_verb, location


def add_to(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "check",
        "prove that a directory is the result of growing a base",
        "Level by level: bytes (every file, bit for bit, noise drawn again), layout (the plan found again and "
        "proved on a small copy, with optimizer steps), model (outputs and gradients of the real weights).",
        examples=("./base ./wide", "./base ./wide --bytes --model", "./wide"),
    )
    verb.add_argument(
        "base",
        type=location,
        help="the directory that was grown, here or at a URL; alone, a result whose stored digests are compared",
    )
    verb.add_argument(
        "wide", type=location, nargs="?", help="the directory that growing it produced, here or at a URL"
    )
    verb.add_argument(
        "--bytes",
        dest="levels",
        action="append_const",
        const="bytes",
        help="check bytes only (default: both)",
    )
    verb.add_argument(
        "--layout",
        dest="levels",
        action="append_const",
        const="layout",
        help="check the layout only (default: both)",
    )
    verb.add_argument(
        "--model",
        action="store_true",
        help="also load both models and compare outputs and gradients (not applicable to a result with noise)",
    )
    verb.add_argument(
        "--workers",
        type=int,
        default=min(2, os.cpu_count() or 1),
        metavar="N",
        help="threads that make and compare bytes (default: %(default)s)",
    )
    verb.add_argument("--quiet", action="store_true", help="print no progress")
    verb.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    if chosen.workers < 1:
        raise MupscaleError(
            f"--workers {chosen.workers}: expected a whole number, 1 or more", code="option.below_one"
        )
    from .. import check

    return check.run(chosen)
