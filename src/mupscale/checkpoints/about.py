"""What a grown directory says about itself for programs: `mupscale.json`.

Knows which facts are recorded; moves no tensor and plans nothing. `result/card.py` says the same to people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import Fault, MupscaleError
from ..files.directory import Directory
from ..files.strict import printable
from ..models.names import pattern_of
from ..optimizers.settings import factors_of
from ..plans.plan import Plan
from ..rules.optimizers import RULES
from ..runs.growth_record import NAME

MARK = "mupscale"
"""The field of a grown config.json that says so: it survives where the record is lost."""
KEYS = (
    "architecture", "base", "base_architecture", "config", "losses", "noise", "not_carried", "not_stored", "parameters", "plan", "plan_hash",
    "request", "since_reference", "spelling",
)  # fmt: skip
"""What a record says that leads back to its base; a trainer's copy of it may hold the plans alone."""


def check_record(directory: Directory, about: Mapping[str, Any] | None) -> None:
    """Raise if config.json says that the model was grown, and the record with its units is not here.

    `save_pretrained` and trainers keep fields of config.json that they do not know, and no other file of ours.
    """
    if MARK in directory.config and about is None:
        what = (
            "config.json says that this model was grown by mupscale, and the record of its units is not here"
        )
        remedy = (
            f"copy {NAME} from the directory that mupscale wrote; or, to take the model for a base with units of its "
            f'own, remove "{MARK}" from config.json'
        )
        raise MupscaleError(
            f"{printable(str(directory.path))} was saved without its record",
            [Fault("growth.record_lost", NAME, what, remedy)],
        )


def factors(plan: Plan) -> list[dict[str, Any]]:
    """What each kind of tensor does to the constants of AdamW, one entry for equal factors.

    >>> from mupscale.plans import TensorPlan
    >>> from mupscale.rules import Axis
    >>> plan = Plan({"w": TensorPlan(("w",), (Axis.parse("out: 4x2"), Axis.parse("in: 4x2")))})
    >>> factors(plan)
    [{'lr': '1/2', 'weight_decay': '2', 'eps': '1/2', 'tensors': ['w']}]
    """
    rule = RULES["torch.optim.AdamW"]
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, entry in plan.tensors.items():
        if entry.kind != "parameter":
            continue
        all_factors = factors_of(rule, {"weight_decay": 0.0}, entry)
        adamw_factors = {key: str(all_factors[key]) for key in ("lr", "weight_decay", "eps")}
        names = found.setdefault(tuple(adamw_factors.items()), [])
        if pattern_of(name) not in names:
            names.append(pattern_of(name))
    return [{**dict(key), "tensors": names} for key, names in found.items()]
