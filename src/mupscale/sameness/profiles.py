"""How far two checkpoints may be apart: the tolerances of every profile, in units of the dtypes that are stored.

Knows: numbers and why they are what they are. Compares nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import MupscaleError


@dataclass(frozen=True)
class Profile:
    """Tolerances. An entry may differ by `entry` times eps of its dtype (of two, the coarser one) times its own size; and by `sums`
    times eps of float32 (or of a finer dtype, if both have one) times its own size plus the root mean square of its tensor."""

    name: str
    entry: float
    sums: float
    number: float
    """How far settings may be apart, relative to their own size. Numbers of steps are always equal."""
    random: bool
    """Whether different random states are a difference, or only noted."""

    @property
    def bits(self) -> bool:
        """Whether tensors of one dtype must have the same bits."""
        return not self.entry and not self.sums


SINGLE = torch.finfo(torch.float32).eps
"""Sums are made in float32 even where weights are stored in fewer bits."""

STRICT = Profile("strict", entry=0, sums=0, number=0, random=True)
"""Saving, loading and cutting tensors in other pieces change no bit, so nothing may."""

STANDARD = Profile("standard", entry=1, sums=0, number=SINGLE, random=False)
"""A conversion may cut off what it should round, or multiply and divide again: either moves an entry by one unit in the last
place, at most eps times its size. A rate that was kept in a float32 tensor comes back with float32's eps."""

RELAXED = Profile("relaxed", entry=1, sums=16, number=SINGLE, random=False)
"""Sums in another order, as other kernels or other numbers of ranks make them, err like the root of their length. 16 is the
root of 256, the length of the sums that blocked kernels make before they add in a wider dtype. Entries that cancel to near
zero err with the size of what was added, so the size of the whole tensor counts too. Then they are rounded once, as above."""

PROFILES = {profile.name: profile for profile in (STRICT, STANDARD, RELAXED)}


def profile_of(name: str) -> Profile:
    """The profile of a name.

    >>> profile_of("strict").bits, profile_of("relaxed").bits
    (True, False)
    """
    if name not in PROFILES:
        raise MupscaleError(
            f"no profile is called {name!r}; expected {', '.join(PROFILES)}", code="argument.unknown_profile"
        )
    return PROFILES[name]
