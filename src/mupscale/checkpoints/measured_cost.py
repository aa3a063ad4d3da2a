"""What noise and new words cost, measured on real weights: the size of noise that a share of the loss allows, the loss before
anything is written, and that of a finished result.

Knows which of them needs how much memory. Models are loaded in a process of their own.
"""

from __future__ import annotations

from collections import Counter
from math import isfinite
from pathlib import Path
from typing import Any

from ..errors import MupscaleError
from ..families.loaded import Losses, check_memory, choose_size, losses_with, stored_losses
from ..families.record import FamilyPlan
from ..files.directory import Directory
from ..files.floats import FLOATS
from ..noise.resolve import unused_seed
from ..rules.noise_defaults import DEFAULT_RISE
from ..runs.growth_record import read_about
from ..storage.location import Location
from .base import Base
from .events import Event, Listener, Measured, NoiseChosen, NotMeasured, Working
from .request import Request


def chosen_size(
    base: Base, family: FamilyPlan, request: Request, rise: float, batch: Path | None, on: Listener
) -> dict[str, Any]:
    """The size of automatic noise that costs such a share, measured on the base with real weights."""
    # The base and one wide model at a time, in float32.
    check_memory(2 * 4 * family.plan.parameters("wide"), "noise chosen by its cost")
    on(Working("choosing the noise by what it costs"))
    seed = unused_seed(request.seed, base.early, base.history.seeds)
    usual = request.recipe is None and rise == DEFAULT_RISE
    choice = choose_size(base.path, family, base.early, None if usual else rise, seed, batch)
    on(NoiseChosen(choice))
    return choice


def planned_losses(
    base: Base,
    about: dict[str, Any],
    request: Request,
    batch: Path | None,
    choice: dict[str, Any] | None,
    on: Listener,
) -> dict[str, Any]:
    """What noise and new words cost, measured before anything is written; nothing where it cannot be measured."""
    dtype = request.dtype or _usual_dtype(base.directory)
    try:
        # What the choice measured, as nothing is rounded.
        if choice is not None and dtype == "F32" and about["words"] is None:
            found = Losses(choice["before"], choice["after"], choice["kind"], choice["text"])
        else:
            check_memory(2 * 4 * about["parameters"]["wide"], "the loss after noise")
            on(Working(f"measuring what {'the noise costs' if request.adds_noise else 'new words cost'}"))
            found = losses_with(base.path, about, base.early, dtype, batch)
    except MupscaleError as error:
        on(NotMeasured(error))
        return {}
    on(Measured(found, request))
    measured: dict[str, Any] = {}
    if request.adds_noise:
        measured["losses"] = found.as_json() if isfinite(found.after) else None
    if found.words is not None:
        measured["words"] = {**about["words"], "losses": found.words.as_json()}
    return measured


def stored_cost(base: Base, out: Location, request: Request, batch: Path | None, on: Listener) -> Event:
    """What the noise of a finished directory costs."""
    try:
        about = read_about(out)
        assert about is not None
        check_memory(4 * about["parameters"]["wide"], "the loss after noise")
        on(Working("measuring what the noise costs"))
        return Measured(stored_losses(base.path, out, batch), request)
    except MupscaleError as error:
        return NotMeasured(error)


def _usual_dtype(directory: Directory) -> str:
    """The dtype that most of the weights are stored in."""
    counts: Counter[str] = Counter()
    for place in directory.tensors.values():
        counts[place.dtype] += place.bytes * (place.dtype in FLOATS)
    return counts.most_common(1)[0][0]
