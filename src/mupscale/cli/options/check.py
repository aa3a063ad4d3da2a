"""Options of `mupscale check`."""

from __future__ import annotations

import argparse
from typing import Any

from ...errors import MupscaleError
from .verb import add_threads, add_verb, check_threads, location

LEVELS = ("bytes", "layout", "noise", "model")
"""What may be compared with the base, in the order in which it is checked."""


def add_to(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "check",
        "prove that a directory is the result of growing a base",
        "Level by level: bytes (every file, bit for bit, noise drawn again), layout (the plan found again and "
        "proved on a small copy, with optimizer steps), noise (its sizes, measured again), model (outputs and gradients of the real weights).",
        examples=("./wide --base ./base", "./wide --base ./base --levels bytes,layout,model", "./wide"),
    )
    verb.add_argument("wide", type=location, help="the directory that growing produced, here or at a URL")
    verb.add_argument(
        "--base",
        type=location,
        metavar="DIR",
        help="the directory that was grown, here or at a URL (default: none; the digests stored with the result are compared)",
    )
    verb.add_argument(
        "--levels",
        type=_levels,
        metavar="A,B,…",
        help="which of bytes, layout, noise and model; model loads both models and does not apply to a result with noise "
        "(default: bytes,layout, and noise where there is any)",
    )
    add_threads(verb, "threads that make and compare bytes")
    verb.add_argument("--quiet", action="store_true", help="print no progress")
    verb.set_defaults(run=run)


def _levels(text: str) -> tuple[str, ...]:
    """Levels from a text with commas, in the order in which they are checked.

    >>> _levels("model,bytes")
    ('bytes', 'model')
    """
    named = [word.strip() for word in text.split(",")]
    if unknown := [word for word in named if word not in LEVELS]:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is no level; write {', '.join(LEVELS)} or some of them"
        )
    return tuple(level for level in LEVELS if level in named)


def run(chosen: argparse.Namespace) -> int:
    check_threads(chosen)
    if chosen.base is None and chosen.levels is not None:
        raise MupscaleError(
            "the levels compare with the base; write mupscale check WIDE --base BASE",
            code="option.level_needs_base",
        )
    from .. import check

    return check.run(chosen)
