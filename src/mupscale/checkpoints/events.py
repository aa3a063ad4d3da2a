"""What happens while a checkpoint grows, as values: the command line prints them, a program does with them what it likes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import MupscaleError
from ..families.record import FamilyPlan
from ..storage.location import Location
from .base import Base
from .request import Request

if TYPE_CHECKING:
    from ..families.loaded import Losses


@dataclass(frozen=True)
class Working:
    """A step begins that may take longer than two seconds."""

    what: str


@dataclass(frozen=True)
class Resumed:
    """An unfinished job was found at the output path, and is continued."""

    out: Location


@dataclass(frozen=True)
class Planned:
    """The plan was found, and proved on a small copy."""

    base: Base
    family: FamilyPlan
    request: Request
    out: Location


@dataclass(frozen=True)
class NoiseChosen:
    """The size of automatic noise was chosen: `ChosenNoise.as_json`, with the kind of measure."""

    choice: Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """The loss before and after noise was measured, or what new words cost."""

    losses: Losses
    request: Request


@dataclass(frozen=True)
class NotMeasured:
    """The loss could not be measured. The result is right all the same."""

    error: MupscaleError


@dataclass(frozen=True)
class NotCarried:
    """What the base has and the result does not get, each with the reason."""

    names: Mapping[str, str]


@dataclass(frozen=True)
class RoundedAway:
    """How much of the noise is lost to rounding, by tensor."""

    shares: Mapping[str, float]


@dataclass(frozen=True)
class RecipeNotes:
    """The learning rate of a recipe, which a directory cannot store, and what differs from where it was tuned."""

    optimizer: str
    lr: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Writing:
    """So many bytes of the result are written."""

    done: int
    total: int


Event = (
    Working
    | Resumed
    | Planned
    | NoiseChosen
    | Measured
    | NotMeasured
    | NotCarried
    | RoundedAway
    | RecipeNotes
    | Writing
)
Listener = Callable[[Event], None]
