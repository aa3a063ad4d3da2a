"""The one way a program in `benchmarks/` runs: options, a measurement, what failed, the last line, the exit code.

A program defines `measure`, which takes the parsed options, prints what it likes and returns an `Outcome`, and ends with

    if __name__ == "__main__":
        sys.exit(run(measure, option("--quick", action="store_true", help="fewer steps"), doc=__doc__))

`python benchmarks/NAME.py` finds this module because an editable install puts the repository on the path.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple


class Outcome(NamedTuple):
    """What a program found: its last line, and every bound that does not hold, as a sentence.

    A mode without a last line, such as a child process that answers its parent, gives an empty one.
    """

    line: str
    failed: Sequence[str] = ()


class Option(NamedTuple):
    """The arguments of one call of `ArgumentParser.add_argument`."""

    names: tuple[str, ...]
    settings: dict[str, Any]


def pool(workers: int = 2, prepare: Callable[[], None] | None = None) -> ProcessPoolExecutor:
    """New processes that measure side by side, each prepared first."""
    return ProcessPoolExecutor(workers, get_context("spawn"), prepare)


class UsageError(Exception):
    """Raised by `measure` for options that do not fit: the program ends as argparse ends a usage fault, with code 2."""


def option(*names: str, **settings: Any) -> Option:
    """An option or a positional argument, in the terms of `ArgumentParser.add_argument`."""
    return Option(names, settings)


def run(
    measure: Callable[[argparse.Namespace], Outcome],
    *options: Option,
    doc: str | None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse the options, measure, print what failed and the last line; 1 if anything failed, else 0.

    The help opens with the first line of `doc`. `arguments` replaces the command line.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    for names, settings in options:
        parser.add_argument(*names, **settings)
    try:
        outcome = measure(parser.parse_args(arguments))
    except UsageError as fault:
        parser.error(str(fault))
    for failure in outcome.failed:
        print(f"FAILED: {failure}")
    if outcome.line:
        print(f"\n{outcome.line}", flush=True)
    return 1 if outcome.failed else 0
