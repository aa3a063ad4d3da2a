"""`mupscale same`: do two checkpoints continue the same run? Exit status 0 the same, 1 different, 2 cannot tell."""

from __future__ import annotations

import argparse
import json

from ..jobs.progress import shown_progress
from ..sameness.same import same


def run(chosen: argparse.Namespace) -> int:
    with shown_progress("comparing", chosen.quiet) as report:
        found = same(chosen.a, chosen.b, profile=chosen.profile, threads=chosen.threads, on_progress=report)
    print(json.dumps(found.json(), indent=2) if chosen.json else found)
    return found.status
