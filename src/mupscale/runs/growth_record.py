"""What a grown checkpoint says about how it was grown: `mupscale.json` in a directory, or one entry of a file that is a dict.

Knows where both are and what every one of them holds: the plan, the plan since the reference, the history. Opens these files;
moves no tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import MupscaleError
from ..files.strict import parse_json, read_regular
from ..plans.plan import Plan
from ..storage.location import Location, location
from ..storage.looking import exists
from .provenance import Provenance

NAME = "mupscale.json"
FORMAT = "mupscale directory 1"
KEY = "mupscale"
"""Where a checkpoint that is one dict keeps its plans and its history."""
_MOST_OBJECTS = 6_000_000  # of JSON; a record holds two plans, each with an object per tensor


def read_about(directory: Location | str) -> dict[str, Any] | None:
    """The record of a grown directory, or None where there is none; anything else is an error."""
    path = location(directory) / NAME
    if not exists(path):
        return None
    record = parse_json(read_regular(path), str(path), infinity=True, objects=_MOST_OBJECTS)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise MupscaleError(
            f"{path} is not a record of growth: expected format {FORMAT!r}", code="growth.not_a_record"
        )
    return record


def read_record(directory: Location | str) -> dict[str, Any]:
    """The record of a grown directory; raises where there is none."""
    record = read_about(directory)
    if record is None:
        raise MupscaleError(
            f"{directory} holds no {NAME}, so how it was grown is not known; "
            "mupscale upscale and mupscale grow write it; copy it from there, as trainers do not",
            code="growth.record_missing",
        )
    return record


def read_plans(directory: Location | str) -> tuple[Plan, Plan]:
    """The plan that made a grown directory, and the plan that leads to it from the reference."""
    return plans_of(read_record(directory), directory)


def plans_of(record: Mapping[str, Any], directory: Location | str) -> tuple[Plan, Plan]:
    """The two plans of a record that was read from a directory."""
    try:
        plans = [Plan.from_json(json.dumps(record[key])) for key in ("plan", "since_reference")]
    except KeyError as error:
        raise MupscaleError(f"{directory}/{NAME} has no {error}", code="growth.record_incomplete") from None
    return plans[0], plans[1]


def earlier_plan(directory: Location) -> Plan | None:
    """The plan from the reference to a base that was itself grown; None for a base that is its own reference."""
    return None if read_about(directory) is None else read_plans(directory)[1]


def earlier_growths(directory: Location) -> Provenance:
    """The history of a base; empty for one that was not grown."""
    return Provenance.from_json(read_about(directory) or {})


def plans_in(checkpoint: Path | str) -> tuple[Plan, Plan]:
    """The two plans of a single checkpoint file that carries them."""
    record = record_in(checkpoint)
    plan, since = (Plan.from_json(json.dumps(record[key])) for key in ("plan", "since_reference"))
    return plan, since


def record_in(checkpoint: Path | str) -> dict[str, Any]:
    """What a single checkpoint file says about how it was grown; raises where it says nothing."""
    from ..files.pickles.torch_file import read_tree

    tree = read_tree(checkpoint)
    record = tree.get(KEY) if isinstance(tree, dict) else None
    if not isinstance(record, dict) or not {"plan", "since_reference"} <= record.keys():
        raise MupscaleError(
            f"{checkpoint} does not say how it was grown; pass the plan", code="growth.record_missing"
        )
    return record


def record_of(plans: tuple[Plan, Plan], provenance: Provenance) -> dict[str, Any]:
    """What a checkpoint says about how it was grown: both plans, and the history."""
    plan, since = plans
    return {
        "plan": plan.as_json(),
        "since_reference": since.as_json(),
        "provenance": provenance.as_json(),
    }
