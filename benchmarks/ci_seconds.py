"""What CI costs: processor seconds of every step of `.ci/run`, before and after it was made cheaper.

    python benchmarks/ci_seconds.py                                   compare what is stored
    python benchmarks/ci_seconds.py run .ci/seconds.jsonl COMMAND …    run one step and append its seconds
    python benchmarks/ci_seconds.py show .ci/seconds.jsonl             the steps of one run as a table
    python benchmarks/ci_seconds.py record after .ci/seconds.jsonl     store a run in ci_seconds.jsonl

Seconds are user and system time of a step and all its children that ended, so a busy machine does not change them
much. The last line is `seconds=S before=B ratio=R`; the exit code is 1 when the stored sum exceeds 60 minutes. `before`
and `ratio` are about the steps that were measured before; a step that is gone since counts as zero.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_name("ci_seconds.json")
LIMIT = 3600.0  # processor seconds of one whole run: half an hour on two cores


def run(file: Path, command: list[str]) -> int:
    """Run one step, append its seconds to `file`, and return its exit code."""
    step = shlex.join(command)
    print(f"\n== {step}", flush=True)
    code = subprocess.run(command, check=False).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    line = {"step": named(step), "cpu_seconds": round(used.ru_utime + used.ru_stime, 1), "code": code}
    with file.open("a", encoding="utf-8") as steps:  # two parts of CI may append at the same time
        steps.write(json.dumps(line) + "\n")
    return code if code >= 0 else 128 - code


def named(step: str) -> str:
    """A step without what differs from run to run: the folder the site is built in."""
    return step.partition(" --site-dir ")[0]


def read(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def table(columns: dict[str, dict[str, float]]) -> str:
    """Steps as rows, runs as columns, and their sums; a step that a run did not have is a dash."""
    steps = list(dict.fromkeys(step for column in columns.values() for step in column))
    rows = [[*(_spelled(column.get(step)) for column in columns.values()), step] for step in steps]
    rows.append([*(_spelled(sum(column.values())) for column in columns.values()), "sum of all steps"])
    lines = [[*columns, "step, in CPU seconds"], *rows]
    return "\n".join("".join(f"{cell:>9}" for cell in line[:-1]) + f"  {line[-1]}" for line in lines)


def _spelled(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"


def record(name: str, file: Path) -> None:
    """Store a run under `name`; one in which a step failed is refused, because it did not do all its work."""
    steps = read(file)
    failed = [step["step"] for step in steps if step["code"]]
    if failed or not steps:
        raise SystemExit(f"{file}: not stored, {'failed: ' + ', '.join(failed) if failed else 'no steps'}")
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    stored[name] = {step["step"]: step["cpu_seconds"] for step in steps}
    STORED.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def faults(stored: dict[str, dict[str, float]]) -> list[str]:
    """What is wrong with stored sums: the newest one is above the limit."""
    newest = list(stored)[-1]
    total = sum(stored[newest].values())
    return [f"{newest}: {total:.0f} CPU seconds, allowed {LIMIT:.0f}"] if total > LIMIT else []


def compare() -> int:
    stored: dict[str, dict[str, float]] = json.loads(STORED.read_text(encoding="utf-8"))
    failed = faults(stored)
    newest = stored[list(stored)[-1]]
    before = sum(stored["before"].values())
    same = sum(newest.get(step, 0.0) for step in stored["before"])
    print(table(stored))
    for failure in failed:
        print(f"FAILED: {failure}")
    print(f"\nseconds={sum(newest.values()):.0f} before={before:.0f} ratio={same / before:.3f}")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    actions = parser.add_subparsers(dest="action")
    for name in ("run", "show", "record"):
        action = actions.add_parser(name)
        if name == "record":
            action.add_argument("name", choices=["before", "after"])
        action.add_argument("file", type=Path)
        if name == "run":
            action.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if asked.action == "run":
        return run(asked.file, asked.command)
    if asked.action == "record":
        record(asked.name, asked.file)
    if asked.action == "show":
        print("\n" + table({"run": {step["step"]: step["cpu_seconds"] for step in read(asked.file)}}))
        return 0
    return compare()


if __name__ == "__main__":
    sys.exit(main())
