"""Options of `mupscale plan`, and those that every verb that plans shares with it."""

from __future__ import annotations

import argparse
from typing import Any

from ...errors import MupscaleError
from ...families.config.goal import Goal
from ...families.config.multipliers import TO_HELP
from ...families.types.declarations import Declarations, read_declarations
from .verb import add_verb, location, path


def add_to(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "plan",
        "show what would grow, its size and its cost",
        "The layout is found and proved on a small copy; nothing is written.",
        examples=("./base -k 2", "./base -k hidden=2,heads=2,ffn=4 --tensors"),
    )
    add_source(verb)
    verb.add_argument("--tensors", action="store_true", help="list every kind of tensor with its axes")
    verb.add_argument(
        "--json", type=path, metavar="FILE", help="write the whole plan to a file (default: to none)"
    )
    verb.set_defaults(run=run)


def add_source(verb: argparse.ArgumentParser) -> None:
    """The arguments that decide a plan, for every verb that makes one."""
    verb.add_argument(
        "base",
        type=location,
        help="a Hugging Face directory with safetensors, here or at a URL: s3://bucket/model",
    )
    verb.add_argument(
        "-k",
        dest="multipliers",
        metavar="K",
        help="how many times wider, in whole numbers: 2 for every width, or hidden=2,heads=2,ffn=4,kv_heads=1, or "
        "one tower of a model that reads text and images: text=2, vision=2; what is not named stays (default: 1 with --to)",
    )
    verb.add_argument(
        "--to",
        metavar="GOAL",
        help=f"{TO_HELP}; what is new sleeps until noise wakes it (default: the base's sizes)",
    )
    verb.add_argument(
        "--by",
        choices=("copies", "units"),
        help="copies: every unit is copied; units: new units, which are zero and have no effect until they wake, and copies only "
        "where zeros are not possible (default: units for upscale without --noise and --recipe, else copies)",
    )
    verb.add_argument(
        "--into",
        metavar="TYPE",
        help="the model_type that holds the base and its new experts, such as granitemoeshared (default: the first that holds "
        "the base's type)",
    )
    verb.add_argument(
        "--export",
        choices=("granite",),
        help="granite: a Llama-like model as Granite, with its multiplier in the configuration (default: the base's own class)",
    )
    verb.add_argument(
        "--architecture",
        metavar="CLASS",
        help="the class of transformers, as LlamaForCausalLM (default: the one that config.json names, or the usual one of "
        "its model_type)",
    )
    verb.add_argument(
        "--declare",
        type=path,
        metavar="FILE",
        help="roles, layouts and folds of tensors, as JSON by pattern of their names; see docs/checkpoints.md (default: all "
        "are found)",
    )


def goal_of(chosen: argparse.Namespace) -> Goal:
    """What -k, --to and --into say together; without -k no width grows."""
    if chosen.multipliers is None and chosen.to is None:
        raise MupscaleError("say what grows: -k 2 for every width, or --to layers=8", code="goal.not_given")
    to = chosen.to
    if chosen.into is not None:
        to = f"{to},into={chosen.into}" if to else f"into={chosen.into}"
    return Goal.parse(chosen.multipliers or "1", to, chosen.by or "copies")


def declared(chosen: argparse.Namespace) -> Declarations | None:
    """What --declare says."""
    return None if chosen.declare is None else read_declarations(chosen.declare)


def run(chosen: argparse.Namespace) -> int:
    goal = goal_of(chosen)
    if chosen.json is not None and (chosen.json.is_dir() or not chosen.json.absolute().parent.is_dir()):
        raise MupscaleError(
            f"--json {chosen.json}: expected the name of a file in a folder that exists",
            code="option.not_a_file_name",
        )
    from ...checkpoints.request import Request

    request = Request(goal, export=chosen.export, declared=declared(chosen))
    from .. import plan

    return plan.run(chosen, request)
