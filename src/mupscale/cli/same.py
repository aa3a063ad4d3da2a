"""`mupscale same`: do two checkpoints continue the same run? Exit status 0 the same, 1 different, 2 cannot tell."""

from __future__ import annotations

import argparse

from ..jobs.progress import shown_progress
from ..sameness.same import reported
from ..sameness.stepped import Ways


def run(chosen: argparse.Namespace) -> int:
    ways = Ways.of(chosen.batch, None, None)
    with shown_progress("comparing", chosen.quiet) as report:
        found = reported(chosen.a, chosen.b, chosen.profile, chosen.threads, report, chosen.config, ways)
    print(found)
    chosen.found = found.json()
    return found.status
