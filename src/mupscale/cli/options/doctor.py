"""Options of `mupscale doctor`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...errors import MupscaleError
from .verb import add_verb


def add_to(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "doctor",
        "show versions, threads, free disk, extras and what they enable, and test this machine",
        "Exit status 1 when a package is older than this version needs, widening is not exact here, or --device finds a fault.",
        examples=("", "--disk /scratch", "--device cuda"),
    )
    verb.add_argument(
        "--device",
        metavar="NAME",
        help="run every proof on this device too (cpu, cuda, mps, xpu, … as torch names it), with a timing, and print a "
        "report to paste into an issue",
    )
    verb.add_argument(
        "--disk", type=Path, default=Path(), metavar="DIR", help="where to look for space (default: here)"
    )
    verb.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    if not chosen.disk.is_dir():
        raise MupscaleError(
            f"--disk {chosen.disk}: expected a folder that exists", code="option.not_a_folder"
        )
    if chosen.device is not None:
        from ...training.check.device_proofs import found_device

        found_device(chosen.device)
    from .. import doctor

    return doctor.run(chosen)
