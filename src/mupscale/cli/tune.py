"""`mupscale tune`: noise and learning rate, tuned on a small pair and written as a recipe.

Parses the options, calls `mu.tune`, and prints what was found. Several processes share the work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, fields
from math import inf
from pathlib import Path
from traceback import format_list
from typing import Any

from ..errors import MupscaleError
from ..extras import needs
from ..text import columns
from ..training.recipe import Recipe
from ..tuning.proxy import frames_from
from ..tuning.settings import Settings
from .log_lines import log_lines
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
    shown = nullcontext() if chosen.quiet else log_lines(_say)
    with needs("tuning", "tune"), _failing(chosen.proxy), shown:
        from ..tuning.tune import tune

        given = {
            field.name: getattr(chosen, field.name) for field in fields(Settings) if "help" in field.metadata
        }
        recipe = tune(
            chosen.proxy,
            Settings(**given),
            storage=chosen.storage,
            study=chosen.study,
            folder=chosen.folder,
            every=chosen.every,
            beat=chosen.beat,
        )
    print("\n" + described(recipe, chosen.folder / "recipe.json"))
    if not chosen.no_report:
        print(_report(chosen))
    return 0


@contextmanager
def _failing(proxy: Path) -> Iterator[None]:
    """Report an exception of the user's file from its own line on; others propagate."""
    try:
        yield
    except MupscaleError:
        raise
    except Exception as error:
        frames = frames_from(proxy, error)
        if not frames:
            raise
        print("".join(format_list(frames)), end="", file=sys.stderr)
        failure = f"{proxy} failed in line {frames[0].lineno}: {type(error).__name__}: {error}"
        raise MupscaleError(f"{failure}; fix it and start a new study (--folder, --study)") from error


def _report(chosen: argparse.Namespace) -> str:
    """Write the page. The recipe exists already, so an error here is only a note."""
    from ..reports.report import report

    try:
        path = report(chosen.folder, storage=chosen.storage, study=chosen.study, proxy=chosen.proxy)
    except (MupscaleError, OSError) as error:
        return f"note: no report: {error}"
    return f"report: {path}"


def _say(line: str) -> None:
    print(line, flush=True)


def described(recipe: Recipe, path: Path) -> str:
    """The recipe as text, with the points that were tried, best first."""
    rows = [("noise", "lr", "loss", "steps")]
    wide = [row for row in recipe.tried if row["sweep"] == "wide"]
    for row in sorted(wide, key=lambda r: (-r["steps"], inf if r["loss"] is None else r["loss"]))[:10]:
        loss = "diverged" if row["diverged"] else f"{row['loss']:.6g}"
        rows.append((f"{row['noise']:g}", f"{row['lr']:g}", loss, str(row["steps"])))
    parts = [
        columns(rows, right=(0, 1, 2, 3)),
        f"learning rate of bases: {recipe.base_lr:g}, after growth: {recipe.lr:g}",
    ]
    if recipe.control is not None and recipe.loss is not None:
        parts.append(f"loss {recipe.loss:.6g}; continued without noise {recipe.control:.6g}")
    parts += [f"note: {remark}" for remark in recipe.remarks]
    parts.append(
        f"written to {path}; apply it: mu.upscale(run, make_wide, recipe=mu.Recipe.read({str(path)!r}))"
    )
    return "\n".join(parts)


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
