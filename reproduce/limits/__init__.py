"""The infinite-width limit of training with growth in the middle. Experimental.

One program text runs on three backends: `LinearKets`, exact for linear programs, `SampledKets`, for any, and
`FiniteWidth`, which is training itself. It serves as an oracle for this package's scalings and as an executable form of the theory;
it starts at a random initialisation and its cost grows with the square of the steps, so it is not for tuning.

>>> from reproduce.limits import LinearKets, Schedule, four_layer, four_layer_recursion
>>> settings = dict(x=1.2, sigma=0.9, noise=dict(A=0.5, B=0.8, C=0.7, D=0.6), slope=lambda y: y - 2.5)
>>> schedule = Schedule(steps=13, grow_at=5, rate=0.05, rate_after=0.025)
>>> exact = four_layer(LinearKets(k=2), schedule, **settings)
>>> closed = four_layer_recursion(schedule, k=2, **settings)
>>> max(abs(a - b) for a, b in zip(exact, closed)) < 1e-12
True
"""

from .convergence import convergence
from .examples import four_layer, three_layer
from .finite import FiniteWidth
from .linear import LinearKets
from .mlp import mlp
from .recursions import four_layer_recursion, three_layer_recursion
from .sampled import SampledKets
from .schedule import Schedule

__all__ = [
    "LinearKets",
    "SampledKets",
    "FiniteWidth",
    "Schedule",
    "three_layer",
    "three_layer_recursion",
    "four_layer",
    "four_layer_recursion",
    "mlp",
    "convergence",
]
