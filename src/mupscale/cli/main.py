"""`mupscale <verb>`: parse, call, turn errors into one readable message and an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import MupscaleError
from . import check, cost, demo, doctor, growing, plan, report, tune

VERBS = (plan, growing, check, tune, report, cost, demo, doctor)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="mupscale",
        description="Grow trained PyTorch models in width, exactly.",
        epilog="`mupscale VERB --help` shows its options and an example. "
        "Exit status: 0 done and every check holds, 1 a check failed, 2 usage or a refused request.",
    )
    top.add_argument("--version", action="version", version=f"mupscale {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="verb")
    for verb in VERBS:
        verb.add_to(verbs)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status.

    >>> main(["demo", "--steps", "0"])
    2
    """
    chosen = parser().parse_args(arguments)
    try:
        return int(chosen.run(chosen))
    except MupscaleError as error:
        print(f"mupscale: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"mupscale: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "mupscale: stopped; what is written is kept, run the same command again to go on", file=sys.stderr
        )
        return 130


if __name__ == "__main__":
    sys.exit(main())
