"""Plan in a separate process, and what can be done instead where a plan is refused.

`plan_in_process` asks, and `answer` is what the child does; `child.py` carries the request and the answer.
"""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import Fault, MupscaleError
from .child import ChildDiedError, ask
from .config.goal import Way
from .config.multipliers import TOWERS, parse_multipliers
from .record import JUMP, FamilyPlan
from .types.declarations import Declarations

MEMORY = 8 << 30
"""Bytes that planning may take: a small copy, its proof, and a description of the wide model, which has no data."""


def plan_in_process(
    config: Mapping[str, Any] | str | Path,
    multipliers: str | int | Mapping[str, int],
    *,
    to: str | None = None,
    by: Way = "copies",
    architecture: str | None = None,
    export: str | None = None,
    stored: Sequence[str] | None = None,
    declared: Declarations | None = None,
    centred: bool = False,
    steps: int = 5,
    timeout: float = 600.0,
) -> FamilyPlan:
    """The result of `family_plan` and `prove` from a new process; `steps=0` plans without optimizer steps."""
    request = {
        "config": dict(config) if isinstance(config, Mapping) else str(config),
        "multipliers": dict(multipliers) if isinstance(multipliers, Mapping) else str(multipliers),
        "to": to,
        "by": by,
        "architecture": architecture,
        "export": export,
        "stored": None if stored is None else list(stored),
        "declared": None if declared is None else declared.as_json(),
        "centred": centred,
        "steps": steps,
    }
    try:
        return FamilyPlan.of_json(ask("plan", request, timeout))
    except subprocess.TimeoutExpired:
        raise MupscaleError(
            f"planning took longer than {timeout:.0f} s and was stopped; run it again on a less busy machine",
            code="plan.took_too_long",
        ) from None
    except ChildDiedError as died:
        raise MupscaleError(
            f"the planning process ended with code {died.code} and no answer",
            [
                Fault(
                    "plan.process_died",
                    "last lines of its stderr",
                    " / ".join(died.said) or "none",
                    _remedy(died.code),
                )
            ],
        ) from None


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


def _most_memory() -> None:
    """Let this process have so many bytes of its own, so that a configuration cannot take the machine."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _used_up() -> bool:
    """Whether the process has had nearly all that it may have; torch and numpy say that in several ways."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > MEMORY * 3 // 4


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The task "plan" of a child: the proved plan, or a refusal that says what can be done instead."""
    _most_memory()
    try:
        import torch

        torch.set_num_threads(1)  # small copies gain nothing from more, and lose much on a busy machine
        return _proved(request, bool(request.get("centred"))).as_json()
    except MupscaleError as error:
        raise with_ways(error, _nearest(request)) from None
    except ModuleNotFoundError as error:
        claim = f"planning needs {error.name}: pip install 'mupscale[hf]'"
        raise MupscaleError(claim, code="extra.missing") from None
    except Exception as error:
        if isinstance(error, MemoryError) or _used_up():
            raise MupscaleError(
                f"planning took more than {MEMORY >> 30} GB of memory and was stopped; check the sizes in config.json",
                code="plan.takes_too_much_memory",
            ) from None
        text = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {text[0][:300] if text else ''}"
        remedy = "build the model from this config.json with transformers alone, to see whether that works"
        fault = Fault("model.code_failed", "model", what, remedy)
        raise MupscaleError("the model's code failed while it was planned", [fault]) from None


def _proved(request: Mapping[str, Any], centred: bool) -> FamilyPlan:
    """The proved plan. Streams whose means are not proved, or move the loss when they wake, grow by copies."""
    from .plan import family_plan
    from .prove import prove

    family = family_plan(
        request["config"],
        request["multipliers"],
        to=request["to"],
        by=request["by"],
        architecture=request["architecture"],
        export=request["export"],
        stored=request["stored"],
        declared=None if request["declared"] is None else Declarations.of_json(request["declared"]),
        centred=centred,
    )
    if not request["steps"]:
        return family
    try:
        family = prove(family, request["steps"])
        if not family.plan.carries_mean or family.plan.parts_tokens or (family.evidence.jump or 0.0) <= JUMP:
            return family
    except MupscaleError:
        if not family.plan.carries_mean:
            raise
    return _proved(request, centred=False)


def _nearest(request: Mapping[str, Any]) -> list[Fault]:
    """What grows instead, as a remedy that was planned and proved: all of it by copies, or the feed-forward layers alone."""
    if request["by"] == "units" and _is_proved(request, by="copies"):
        what = "the same sizes can grow by copies of the units that are there"
        return [Fault("goal.copies_can_grow", "--by", what, "write --by copies")]
    try:
        asked = parse_multipliers(request["multipliers"])
    except MupscaleError:
        return []
    multipliers = f"ffn={max(asked.values())}"
    already = asked.keys() <= {"ffn"} or max(asked.values()) == 1
    if request["to"] or request["export"] or already or asked.keys() & set(TOWERS):
        return []
    if not _is_proved(request, multipliers=multipliers):
        return []
    what = "its feed-forward layers can grow alone"
    return [Fault("goal.ffn_can_grow_alone", "-k", what, f"write -k {multipliers}")]


def _is_proved(request: Mapping[str, Any], **changed: Any) -> bool:
    """Whether a request with some fields changed has a plan that passes its proof."""
    from .plan import family_plan
    from .prove import prove

    asked = {**request, **changed}
    names = ("config", "multipliers", "to", "by", "architecture", "export", "stored")
    try:
        prove(family_plan(**{name: asked[name] for name in names}), request["steps"])
    except Exception:  # whatever stops it, it is no remedy
        return False
    return True
