"""Options of `mupscale demo`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...errors import MupscaleError
from .verb import add_verb


def add_to(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "demo",
        "show an MLP that continues at four times the width, equal to the last digit, and a control that does not",
        examples=("", "--steps 500 --plot demo.svg"),
    )
    verb.add_argument(
        "--steps", type=int, default=200, metavar="T", help="steps after widening (default: %(default)s)"
    )
    verb.add_argument(
        "--plot",
        type=Path,
        default=Path("mupscale-demo.png"),
        metavar="FILE",
        help="where to write the figure (default: %(default)s)",
    )
    verb.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    if chosen.steps < 1:
        raise MupscaleError(
            f"--steps {chosen.steps}: expected a whole number, 1 or more", code="option.below_one"
        )
    if not chosen.plot.absolute().parent.is_dir() or chosen.plot.suffix.lower() not in (
        ".png",
        ".pdf",
        ".svg",
    ):
        raise MupscaleError(
            f"--plot {chosen.plot}: expected a .png, .pdf or .svg file in a folder that exists",
            code="option.not_a_plot_file",
        )
    from .. import demo

    return demo.run(chosen)
