"""How hypothesis draws: the same cases in every run by default, new ones with MUPSCALE_HYPOTHESIS=random.

A push must not fail by chance, so the default profile derives its cases from each test. The nightly run draws new cases,
keeps failures in hypothesis's database and prints the line that repeats one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hypothesis import HealthCheck, settings

VARIABLE = "MUPSCALE_HYPOTHESIS"
"""The environment variable that names the profile."""

# A first call may compile a kernel, and machines are shared: neither the time of one case nor that of drawing it says
# anything about the code.
_TIMELESS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
PROFILES = {
    "derandomized": settings(_TIMELESS, derandomize=True, database=None),
    "random": settings(_TIMELESS, derandomize=False, print_blob=True),
}


def chosen(environment: Mapping[str, str]) -> str:
    """The name of the profile that an environment asks for.

    >>> chosen({}), chosen({"MUPSCALE_HYPOTHESIS": "random"})
    ('derandomized', 'random')
    """
    name = environment.get(VARIABLE, "derandomized")
    if name not in PROFILES:
        raise ValueError(f"{VARIABLE}={name} is not a profile, expected one of {', '.join(PROFILES)}")
    return name


def examples(count: int) -> settings:
    """`count` cases, drawn as the chosen profile says."""
    return settings(PROFILES[chosen(os.environ)], max_examples=count)
