"""Options of `mupscale tune`: one for every field of `Settings` that a user chooses, and where to keep the study."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

from ...errors import Fault, raise_faults
from ...families.config.goal import Way
from ...rules.schemes import RISE, SCHEMES, TUNED, UNITS
from ...studies.command import Command
from ...studies.settings import Settings
from .verb import add_verb, option

_HELP = {
    "width": "width of the proxy base, in units; 100 or more transfer best",
    "k": "how many times wider the upscaled proxy is, 2 or more",
    "steps": "training steps of the proxy base",
    "wide_steps": "training steps after growth (default: as --steps)",
    "reference": "width at which constants are written down (default: the proxy's); for a target that was trained without "
    "μP, the target's",
    "lrs": "learning rates of the proxy base, at the reference (default: a range that suits the optimizer)",
    "noises": "by copies: noise sizes; zero is always included",
    "scheme": f"by copies: what the sizes are: {', '.join(f'{s.size} ({s.name})' for s in TUNED.values())}",
    "factors": "learning rates after growth, as multiples of the base's best",
    "halving": "train every point to its end instead of successive halving",
    "rungs": "fractions of the steps at which successive halving compares runs",
    "keep": "fraction of the runs that continue after a comparison",
    "extend": "how often the grid may be extended beyond an edge",
    "seed": "seed of initialisation and noise",
    "control_at_base": "run zero noise at the wide width; by default it runs at the base's, which by the theorem is the same "
    "run for a fraction of the cost",
    "stay": "do not train the base's width for as many FLOPs, which shows whether growing beats not growing",
}
"""The fields of `Settings` that are options; the others are filled in from the proxy."""


def add_to(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "tune",
        "tune the learning rate after growth on a small pair, and write the recipe for large ones",
        "The pair is made from a Hugging Face directory of a language model, whose weights are not read, or by a Python "
        "file. Settings of a directory that are not given follow from it; --dry-run shows them. Start it once per worker; "
        "run it again to continue.",
        examples=(
            "./base --data text.jsonl",
            "./base --data text.jsonl --dry-run",
            "./base --data text.jsonl --by copies",
            "proxy.py --width 128 -k 2 --steps 400",
            "proxy.py --width 128 -k 2 --steps 400 --storage postgresql://user@host/database --folder /shared/tuning",
        ),
    )
    verb.add_argument(
        "proxy",
        type=Path,
        metavar="DIRECTORY|FILE",
        help="a Hugging Face directory, or a Python file with build(width) and train(run, steps, report)",
    )
    _add_text(verb)
    verb.add_argument(
        "--by",
        choices=get_args(Way),
        help="how the proxy grows: by new units, whose rates are tuned, or by copies, whose noise is tuned too (default: units, "
        "or copies with --noises or --scheme)",
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
    verb.add_argument(
        "--dry-run", action="store_true", help="show what would be trained and what it costs, train nothing"
    )
    verb.add_argument("--quiet", action="store_true", help="print no progress")
    verb.add_argument("--no-report", action="store_true", help="write no page about the study to DIR/report")
    verb.set_defaults(run=run)


def _add_text(verb: Any) -> None:
    """The options that only a directory has."""
    verb.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help='text for a directory: .jsonl with lines of {"text": "…"} or {"input_ids": […]}, or one plain text',
    )
    verb.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens of a sequence (default: 256, or what the model holds)",
    )
    verb.add_argument("--batch", type=int, metavar="N", help="sequences of a step (default: 16)")
    verb.add_argument("--device", metavar="NAME", help="where a directory's proxy is trained (default: cpu)")


def _add_settings(verb: Any) -> None:
    """An option for every field of `Settings` with a help text; a field that is True by default gets --no-FIELD."""
    known = {field.name: field for field in fields(Settings)}
    for name, text in _HELP.items():
        field = known[name]
        kind = str(field.type).removesuffix(" | None")
        if kind == "bool":
            words = f"--no-{field.name.replace('_', '-')}"
            verb.add_argument(words, dest=field.name, action="store_false", default=None, help=text)
            continue
        (read, metavar), default = _READ[kind], field.default
        if default is MISSING:
            text += "; needed for a file"
        elif default is not None and default != "":
            value = ",".join(f"{v:g}" for v in default) if isinstance(default, tuple) else default
            text += f" (default: {value})"
        choices = tuple(TUNED) if name == "scheme" else None
        verb.add_argument(
            option(field.name),
            dest=field.name,
            type=read,
            choices=choices,
            metavar=None if choices else metavar,
            help=text,
        )


def run(chosen: argparse.Namespace) -> int:
    given = {name: getattr(chosen, name) for name in _HELP if getattr(chosen, name) is not None}
    directory = chosen.proxy.is_dir()
    raise_faults("this study cannot be run", _faults(chosen, given, directory))
    command = Command(str(chosen.proxy), _words(chosen, given))
    if chosen.by == "units":
        given["scheme"] = UNITS.name
    elif chosen.by == "copies":
        given.setdefault("scheme", RISE.name if directory else next(iter(SCHEMES)))
    if not directory:
        Settings(**given)
    from .. import tune

    return tune.run(chosen, given, command)


def _words(chosen: argparse.Namespace, given: Mapping[str, Any]) -> dict[str, str | None]:
    """The options that were given, as they are typed; without the seed and what does not change the results."""
    found: dict[str, str | None] = {}
    for name, value in given.items():
        if isinstance(value, bool):
            found[f"--no-{name.replace('_', '-')}"] = None
        elif name != "seed":
            found[option(name)] = (
                ",".join(repr(v).removesuffix(".0") for v in value) if isinstance(value, list) else str(value)
            )
    others = {name: getattr(chosen, name) for name in ("by", "data", "context", "batch", "device", "study")}
    return found | {
        f"--{name}": str(value) for name, value in others.items() if value not in (None, "mupscale")
    }


def _faults(chosen: argparse.Namespace, given: Mapping[str, Any], directory: bool) -> list[Fault]:
    """What is missing, or given to a file although only a directory has it."""
    text = {
        "--data": chosen.data,
        "--context": chosen.context,
        "--batch": chosen.batch,
        "--device": chosen.device,
    }
    if not chosen.proxy.exists() and chosen.proxy.suffix != ".py":
        what = "no such directory or file"
        return [
            Fault(
                "proxy.no_such_file",
                str(chosen.proxy),
                what,
                "name a Hugging Face directory, or a Python file",
            )
        ]
    if not directory:
        examples = {"width": "--width 128", "k": "-k 2", "steps": "--steps 400"}
        faults = [
            Fault(
                "option.not_given",
                write.partition(" ")[0],
                "not given, and a file does not say it",
                f"write {write}",
            )
            for name, write in examples.items()
            if name not in given
        ]
        odd = [name for name, value in text.items() if value is not None]
        return faults + [
            Fault("option.said_elsewhere", name, "the file says it", "leave it out") for name in odd
        ]
    faults = (
        []
        if chosen.data is not None
        else [Fault("option.not_given", "--data", "no text to train on", "write --data text.jsonl")]
    )
    for name in ("--context", "--batch"):
        if text[name] is not None and text[name] < (2 if name == "--context" else 1):
            faults.append(
                Fault(
                    "option.below_least",
                    name,
                    f"{text[name]}, expected a larger whole number",
                    f"write {name} 64",
                )
            )
    return faults


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
