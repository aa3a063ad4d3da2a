"""Ask a separate process: one request, one answer, and refusals that come back with their code and all their faults.

Model code is heavy, may crash or hang, and a process that writes must not import it. A request and its answer are JSON files
in a folder of their own, so that what model code prints is no part of either:

    parent    ask("plan", {"config": …})      writes request.json and starts `python -m mupscale.families.child plan …`
    child     process.answer({"config": …})   writes answer.json, whole or not at all
    parent    returns the answer, or raises the refusal that it holds; `ChildDiedError` where there is none

The child has no network and runs no code from checkpoints. Imports no torch: the task that it is asked for does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import Fault, MupscaleError

TASKS = {"plan": "process", "load": "loading"}
"""Task -> the module of this room whose `answer` does it."""
# A child reads configurations and local weights and builds stock classes; it never needs the network.
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class ChildDiedError(Exception):
    """A process ended without an answer: its exit code, and the last lines that it wrote to stderr."""

    def __init__(self, code: int, said: list[str]) -> None:
        super().__init__(code, said)
        self.code, self.said = code, said


def ask(task: str, request: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
    """What a new process answers; a refusal is raised here as it was raised there."""
    with tempfile.TemporaryDirectory(prefix=f"mupscale-{task}-") as folder:
        question, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        question.write_text(json.dumps(request), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "mupscale.families.child", task, str(question), str(answer)],
            env={**os.environ, **_OFFLINE},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        if not answer.exists():
            raise ChildDiedError(
                done.returncode, done.stderr.decode(errors="replace").strip().splitlines()[-3:]
            )
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    if "refusal" in found:
        raise refusal_of(found["refusal"])
    answered: dict[str, Any] = found["answer"]
    return answered


def refusal_answer(error: MupscaleError) -> dict[str, Any]:
    """A refusal as the answer of a process.

    >>> refusal_of(refusal_answer(MupscaleError("nothing grows", code="goal.nothing_grows"))).code
    'goal.nothing_grows'
    """
    return {"claim": error.claim, "code": error.code, "faults": [list(fault) for fault in error.faults]}


def refusal_of(answer: Mapping[str, Any]) -> MupscaleError:
    """The refusal that a process has answered with."""
    return MupscaleError(answer["claim"], [Fault(*fault) for fault in answer["faults"]], code=answer["code"])


def main(arguments: list[str]) -> None:
    """Entry point of the child: a task, a request file, an answer file."""
    task, (question, answer) = arguments[0], map(Path, arguments[1:])
    request = json.loads(question.read_text(encoding="utf-8"))
    try:
        found = {"answer": import_module(f"mupscale.families.{TASKS[task]}").answer(request)}
    except MupscaleError as error:
        found = {"refusal": refusal_answer(error)}
    partial = answer.with_suffix(".part")
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.replace(answer)


if __name__ == "__main__":
    main(sys.argv[1:])
