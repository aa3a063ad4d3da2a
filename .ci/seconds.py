"""Measures the steps of `.ci/run` and judges what one whole run costs.

    python .ci/seconds.py run LOG PART COMMAND …    run one step and append its CPU and wall seconds to LOG
    python .ci/seconds.py judge LOG [JUNIT …]       print the steps and the slowest tests; fail above the limit
    python .ci/seconds.py store LOG                 keep the steps of a nightly run, with the key of the code, in .ci/nightly.json

CPU seconds are user and system time of a step and of all its children that ended. They are judged, and wall time is only
printed. A shared machine can run at half its speed for an hour, so a fixed loop before, after and in every minute of a step measures by which
factor it is slow, and the seconds are divided by that factor before they are compared with the limit. The limit holds for
the parts of a push together; a run of fewer parts, or of the nightly part, is printed and not judged.
"""

from __future__ import annotations

import json
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

LIMIT = 3690.0  # CPU seconds of static, tests, exactness and survival: 3,000 for the check, 90 for devices, 60 for each later issue
PUSH = {"static", "tests", "exactness", "survival"}
LOOP = 1_000_000  # additions of the loop
REFERENCE = 0.056  # CPU seconds of the loop at the speed for which the limit was set
STORED = Path(__file__).resolve().with_name("nightly.json")
MINUTE = 60.0  # seconds between two measurements of the machine while a step runs
SHOWN = 20  # slowest tests that are printed
Step = dict[str, Any]


def slowness() -> float:
    """By which factor the machine is slower now than the one that the limit was set on; at least 1."""
    began, total = time.process_time(), 0
    for number in range(LOOP):
        total += number
    return max(1.0, (time.process_time() - began) / REFERENCE)


def at_reference(step: Step) -> float:
    """The CPU seconds of a step at the speed for which the limit was set."""
    return float(step["cpu"]) / float(step.get("slow", 1.0))


def run(log: Path, part: str, command: Sequence[str]) -> int:
    """Run one step, append its seconds to `log`, and return its exit code."""
    step = shlex.join(command).partition(" --site-dir ")[
        0
    ]  # the folder of the built site differs in every run
    print(f"\n== {step}", flush=True)
    slow = [slowness()]
    began = time.monotonic()
    process = subprocess.Popen(command)
    while (ended := _ended(process)) is None:
        slow.append(slowness())
    code = ended
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    line = {
        "part": part,
        "step": step,
        "cpu": round(used.ru_utime + used.ru_stime, 1),
        "wall": round(time.monotonic() - began, 1),
        "slow": round(fmean([*slow, slowness()]), 2),
        "code": code,
    }
    with log.open("a", encoding="utf-8") as steps:  # parts that run at the same time append to the same file
        steps.write(json.dumps(line) + "\n")
    return code if code >= 0 else 128 - code


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a process that ends within a minute, else None."""
    try:
        return process.wait(MINUTE)
    except subprocess.TimeoutExpired:
        return None


def read(log: Path) -> list[Step]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def slowest(junit: Path) -> list[tuple[float, str]]:
    """Wall seconds and names of the slowest tests of a run."""
    cases = ElementTree.parse(junit).iter("testcase")
    timed = ((float(case.get("time", 0)), f"{case.get('classname')}::{case.get('name')}") for case in cases)
    return sorted(timed, reverse=True)[:SHOWN]


def failures(steps: Sequence[Step], limit: float = LIMIT) -> list[str]:
    """What is wrong with a run: a step that failed, or more CPU seconds than a push may take."""
    failed = [f"{step['step']} ended with {step['code']}" for step in steps if step["code"]]
    total = sum(map(at_reference, steps))
    if {step["part"] for step in steps} == PUSH and total > limit:
        failed.append(f"{total:.0f} CPU seconds at the speed of the reference, allowed {limit:.0f}")
    return failed


def judge(log: Path, junit: Sequence[Path]) -> int:
    steps = read(log)
    for file in filter(Path.exists, junit):
        print(f"\n{'wall s':>8}  slowest tests")
        for seconds, name in slowest(file):
            print(f"{seconds:8.1f}  {name}")
    print(f"\n{'CPU s':>8}{'slow':>6}{'wall s':>8}  step")
    for step in sorted(steps, key=lambda step: -step["cpu"]):
        print(
            f"{step['cpu']:8.1f}{step.get('slow', 1.0):6.2f}{step['wall']:8.1f}  {step['part']}: {step['step']}"
        )
    failed = failures(steps)
    for failure in failed:
        print(f"FAILED: {failure}")
    spent, judged = (sum(map(of, steps)) for of in (lambda step: step["cpu"], at_reference))
    print(f"\nsteps={len(steps)} cpu={spent:.0f} at_reference={judged:.0f} limit={LIMIT:.0f}")
    return 1 if failed else 0


def store(log: Path) -> int:
    """Keep what the steps of a nightly run cost, by step, with the key of the code that they ran on."""
    sys.path.insert(0, str(STORED.parents[1]))
    from harness.evidence import EVERYTHING, code_key

    steps = [step for step in read(log) if step["part"] not in PUSH and not step["code"]]
    if not steps:
        return 0
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    key, day = code_key(EVERYTHING), time.strftime("%Y-%m-%d", time.gmtime())
    for step in steps:
        stored[step["step"]] = {
            "part": step["part"],
            "cpu": step["cpu"],
            "wall": step["wall"],
            "key": key,
            "date": day,
        }
    STORED.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return 0


def main(words: Sequence[str]) -> int:
    action, log, *rest = words
    if action == "run":
        return run(Path(log), rest[0], rest[1:])
    if action == "judge":
        return judge(Path(log), [Path(name) for name in rest])
    if action == "store":
        return store(Path(log))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
