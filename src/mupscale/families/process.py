"""Plan in a separate process: model code is heavy, may crash or hang, and a writer must not import it.

The child reads one JSON request and writes one JSON answer; a refusal comes back as the same error, with all its
faults. No network, no code from checkpoints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import Fault, MupscaleError
from .config.multipliers import TOWERS, parse_multipliers
from .record import FamilyPlan
from .types.declarations import Declarations

# Planning reads a configuration and builds stock classes; it never needs the network.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def plan_in_process(
    config: Mapping[str, Any] | str | Path,
    multipliers: str | int | Mapping[str, int],
    *,
    to: str | None = None,
    architecture: str | None = None,
    export: str | None = None,
    stored: Sequence[str] | None = None,
    declared: Declarations | None = None,
    steps: int = 5,
    timeout: float = 600.0,
) -> FamilyPlan:
    """The result of `family_plan` and `prove` from a new process; `steps=0` plans without optimizer steps."""
    request = {
        "config": dict(config) if isinstance(config, Mapping) else str(config),
        "multipliers": dict(multipliers) if isinstance(multipliers, Mapping) else str(multipliers),
        "to": to,
        "architecture": architecture,
        "export": export,
        "stored": None if stored is None else list(stored),
        "declared": None if declared is None else declared.as_json(),
        "steps": steps,
    }
    with tempfile.TemporaryDirectory(prefix="mupscale-plan-") as folder:
        question, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        question.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, "-m", "mupscale.families.process", str(question), str(answer)]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **OFFLINE},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise MupscaleError(
                f"planning took longer than {timeout:.0f} s and was stopped; run it again on a less busy machine",
                code="plan.took_too_long",
            ) from None
        if not answer.exists():
            tail = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
            raise MupscaleError(
                f"the planning process ended with code {done.returncode} and no answer",
                [
                    Fault(
                        "plan.process_died",
                        "last lines of its stderr",
                        " / ".join(tail) or "none",
                        _remedy(done.returncode),
                    )
                ],
            )
        found = json.loads(answer.read_text(encoding="utf-8"))
    if "claim" in found:
        raise refusal_of(found)
    return FamilyPlan.of_json(found)


def refusal_answer(error: MupscaleError) -> dict[str, Any]:
    """A refusal as the answer of a process.

    >>> refusal_of(refusal_answer(MupscaleError("nothing grows", code="goal.nothing_grows"))).code
    'goal.nothing_grows'
    """
    return {"claim": error.claim, "code": error.code, "faults": [list(fault) for fault in error.faults]}


def refusal_of(answer: Mapping[str, Any]) -> MupscaleError:
    """The refusal that a process has answered with."""
    return MupscaleError(answer["claim"], [Fault(*fault) for fault in answer["faults"]], code=answer["code"])


def with_ways(error: MupscaleError, ways: Sequence[Fault]) -> MupscaleError:
    """A refusal with what can be done instead. A claim that stood alone becomes a fault: its code stays the first.

    >>> way = Fault("goal.ffn_can_grow_alone", "-k", "its feed-forward layers can grow", "write -k ffn=2")
    >>> with_ways(MupscaleError("a tensor shrinks", code="family.tensor_shrinks"), [way]).codes
    ('family.tensor_shrinks', 'goal.ffn_can_grow_alone')
    """
    if not ways:
        return error
    if error.faults:
        return MupscaleError(error.claim, [*error.faults, *ways])
    return MupscaleError("this model cannot grow like that", [Fault(error.code, "model", error.claim), *ways])


def _remedy(code: int) -> str:
    return "code -9 is a kill, most often for lack of memory: free some" if code == -9 else ""


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        import torch

        from .plan import family_plan
        from .prove import prove

        torch.set_num_threads(1)  # small copies gain nothing from more, and lose much on a busy machine
        family = family_plan(
            request["config"],
            request["multipliers"],
            to=request["to"],
            architecture=request["architecture"],
            export=request["export"],
            stored=request["stored"],
            declared=None if request["declared"] is None else Declarations.of_json(request["declared"]),
        )
        return (prove(family, request["steps"]) if request["steps"] else family).as_json()
    except MupscaleError as error:
        return refusal_answer(with_ways(error, _nearest(request)))
    except ModuleNotFoundError as error:
        claim = f"planning needs {error.name}: pip install 'mupscale[hf]'"
        return refusal_answer(MupscaleError(claim, code="extra.missing"))
    except Exception as error:
        text = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {text[0][:300] if text else ''}"
        remedy = "build the model from this config.json with transformers alone, to see whether that works"
        fault = Fault("model.code_failed", "model", what, remedy)
        return refusal_answer(MupscaleError("the model's code failed while it was planned", [fault]))


def _nearest(request: Mapping[str, Any]) -> list[Fault]:
    """What grows instead, as a remedy that was planned and proved: the feed-forward layers alone."""
    from .plan import family_plan
    from .prove import prove

    try:
        asked = parse_multipliers(request["multipliers"])
        multipliers = f"ffn={max(asked.values())}"
        already = asked.keys() <= {"ffn"} or max(asked.values()) == 1
        if request["to"] or request["export"] or already or asked.keys() & set(TOWERS):
            return []
        family = family_plan(
            request["config"],
            multipliers,
            architecture=request["architecture"],
            stored=request["stored"],
        )
        prove(family, request["steps"])
    except Exception:  # whatever stops it, it is no remedy
        return []
    return [
        Fault(
            "goal.ffn_can_grow_alone",
            "-k",
            "its feed-forward layers can grow alone",
            f"write -k {multipliers}",
        )
    ]


def main(arguments: list[str]) -> None:
    """Entry point of the child: a request file, an answer file."""
    question, answer = map(Path, arguments)
    found = _answer(json.loads(question.read_text(encoding="utf-8")))
    partial = answer.with_suffix(".part")
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.replace(answer)


if __name__ == "__main__":
    main(sys.argv[1:])
