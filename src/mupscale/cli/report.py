"""`mupscale report`: one page about tuning studies. Parses the options and calls `mu.diagnostics.report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..extras import needs
from .verb import add_verb


def add_to(verbs: Any) -> None:
    verb = add_verb(
        verbs,
        "report",
        "write one page about one or several tuning studies, done or still running",
        "The page is index.html, which is self-contained; its images are also written next to it as PNG.",
        examples=("tuning", "width128 width256 --out report"),
    )
    verb.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a folder of mupscale tune")
    verb.add_argument(
        "--storage", metavar="URL", help="storage of the study (default: the journal file in the folder)"
    )
    verb.add_argument(
        "--study",
        action="append",
        metavar="NAME",
        help="name of the study in the storage, once for all folders or once for each (default: mupscale)",
    )
    verb.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write (default: FOLDER/report; ./report when there are several folders)",
    )
    verb.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    with needs("a report", "tune", "plot"):
        from ..studies.report.report import write_report

        path, verdicts = write_report(chosen.folders, chosen.out, chosen.storage, chosen.study or "mupscale")
    print(*verdicts, f"written to {path}", sep="\n\n")
    return 0
