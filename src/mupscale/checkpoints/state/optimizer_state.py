"""The optimizer state next to the weights of a directory: whether it is there, how large it is, and what it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...files.directory import OPTIMIZER, Directory
from ...files.elsewhere import is_universal, universal_names
from ...files.opened import open_file
from ...files.places import OutFile
from ...jobs.job import Move
from ...plans.plan import Plan
from ..request import Request

if TYPE_CHECKING:
    from ...formats.common import WideFiles
    from ...noise.resolved import NoisePlan


def has_state(directory: Directory, request: Request) -> bool:
    """Whether there is state that the request asks for."""
    return request.state and (OPTIMIZER in directory.trainer or is_universal(directory.path))


def state_left(directory: Directory, request: Request) -> dict[str, str]:
    """Files of the base's training run that the result does not get, each with the reason."""
    if has_state(directory, request):
        return {}
    universal = universal_names(directory.path)
    there = OPTIMIZER in directory.trainer or universal
    why = "--no-state leaves the optimizer state out" if there else "it has no optimizer state next to it"
    return dict.fromkeys((*directory.trainer, *universal), why)


def state_bytes(directory: Directory) -> int:
    """How many bytes the optimizer state next to the weights has."""
    if is_universal(directory.path):
        from ...formats.deepspeed.universal import read_universal

        files = [file for of in read_universal(directory.path).parameters.values() for file in of.values()]
        return sum(file.place.bytes for file in files)
    with open_file(directory.path / OPTIMIZER) as file:
        return file.size


def universal_state(
    directory: Directory, plan: Plan, request: Request, noise: NoisePlan | None = None
) -> WideFiles | None:
    """What a universal checkpoint of DeepSpeed in the directory becomes; None without one, or without state."""
    if not request.state or not is_universal(directory.path):
        return None
    from ...formats.common import Growing
    from ...formats.deepspeed.grow import wide_universal
    from ...formats.deepspeed.universal import read_universal

    return wide_universal(read_universal(directory.path), Growing(plan, noise, request.optimizer))


def trainer_state(
    directory: Directory,
    plan: Plan,
    about: Mapping[str, Any],
    request: Request,
    noise: NoisePlan | None,
) -> tuple[OutFile, list[Move]]:
    """What the `optimizer.pt` of a Trainer becomes."""
    from ...families.models import config_from, model_class, on_meta
    from .trainer_state import trainer_moves

    ends = []
    for config, name in (
        (directory.config, about["base_architecture"]),
        (about["config"], about["architecture"]),
    ):
        made = config_from(config)
        ends.append(on_meta(made, model_class(made, name)))
    return trainer_moves(directory.path, plan, *ends, optimizer=request.optimizer, noise=noise)
