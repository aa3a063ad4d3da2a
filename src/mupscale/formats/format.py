"""What a format says of itself, so that `mu.grow_checkpoint` and `mu.same` find it: its name, what it is on disk, what grows and reads it.

Every folder of this room has one, as `FORMAT` in its `__init__`. That file imports nothing heavy: what grows and reads is imported when it
is called. Such a checkpoint does not describe its model, so it grows by a plan that comes from its two ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ..errors import Fault, raise_faults
from ..files.strict import printable
from ..noise.auto import AutoNoise
from ..noise.kinds import Noise, wrong_noise
from ..plans.plan import Plan
from ..rules.noise_defaults import DEFAULT_T
from ..storage.location import Location
from .snapshot import Snapshot


@dataclass(frozen=True)
class Asked:
    """What is asked of a format: grow `base` into `out` by a plan."""

    base: Location
    out: Location
    plan: Plan
    noise: Noise | None
    seed: int
    optimizer_class: str | None
    """The class that left the optimizer state; None where the files say it."""

    @property
    def settings(self) -> dict[str, Any]:
        """What a function that grows one format takes by name."""
        return {
            "plan": self.plan,
            "noise": self.noise,
            "seed": self.seed,
            "optimizer_class": self.optimizer_class,
        }


@dataclass(frozen=True)
class Format:
    """One kind of checkpoint."""

    name: str
    """As messages say it."""
    is_at: Callable[[Location], bool]
    """Whether such a checkpoint lies at a place."""
    grow: Callable[[Asked], dict[str, str]]
    """Writes the wide checkpoint, and returns what was not carried, with reasons."""
    has_noise: bool = True
    """Whether noise can be added to its files."""
    read: Callable[[Location], Snapshot] | None = None
    """What `mu.same` compares; None for a format that it refuses."""

    def grown(
        self,
        base: Location,
        out: Location,
        plan: Plan | None,
        noise: Noise | AutoNoise | None,
        seed: int,
        optimizer_class: str | None,
    ) -> dict[str, str]:
        """Grow a checkpoint, and return what was not carried, with reasons; raises where the call cannot be followed."""
        faults: list[Fault] = []
        if plan is None:
            what = f"a checkpoint of {self.name}, which does not describe its model"
            remedy = "pass plan=mu.infer_plan(base_model, wide_model)"
            faults.append(Fault("checkpoint.needs_plan", printable(str(base)), what, remedy))
        if noise is not None and not self.has_noise:
            what = f"noise is not added to the files of {self.name}"
            faults.append(Fault("noise.not_in_format", "noise", what, "leave it out"))
        elif isinstance(noise, AutoNoise):
            what = "its size is chosen by a loss, and the model is not here to measure one"
            remedy = f"write noise=mu.SignalNoise({DEFAULT_T})"
            faults.append(Fault("noise.needs_loss", "AutoNoise", what, remedy))
        elif noise is not None:
            faults += wrong_noise(noise)
        raise_faults("this checkpoint cannot be grown like that", faults)
        assert plan is not None
        assert not isinstance(noise, AutoNoise)
        return self.grow(Asked(base, out, plan, noise, seed, optimizer_class))


def format_at(place: Location) -> Format | None:
    """The format of the checkpoint at a place; None where no folder of this room knows it.

    >>> from pathlib import Path
    >>> format_at(Path("nothing/here"))
    """
    room = import_module(__package__)
    folders = [entry.name for entry in iter_modules(room.__path__) if entry.ispkg]
    formats: list[Format] = [import_module(f"{__package__}.{name}").FORMAT for name in folders]
    found = [one for one in formats if one.is_at(place)]
    if len(found) > 1:
        what = f"a checkpoint of {' and of '.join(one.name for one in found)}, expected one of them"
        remedy = "copy the files of one of them into a folder of their own"
        fault = Fault("checkpoint.two_formats", printable(str(place)), what, remedy)
        raise_faults("this checkpoint cannot be grown", [fault])
    return found[0] if found else None
