"""Options of `mupscale plan`, and those that every verb that plans shares with it."""

from __future__ import annotations

import argparse
import re
from typing import Any

from ...errors import Fault, MupscaleError
from ...families.config.early import (
    refuse_fewer_layers,
    refuse_fewer_rows,
    refuse_fraction,
    refuse_gguf,
    refuse_goal,
)
from ...families.config.goal import Goal
from ...families.steps import STEPS
from ...families.types.declarations import Declarations, read_declarations
from .verb import add_verb, location, option, path


def add_to(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "plan",
        "show what would grow, its size and its cost",
        "The layout is found and proved on a small copy; nothing is written.",
        examples=(
            "./base -k 2",
            "./base --layers 8 --hidden 96 --heads 6",
            "./base -k hidden=2,heads=2,ffn=4 --tensors",
        ),
        json="write the whole plan, or why it was refused, to a file (default: to none)",
    )
    add_source(verb)
    verb.add_argument("--tensors", action="store_true", help="list every kind of tensor with its axes")
    verb.set_defaults(run=run)


def add_source(verb: argparse.ArgumentParser) -> None:
    """The arguments that decide a plan, for every verb that makes one."""
    verb.add_argument(
        "base",
        type=location,
        help="a Hugging Face directory, here or at a URL: s3://bucket/model",
    )
    add_goal(verb.add_argument_group("what grows"))
    how = verb.add_argument_group("how")
    how.add_argument(
        "--by",
        choices=("copies", "units"),
        help="new units, and copies only where zeros are not possible; or copies of every unit (default: units for upscale without "
        "--noise and --recipe, else copies)",
    )
    how.add_argument(
        "--architecture",
        metavar="CLASS",
        help="such as LlamaForCausalLM (default: by config.json)",
    )
    how.add_argument(
        "--export",
        choices=("granite",),
        help="write a Llama-like model as Granite",
    )
    how.add_argument(
        "--declare",
        type=path,
        metavar="FILE",
        help="roles, layouts and folds as JSON (default: found)",
    )


_SIZES = {
    "hidden": "size of the stream",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "ffn": "size of the feed-forward layers",
    "head_dim": argparse.SUPPRESS,  # it cannot grow, which its refusal explains
}


def add_goal(group: Any) -> None:
    """What grows: a multiple of every width, or a size of each part."""
    group.add_argument(
        "-k",
        dest="multipliers",
        metavar="K",
        help="how many times wider: 2, or hidden=2,ffn=4; text=2 for one tower; experts=2 for a mixture",
    )
    for name, text in _SIZES.items():
        group.add_argument(option(name), metavar="N", help=text)
    for step in reversed(STEPS):
        for name, key in step.keys.items():
            group.add_argument(option(name), metavar=key.metavar, help=key.help)
    group.add_argument(
        "--to",
        metavar="GOAL",
        help="all of these in one text: layers=8,hidden=96",
    )


def goal_of(chosen: argparse.Namespace) -> Goal:
    """What -k, --to and the options of single parts say together; without -k no width grows."""
    parts = [chosen.to] if chosen.to else []
    for name in (*_SIZES, *(key for step in STEPS for key in step.keys)):
        value = getattr(chosen, name)
        parts += [] if value is None else [f"{name}={value}"]
    if chosen.multipliers is None and not parts:
        raise MupscaleError("say what grows: -k 2 for every width, or --layers 8", code="goal.not_given")
    refuse_gguf(chosen.base)
    to = ",".join(parts) or None
    refuse_fraction(chosen.base, chosen.multipliers or "1")
    goal = Goal.parse(chosen.multipliers or "1", to, chosen.by or "copies")
    if not goal.grows:
        raise MupscaleError(
            "-k 1 keeps every width, and nothing else grows; write -k 2, or --layers 8",
            code="goal.nothing_grows",
        )
    refuse_fewer_layers(chosen.base, to)
    refuse_fewer_rows(chosen.base, to)
    refuse_goal(chosen.base, goal)
    return goal


_KEYS = "|".join((*_SIZES, *(key for step in STEPS for key in step.keys)))
_TO = re.compile(rf"--to ((?:{_KEYS})\b(?:=[\w+:]+)?(?:,(?:{_KEYS})=[\w+:]+)*)")
"""What `--to` says in a message: every key of it is an option too."""


def as_typed(error: MupscaleError, chosen: argparse.Namespace) -> MupscaleError:
    """A refusal in the spelling of the command line that was refused: `--to` as the options of single parts, unless it was typed."""
    if getattr(chosen, "to", "") is not None:
        return error
    faults = [Fault(fault.code, *map(as_options, fault[1:])) for fault in error.faults]
    return MupscaleError(as_options(error.claim), faults, code=error.code)


def as_options(text: str) -> str:
    """A text with what `--to` says as the options of single parts.

    >>> as_options("write --to heads=6,kv_heads=6, or leave kv_heads out"), as_options("--to layers")
    ('write --heads 6 --kv-heads 6, or leave kv_heads out', '--layers')
    """

    def options(found: re.Match[str]) -> str:
        pairs = (part.partition("=") for part in found[1].split(","))
        return " ".join(f"{option(key)} {value}".strip() for key, _, value in pairs)

    return _TO.sub(options, text)


def declared(chosen: argparse.Namespace) -> Declarations | None:
    """What --declare says."""
    return None if chosen.declare is None else read_declarations(chosen.declare)


def run(chosen: argparse.Namespace) -> int:
    goal = goal_of(chosen)
    from ...checkpoints.request import Request

    request = Request(goal, export=chosen.export, declared=declared(chosen))
    from .. import plan

    return plan.run(chosen, request)
