"""Default numbers of noise where the user gives none: the size to start from, the accepted rise of the loss, the largest size."""

from __future__ import annotations

DEFAULT_T = 0.05
"""t of `SignalNoise` to start from where none was tuned. The loss of a trained Llama rises from 1.85 to 1.92 at 0.05,
to 2.13 at 0.1 and to 4.44 at 0.2 (`benchmarks/noise_damage.py`); a small model that trains on for long gains
most at 0.2 (`python -m reproduce.without_proxy`)."""
DEFAULT_RISE = 0.05
"""The share of what a base has learned that automatic noise may cost, where none is given. A trained Llama goes from 1.66
to 1.88 with it (`benchmarks/auto_noise.py`), and copies are far enough apart to learn different things."""
WAKE = 1.0
"""Noise that wakes a new tensor has this times the spectral norm of the trained tensor that it is like, where it is
no copy: readers of a new block that are random have the size of those of its neighbour."""
STEPS_OF_ALL = 4000
"""Steps that make up for noise that costs all that was learned. On stored runs 2,000 and 4,000 come nearer to the best
noise than 8,000 and than any fixed share (`python -m reproduce.growth --stage print`); 4,000 is the more cautious."""
MOST_RISE = 1.0
"""The largest share that is asked for where none is given: with it the loss is that of a model that has learned nothing.
Small models that had stopped learning gained up to 5 % more with two or three times as much; nothing larger was tried."""
LARGEST_T = 1.0
"""Noise with the spectral norm of the weight itself; with more, the noise is the model."""

BEHIND, BEHIND_OF = 1220, 1435
"""How many steps a stock Llama on text that was grown from width 32 to 64 by copies and noise is behind its base, and of how many. The
base goes on with as many FLOPs, and both are finished and tuned (`python -m reproduce.growth --stage print`)."""
NOT_SOON = (
    f"by copies and noise, behind the base for about {BEHIND:,} of {BEHIND_OF:,} steps in the nearest measured case, at equal FLOPs "
    "(a Llama on text, width 32 to 64)"
)
"""What is said wherever copies and noise are chosen."""


def rise_for(steps: int | None) -> float:
    """The share of what was learned that noise may cost: a 4,000th for every step that follows, and at most all of it.

    Training repairs the loss step by step, while copies that are further apart are used better to the end. So the more
    steps follow, the more noise pays. Where nothing is known about them, 200 are assumed.

    >>> rise_for(1000), rise_for(20_000), rise_for(None)
    (0.25, 1.0, 0.05)
    """
    return DEFAULT_RISE if steps is None else min(steps / STEPS_OF_ALL, MOST_RISE)


APART = 30.0
"""How long the vector is that parts copies of experts, in root mean squares of the router's rows."""
