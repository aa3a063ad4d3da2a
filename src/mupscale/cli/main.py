"""`mupscale <verb>`: parse, call, turn errors into one readable message and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..errors import MupscaleError
from ..version import __version__
from . import (
    advise_options,
    check_options,
    cost_options,
    demo_options,
    doctor,
    plan_options,
    report,
    tune_options,
    widen_options,
)
from .verb import Parser

VERBS = (
    plan_options,
    widen_options,
    check_options,
    tune_options,
    report,
    cost_options,
    advise_options,
    demo_options,
    doctor,
)
"""In the order of the help. None of them imports torch before its `run` has accepted the options."""
_RESUMED = ("widen", "upscale", "tune")
_INTERRUPTED, _UNREAD = 130, 141  # a shell's exit status for a command ended by SIGINT or SIGPIPE
_MORE = """\
first steps:
  mupscale demo                                      check the theorem in fifteen seconds
  mupscale plan ./base -k 2                          show what would grow; nothing is written
  mupscale upscale ./base ./wide -k 2 --noise auto   grow a Hugging Face directory
  mupscale VERB --help                               show options and examples of a verb

exit status: 0 done and every check holds, 1 a check failed, 2 usage or a refused request"""


def parser() -> Parser:
    top = Parser(
        prog="mupscale",
        description="Grow trained PyTorch models in width, exactly.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"mupscale {__version__}")
    verbs = top.add_subparsers(dest="verb", metavar="verb")
    for verb in VERBS:
        verb.add_to(verbs)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status.

    >>> main(["demo", "--steps", "0"])
    2
    """
    top = parser()
    chosen = top.parse_args(arguments)
    if chosen.verb is None:
        top.print_help(sys.stderr)
        return 2
    try:
        status = int(chosen.run(chosen))
        sys.stdout.flush()
        return status
    except MupscaleError as error:
        print(f"mupscale: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNREAD
    except OSError as error:
        print(f"mupscale: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        kept = "; what is written is kept, run the same command again to continue"
        print(f"mupscale: stopped{kept if chosen.verb in _RESUMED else ''}", file=sys.stderr)
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
