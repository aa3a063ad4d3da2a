"""The common form of a verb's help: one line in the list, a description, examples to copy.

Also suggests the nearest option or verb for a mistyped one. Knows nothing about what verbs do.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any, NoReturn

from ...errors import MupscaleError

if TYPE_CHECKING:
    from pathlib import Path

    from ...storage.location import Location

STATUS = "exit status: 0 done and every check holds, 1 a check failed, 2 usage or refused,\n130 interrupted, 141 nobody reads the output"
"""What a shell gets, of every verb."""
_WIDTH = 88  # columns of help
_USUAL = 80  # columns where there is no terminal to ask
_ALIKE = (
    0.75  # similarity of a short option with two letters swapped; --noise and --no-state are less similar
)


def shown(text: str) -> str:
    """A message as people see it: without the passwords and signatures of the URLs in it."""
    from ...storage.location import without_secrets

    return without_secrets(text)


def path(text: str) -> Path:
    """The type of an option that names a file or a folder; help needs no pathlib, so it is imported here."""
    from pathlib import Path

    return Path(text)


def location(text: str) -> Location:
    """The type of an option that names a folder here or in a store."""
    from ...storage.location import location

    return location(text)


_RENAMED = {
    "--workers": "--threads",
    "--worker": "--share",
    "--batch": "--inputs",
    "--steps": "--train-steps",
    "--to": "--wide-params",
    "advise": "cost --budget",
} | dict.fromkeys(("--bytes", "--layout", "--model"), "--levels bytes,layout,model")
"""Options and verbs of earlier versions, and what they are called now."""


class Help(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal. argparse would import shutil, and with it every compression, to ask for the width."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_columns() - 2)


def _columns() -> int:
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns if sys.__stdout__ else _USUAL
    except (OSError, ValueError):  # a pipe, or a stream that is closed
        return _USUAL


class Parser(argparse.ArgumentParser):
    """A parser that refuses unknown arguments and suggests the nearest known one.

    >>> verb = Parser(prog="mupscale plan")
    >>> _ = verb.add_argument("--tensors", action="store_true")
    >>> list(verb.meant(["--tesnors", "--json"]))
    ['--tesnors: did you mean --tensors?']
    """

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Verbs use this parser too, so that an unknown word shows the usage of its verb."""
        self._given = list(sys.argv[1:] if args is None else args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        more = "".join(f"\n  {line}" for line in (*self.meant(self._given), f"see {self.prog} --help"))
        super().error(shown(f"{message} [usage]{more}"))

    def meant(self, words: Sequence[str]) -> Iterator[str]:
        """A line for every word that is not an option or verb but resembles one."""
        from difflib import get_close_matches  # only for words that were refused

        choices = [
            action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)
        ]
        verbs = [verb for known in choices for verb in known]
        options = list(self._option_string_actions)
        for word in words:
            now = _RENAMED.get(word.partition("=")[0], "")
            if word not in options and now.partition(" ")[0] in (*options, *verbs):
                yield f"{word} is called {now} now"
                continue
            near = get_close_matches(word, options if word.startswith("--") else verbs, n=1, cutoff=_ALIKE)
            known = word in verbs or any(option.startswith(word.partition("=")[0]) for option in options)
            if near and not known:
                yield f"{word}: did you mean {near[0]}?"
            if verbs and not word.startswith("-"):
                return  # the rest belongs to the verb


def add_verb(
    verbs: Any,
    name: str,
    text: str,
    more: str = "",
    *,
    examples: tuple[str, ...],
    usage: str | None = None,
    json: str = "write what was found, or why it was refused, to a file (default: to none)",
) -> Any:
    """The parser of a verb: `text` stands in the list of verbs, and with `more` at the top of its own help.

    >>> verbs = Parser(prog="mupscale").add_subparsers()
    >>> verb = add_verb(verbs, "plan", "show what would grow", "Nothing is written.", examples=("./base -k 2",))
    >>> print(verb.description, verb.epilog.partition(chr(10) * 2)[0], sep=chr(10))
    Show what would grow. Nothing is written.
    example:
      mupscale plan ./base -k 2
    """
    lines = "\n".join(f"  mupscale {name} {example}".rstrip() for example in examples)
    verb: Parser = verbs.add_parser(
        name,
        help=text,
        usage=usage,
        allow_abbrev=False,
        description=fill(f"{text[0].upper()}{text[1:]}. {more}".strip(), _WIDTH),
        epilog=f"{'examples' if len(examples) > 1 else 'example'}:\n{lines}\n\n{STATUS}",
        formatter_class=Help,
    )
    verb.add_argument("--json", type=path, metavar="FILE", help=json)
    return verb


def add_threads(verb: argparse._ActionsContainer, what: str) -> None:
    """`--threads`: at most two by default, because one thread already writes as fast as most disks."""
    verb.add_argument(
        "--threads",
        type=int,
        default=min(2, os.cpu_count() or 1),
        metavar="N",
        help=f"{what} (default: %(default)s)",
    )


def check_threads(chosen: argparse.Namespace) -> None:
    """Raise for less than one thread."""
    if chosen.threads < 1:
        raise MupscaleError(
            f"--threads {chosen.threads}: expected a whole number, 1 or more", code="option.below_one"
        )


def option(name: str) -> str:
    """The option of a name in Python.

    >>> option("kv_heads"), option("k")
    ('--kv-heads', '-k')
    """
    return f"--{name.replace('_', '-')}" if len(name) > 1 else f"-{name}"
