"""Options of `mupscale tune`: one for every field of `Settings` that has a help text, and where to keep the study."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from ..tuning.settings import Settings
from .verb import add_verb


def add_to(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "tune",
        "tune noise and learning rate on a small pair, and write the recipe for large ones",
        "Start it once per worker; run it again to continue.",
        examples=(
            "proxy.py --width 128 -k 2 --steps 400",
            "proxy.py --width 128 -k 2 --steps 400 --storage postgresql://user@host/database --folder /shared/tuning",
        ),
    )
    verb.add_argument(
        "proxy", type=Path, help="a Python file with build(width) and train(run, steps, report)"
    )
    _add_settings(verb)
    verb.add_argument(
        "--storage",
        metavar="URL",
        help="where workers meet: postgresql://… for many machines (default: a journal file in the folder)",
    )
    verb.add_argument(
        "--study",
        default="mupscale",
        metavar="NAME",
        help="name of the study in the storage (default: %(default)s)",
    )
    verb.add_argument(
        "--folder",
        type=Path,
        default=Path("tuning"),
        metavar="DIR",
        help="folder for checkpoints and the recipe, shared by all workers (default: %(default)s)",
    )
    verb.add_argument(
        "--every",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds between checkpoints (default: %(default)s)",
    )
    verb.add_argument(
        "--beat",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds between signs of life (default: %(default)s)",
    )
    verb.add_argument("--quiet", action="store_true", help="print no progress")
    verb.add_argument("--no-report", action="store_true", help="write no page about the study to DIR/report")
    verb.set_defaults(run=run)


def _add_settings(verb: Any) -> None:
    """An option for every field of `Settings` that has a help text; a field that is True by default gets --no-FIELD."""
    for field in fields(Settings):
        if "help" not in field.metadata:
            continue
        text, kind = field.metadata["help"], str(field.type).removesuffix(" | None")
        words = field.name.replace("_", "-")
        if kind == "bool":
            verb.add_argument(f"--no-{words}", dest=field.name, action="store_false", help=text)
            continue
        name = f"--{words}" if len(words) > 1 else f"-{words}"
        required, (read, metavar) = field.default is MISSING, _READ[kind]
        default = None if required else field.default
        if default is not None:
            value = ",".join(f"{v:g}" for v in default) if isinstance(default, tuple) else default
            text += f" (default: {value})"
        choices = field.metadata.get("choices")
        verb.add_argument(
            name,
            dest=field.name,
            type=read,
            required=required,
            default=default,
            choices=choices,
            metavar=None if choices else metavar,
            help=text,
        )


def run(chosen: argparse.Namespace) -> int:
    given = {
        field.name: getattr(chosen, field.name) for field in fields(Settings) if "help" in field.metadata
    }
    settings = Settings(**given)
    from . import tune

    return tune.run(chosen, settings)


def _numbers(text: str) -> list[float]:
    """Numbers from a text with commas.

    >>> _numbers("0, 0.1,2e-1")
    [0.0, 0.1, 0.2]
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers separated by commas") from None


_READ = {
    "int": (int, "N"),
    "float": (float, "X"),
    "str": (str, "NAME"),
    "Sequence[float]": (_numbers, "A,B,…"),
}
"""How an option is read and shown, by the type of its field."""
