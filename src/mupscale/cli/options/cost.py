"""Options of `mupscale cost`, and which of them belong together."""

from __future__ import annotations

import argparse
from math import isfinite
from pathlib import Path
from typing import Any

from ...errors import Fault, raise_faults
from .verb import add_verb

_EXAMPLES = {"-k": 2, "--proxy": 128, "--steps": 10000, "--width": 1024, "--batch": 256, "--context": 1024}


def add_to(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "cost",
        "show FLOPs of training from scratch and of growing, and when growing does not pay",
        "A base of width n is grown k times; noise and learning rate are tuned on a proxy that grows from n0 to "
        "k·n0. FLOPs are those of forward and backward, by the paper's formulas and counted on the model, which "
        "takes no memory.",
        examples=(
            "proxy.py -k 4 --width 500 --proxy 100 --steps 100000",
            "./base -k 2 --steps 10000 --batch 256 --context 1024",
        ),
    )
    verb.add_argument(
        "model",
        nargs="?",
        type=Path,
        help="a Python file with build(width) -> module and inputs() -> what the module is called with in one step; or "
        "a Hugging Face directory or config.json of a language model",
    )
    verb.add_argument("-k", type=int, metavar="K", help="how many times wider, 2 or more; needed")
    verb.add_argument(
        "--proxy",
        type=int,
        metavar="N0",
        help="width of the proxy's base, in units; needed for a Python file (default for a directory: the one that mupscale "
        "tune makes)",
    )
    verb.add_argument(
        "--steps", type=int, metavar="T", help="steps of the run from scratch, and of each trial; needed"
    )
    verb.add_argument(
        "--width",
        type=int,
        metavar="N",
        help="width of the base, in units; needed for a Python file, and for that only",
    )
    verb.add_argument(
        "--batch",
        type=int,
        metavar="B",
        help="sequences in a step; needed for a configuration, and for that only",
    )
    verb.add_argument(
        "--context",
        type=int,
        metavar="C",
        help="tokens in a sequence; needed for a configuration, and for that only",
    )
    verb.add_argument(
        "--base-steps", type=int, metavar="T", help="steps of the base (default: as from scratch)"
    )
    verb.add_argument(
        "--trials",
        type=float,
        default=25,
        metavar="R",
        help="tuning, in full runs of the grown proxy (default: 25, a grid of 5 x 5; runs that are "
        "stopped early count for their share)",
    )
    verb.add_argument(
        "--upscaled-steps",
        type=int,
        metavar="T",
        help="steps after which the upscaled run is as good as the one from scratch (default: not known)",
    )
    verb.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    _check(chosen)
    from .. import cost

    return cost.run(chosen)


def _check(chosen: argparse.Namespace) -> None:
    faults = []
    named = {"-k": chosen.k, "--steps": chosen.steps}
    for_file = {"--width": chosen.width}
    proxy = {"--proxy": chosen.proxy}
    for_stock = {"--batch": chosen.batch, "--context": chosen.context}
    given = {**named, **proxy, **for_file, **for_stock}
    given |= {"--base-steps": chosen.base_steps, "--upscaled-steps": chosen.upscaled_steps}
    if chosen.model is None:
        faults = [
            Fault(
                "option.not_given",
                "model",
                "not given",
                "name a Python file or a directory",
            )
        ]
    else:
        stock = chosen.model.suffix != ".py"
        needed, foreign = (for_stock, for_file) if stock else (for_file, for_stock)
        faults = [
            Fault(
                "option.not_given",
                name,
                "not given, and the cost depends on it",
                f"write {name} {_EXAMPLES[name]}, for example",
            )
            for name, value in {**named, **({} if stock else proxy), **needed}.items()
            if value is None
        ]
        says = "the configuration says it" if stock else "inputs() says it"
        faults += [
            Fault("option.said_elsewhere", name, says, "leave it out")
            for name, value in foreign.items()
            if value is not None
        ]
        faults += [
            Fault(
                "option.below_least",
                name,
                f"{value}, expected {least} or more",
                f"write {name} {_EXAMPLES.get(name, 10000)}, for example",
            )
            for name, value in given.items()
            if value is not None and value < (least := 2 if name == "-k" else 1)
        ]
        if not (isfinite(chosen.trials) and chosen.trials >= 0):
            faults.append(
                Fault(
                    "option.below_least",
                    "--trials",
                    f"{chosen.trials}, expected a number, 0 or more",
                    "write --trials 25",
                )
            )
    raise_faults("the cost cannot be computed", faults)
