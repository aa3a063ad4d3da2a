"""Options of `mupscale advise`, and which of them are needed."""

from __future__ import annotations

import argparse
from math import isfinite
from pathlib import Path
from typing import Any

from ...errors import Fault, raise_faults
from .verb import add_verb


def add_to(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "advise",
        "show whether to stay at a size, grow, or start anew with the FLOPs that are left",
        "Losses are expected only between sizes and budgets of measured runs: small MLPs that come with the package, or "
        "yours (--losses). Elsewhere FLOPs, samples per parameter and steps are shown.",
        examples=(
            "./base --budget 3e18 --to 248e6",
            "--params 124e6 --spent 2e18 --budget 3e18 --to 248e6 496e6 --losses runs.json",
        ),
    )
    verb.add_argument(
        "base",
        nargs="?",
        type=Path,
        help="a Hugging Face directory: parameters are counted in its headers, FLOPs are read from trainer_state.json",
    )
    verb.add_argument("--budget", type=float, metavar="FLOPS", help="FLOPs that are left; needed")
    verb.add_argument(
        "--to", type=float, nargs="+", metavar="N", help="parameters of the wider models; needed"
    )
    verb.add_argument(
        "--params", type=float, metavar="N", help="parameters of the base, where no directory is named"
    )
    verb.add_argument(
        "--spent",
        type=float,
        metavar="FLOPS",
        help="FLOPs that were spent on the base (default: what trainer_state.json says)",
    )
    verb.add_argument(
        "--mid-run",
        action="store_true",
        help="the base's schedule has not ended (default: what trainer_state.json says, or that it has)",
    )
    verb.add_argument(
        "--losses",
        type=Path,
        metavar="FILE",
        help="your finished runs as JSON: [[parameters, FLOPs, held-out loss], …] (default: the stored runs)",
    )
    verb.add_argument(
        "--batch", type=int, metavar="B", help="samples of a step (default: steps are not shown)"
    )
    verb.add_argument("--context", type=int, default=1, metavar="C", help="tokens of a sample (default: 1)")
    verb.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    _check(chosen)
    from .. import advise

    return advise.run(chosen)


def _check(chosen: argparse.Namespace) -> None:
    faults = []
    if (chosen.base is None) == (chosen.params is None):
        both = (
            "given with a directory, whose headers say it"
            if chosen.params
            else "not given, and no directory is"
        )
        faults.append(
            Fault(
                "option.said_elsewhere" if chosen.params else "option.not_given",
                "--params",
                both,
                "name a directory or write --params 124e6",
            )
        )
    if chosen.base is None and chosen.spent is None:
        faults.append(
            Fault(
                "option.not_given",
                "--spent",
                "not given",
                "write --spent 2e18, or 0 for a base that is not trained yet",
            )
        )
    for name, value, example in (("--budget", chosen.budget, "3e18"), ("--to", chosen.to, "248e6")):
        if value is None:
            faults.append(
                Fault("option.not_given", name, "not given", f"write {name} {example}, for example")
            )
    numbers = {"--budget": chosen.budget, "--params": chosen.params, "--spent": chosen.spent}
    for name, number in numbers.items():
        if number is not None and not (
            isfinite(number) and (number > 0 or (name == "--spent" and not number))
        ):
            faults.append(
                Fault(
                    "option.not_a_positive_number",
                    name,
                    f"{number:g}, expected a finite number above 0",
                    f"write {name} 3e18, for example",
                )
            )
    raise_faults("no advice can be given", faults)
