"""`mupscale report`: one page about tuning studies. Parses and hands everything to `mu.report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import MupscaleError


def add_to(verbs: Any) -> None:
    text = "one page about one or several tuning studies, done or still running"
    verb = verbs.add_parser(
        "report",
        help=text,
        description=f"Write {text}: index.html, which needs nothing but itself, and its pictures as PNG.",
    )
    verb.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of `mupscale tune`")
    verb.add_argument("--storage", help="the study's, where it is not the folder's journal file")
    verb.add_argument(
        "--study",
        action="append",
        metavar="NAME",
        help="its name in the storage, once for all folders or once for each (default: mupscale)",
    )
    verb.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write (default: FOLDER/report; ./report when there are several folders)",
    )
    verb.add_argument(
        "--proxy",
        type=Path,
        metavar="FILE",
        help="the file that was tuned; with it the cost is given in FLOPs",
    )
    verb.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    try:
        from ..reports.report import report
    except ImportError as error:
        raise MupscaleError(
            f'a report needs {error.name or error}: pip install "mupscale[tune,plot]"'
        ) from None
    path = report(
        *chosen.folders,
        storage=chosen.storage,
        study=chosen.study or "mupscale",
        out=chosen.out,
        proxy=chosen.proxy,
    )
    print(f"written to {path}")
    return 0
