"""What a verb is doing, said on standard error before a step that may take longer than two seconds."""

from __future__ import annotations

import argparse
import sys


def working(what: str, chosen: argparse.Namespace) -> None:
    """Say it, unless the user asked for quiet."""
    if not getattr(chosen, "quiet", False):
        print(f"{what} …", file=sys.stderr, flush=True)
