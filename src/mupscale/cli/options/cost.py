"""Options of `mupscale cost`, and which of them belong together."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from ...errors import Fault, raise_faults
from .verb import add_verb, option

_EXAMPLES = {
    "-k": "2",
    "--proxy": "128",
    "--steps": "10000",
    "--width": "1024",
    "--batch": "256",
    "--context": "1024",
    "--wide-params": "248e6",
    "--params": "124e6",
    "--spent": "2e18",
    "--budget": "3e18",
}
_PLANNED = ("proxy", "steps", "width", "base_steps", "trials", "upscaled_steps")
"""What only the cost of a planned growth depends on."""
_LEFT = ("wide_params", "params", "spent", "mid_run", "like")
"""What only the question about a budget depends on."""
_TRIALS = 25.0


def add_to(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "cost",
        "show what growing costs and when it does not pay, or what to do with a budget",
        "A base of width n is grown k times; noise and learning rate are tuned on a proxy that grows from n0 to "
        "k·n0. FLOPs are those of forward and backward, by the paper's formulas and counted on the model, which "
        "takes no memory. With --budget: stay at a size, grow and how, or start anew with the FLOPs that are left; losses are "
        "compared only inside the range of measured runs, which are small MLPs and Llamas, and elsewhere there is arithmetic.",
        examples=(
            "./base -k 2 --steps 10000 --batch 256 --context 1024",
            "proxy.py -k 4 --width 500 --proxy 100 --steps 100000",
            "./base -k 2 --spent 2e18 --budget 3e18",
            "--like mlp --params 4103 --spent 1e11 --wide-params 12295 --budget 1e11",
        ),
    )
    verb.add_argument(
        "model",
        nargs="?",
        type=Path,
        help="a Hugging Face directory or config.json of a language model; or a Python file with build(width) -> module "
        "and inputs() -> what the module is called with in one step",
    )
    verb.add_argument("-k", type=int, metavar="K", help="how many times wider, 2 or more")
    verb.add_argument("--batch", type=int, metavar="B", help="sequences in a step; for a configuration")
    verb.add_argument("--context", type=int, metavar="C", help="tokens in a sequence; for a configuration")
    _add_planned(verb.add_argument_group("what growing costs"))
    _add_left(verb.add_argument_group("what to do with a budget"))
    verb.set_defaults(run=run)


def _add_planned(group: Any) -> None:
    group.add_argument(
        "--steps", type=int, metavar="T", help="steps of the run from scratch, and of each trial; needed"
    )
    group.add_argument(
        "--proxy",
        type=int,
        metavar="N0",
        help="width of the proxy's base, in units; needed for a Python file (default for a directory: the one that mupscale "
        "tune makes)",
    )
    group.add_argument(
        "--width", type=int, metavar="N", help="width of the base, in units; for a Python file"
    )
    group.add_argument(
        "--base-steps", type=int, metavar="T", help="steps of the base (default: as from scratch)"
    )
    group.add_argument(
        "--trials",
        type=float,
        metavar="R",
        help="tuning, in full runs of the grown proxy (default: 25, a grid of 5 x 5; runs that are "
        "stopped early count for their share)",
    )
    group.add_argument(
        "--upscaled-steps",
        type=int,
        metavar="T",
        help="steps after which the upscaled run is as good as the one from scratch (default: not known)",
    )


def _add_left(group: Any) -> None:
    group.add_argument(
        "--budget", type=float, metavar="FLOPS", help="FLOPs that are left; 6 for each parameter and token"
    )
    group.add_argument(
        "--wide-params",
        type=float,
        nargs="+",
        metavar="N",
        help="parameters of the wider models, in the place of -k",
    )
    group.add_argument(
        "--params", type=float, metavar="N", help="parameters of the base, where no directory is named"
    )
    group.add_argument(
        "--spent",
        type=float,
        metavar="FLOPS",
        help="FLOPs that were spent on the base (default: what trainer_state.json says)",
    )
    group.add_argument(
        "--mid-run",
        action="store_true",
        default=None,
        help="the base's schedule has not ended (default: what trainer_state.json says, or that it has)",
    )
    group.add_argument(
        "--like",
        choices=("llama", "mlp"),
        help="the kind of model whose measured runs count (default: llama for a directory with that model_type, else none)",
    )


def run(chosen: argparse.Namespace) -> int:
    _one_question(chosen)
    if chosen.budget is not None:
        raise_faults("no advice can be given", [*_not_given_for_budget(chosen), *_not_numbers(chosen)])
        from .. import budget

        return budget.run(chosen)
    raise_faults("the cost cannot be computed", [*_not_given(chosen), *_below_least(chosen)])
    chosen.trials = _TRIALS if chosen.trials is None else chosen.trials
    from .. import cost

    return cost.run(chosen)


def _one_question(chosen: argparse.Namespace) -> None:
    """Raise for options of the other question than the one that --budget or its absence asks."""
    others, when = (_LEFT, "without") if chosen.budget is None else (_PLANNED, "with")
    remedy = "write --budget 3e18, for example" if chosen.budget is None else "leave it out"
    faults = [
        Fault("option.other_question", option(name), f"it says nothing {when} --budget", remedy)
        for name in others
        if getattr(chosen, name) is not None
    ]
    raise_faults("these options do not go together", faults)


def _missing(values: Mapping[str, Any], why: str) -> Iterator[Fault]:
    for name, value in values.items():
        if value is None:
            remedy = f"write {name} {_EXAMPLES[name]}, for example"
            yield Fault("option.not_given", name, f"not given{why}", remedy)


def _not_given(chosen: argparse.Namespace) -> Iterator[Fault]:
    if chosen.model is None:
        yield Fault("option.not_given", "model", "not given", "name a Python file or a directory")
        return
    stock = chosen.model.suffix != ".py"
    for_file = {"--width": chosen.width}
    for_stock = {"--batch": chosen.batch, "--context": chosen.context}
    needed, foreign = (for_stock, for_file) if stock else (for_file, for_stock)
    named = {"-k": chosen.k, "--steps": chosen.steps, **({} if stock else {"--proxy": chosen.proxy})}
    yield from _missing({**named, **needed}, ", and the cost depends on it")
    says = "the configuration says it" if stock else "inputs() says it"
    for name, value in foreign.items():
        if value is not None:
            yield Fault("option.said_elsewhere", name, says, "leave it out")


def _below_least(chosen: argparse.Namespace) -> Iterator[Fault]:
    for name in ("k", "steps", "proxy", "width", "batch", "context", "base_steps", "upscaled_steps"):
        value, least = getattr(chosen, name), 2 if name == "k" else 1
        if value is not None and value < least:
            remedy = f"write {option(name)} {_EXAMPLES.get(option(name), '10000')}, for example"
            yield Fault("option.below_least", option(name), f"{value}, expected {least} or more", remedy)
    if chosen.trials is not None and not (isfinite(chosen.trials) and chosen.trials >= 0):
        what = f"{chosen.trials}, expected a number, 0 or more"
        yield Fault("option.below_least", "--trials", what, "write --trials 25")


def _not_given_for_budget(chosen: argparse.Namespace) -> Iterator[Fault]:
    if chosen.batch is None and chosen.context is not None:
        yield from _missing({"--batch": chosen.batch}, ", and --context alone says nothing")
    if chosen.batch is not None and (
        chosen.like == "llama" or (chosen.model is not None and chosen.like is None)
    ):
        yield from _missing({"--context": chosen.context}, ", and a step of --batch sequences depends on it")
    if chosen.model is None:
        yield from _missing({"--params": chosen.params, "--spent": chosen.spent}, ", and no directory is")
        yield from _missing({"--wide-params": chosen.wide_params}, "")
        if chosen.k is not None:
            what = "a directory says how many parameters that is, and none is named"
            yield Fault("option.not_given", "-k", what, "write --wide-params 248e6, for example")
        return
    if chosen.params is not None:
        what = "given with a directory, whose headers say it"
        yield Fault("option.said_elsewhere", "--params", what, "leave it out")
    if chosen.k is None:
        yield from _missing({"--wide-params": chosen.wide_params}, ", nor -k")
    elif chosen.wide_params is not None:
        yield Fault("option.said_elsewhere", "--wide-params", "-k says it", "leave out one of them")
    elif chosen.k < 2:
        yield Fault("option.below_least", "-k", f"{chosen.k}, expected 2 or more", "write -k 2, for example")


def _not_numbers(chosen: argparse.Namespace) -> Iterator[Fault]:
    for name in ("budget", "params", "spent"):
        number = getattr(chosen, name)
        if number is not None and not (isfinite(number) and (number > 0 or (name == "spent" and not number))):
            what = f"{number:g}, expected a finite number above 0"
            remedy = f"write {option(name)} {_EXAMPLES[option(name)]}, for example"
            yield Fault("option.not_a_positive_number", option(name), what, remedy)
