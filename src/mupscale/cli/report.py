"""`mupscale report`: one page about tuning studies. Calls `studies.report.write_report` and prints the verdicts."""

from __future__ import annotations

import argparse

from ..extras import needs


def run(chosen: argparse.Namespace) -> int:
    with needs("a report", "tune", "plot"):
        from ..studies.report.report import write_judged_report

        path, verdicts = write_judged_report(
            chosen.folders, chosen.out, chosen.storage, chosen.study or "mupscale"
        )
    chosen.found = {"page": str(path), "verdicts": list(map(str, verdicts))}
    print(*verdicts, f"written to {path}", sep="\n\n")
    return 0
