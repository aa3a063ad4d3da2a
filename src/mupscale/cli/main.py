"""`mupscale <verb>`: parse, call, turn errors into one readable message and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from ..errors import MupscaleError
from ..version import __version__
from .options.verb import STATUS, Help, Parser, shown
from .printing.json_file import check_json, write_json

VERBS = ("plan", "grow", "upscale", "check", "same", "tune", "report", "cost", "demo", "doctor")
"""In the order of the help. A module of `options/` imports no torch before it has accepted them."""
_TOGETHER = {"upscale": "grow"}
"""Verbs whose options are in the module of another."""
_RESUMED = ("grow", "upscale", "tune")
_INTERRUPTED, _UNREAD = 130, 141  # a shell's exit status for a command ended by SIGINT or SIGPIPE
_MORE = f"""\
first steps:
  mupscale demo                           check the theorem in fifteen seconds
  mupscale plan ./base -k 2               show what would grow; nothing is written
  mupscale upscale ./base ./wide -k 2     grow a Hugging Face directory, at the loss of the base
  mupscale check ./wide --base ./base     prove what was written
  mupscale same ./before ./after          show whether a resumed or converted run is the same
  mupscale VERB --help                    show options and examples of a verb

{STATUS}
tune ends with 0 also where it finds that growing is not worth it"""


def parser(words: Sequence[str] = ()) -> Parser:
    """The parser of all verbs; where the first word is one of them, that of this verb alone, which starts sooner."""
    top = Parser(
        prog="mupscale",
        description="Grow trained PyTorch models in width, depth, experts and words, exactly.",
        epilog=_MORE,
        formatter_class=Help,
    )
    top.add_argument("--version", action="version", version=f"mupscale {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="verb")
    first = words[0] if words else ""
    wanted = (first,) if first in VERBS else () if first == "--version" else VERBS
    for name in dict.fromkeys(_TOGETHER.get(verb, verb) for verb in wanted):
        import_module(f"{__package__}.options.{name}").add_to(verbs)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status.

    >>> main(["demo", "--steps", "0"])
    2
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    top = parser(words)
    chosen = top.parse_args(words)
    if chosen.verb is None:
        top.print_help(sys.stderr)
        return 2
    try:
        check_json(chosen)
        status = int(chosen.run(chosen))
        write_json(chosen, status)
        sys.stdout.flush()
        return status
    except MupscaleError as refused:
        from .options.plan import as_typed

        error = as_typed(refused, chosen)
        write_json(chosen, 2, error)
        print(f"mupscale: {shown(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNREAD
    except OSError as error:
        message = f"{error.filename or 'a file'}: {error.strerror or error}"
        print(f"mupscale: {shown(message)} [file.unreadable]", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = "; what is written is kept, run the same command again to continue"
        print(f"mupscale: stopped{kept if chosen.verb in _RESUMED else ''}", file=sys.stderr)
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
