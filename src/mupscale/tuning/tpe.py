"""Points proposed by Optuna's TPE, one generation at a time: a pure function of seed and results.

Workers that see the same results propose the same points, so they need not communicate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite

from .grid import Point, tidy

_WORST = 1e6  # the loss that TPE gets for runs that diverged or were stopped: bad, and finite


def propose(
    generation: int,
    seen: Mapping[Point, float],
    *,
    count: int,
    lrs: Sequence[float],
    noises: Sequence[float | None],
    seed: int,
) -> list[Point]:
    """`count` new points within the range of the grid, on a logarithmic scale.

    >>> seen = {Point(0.1): 1.0, Point(0.4): 3.0}
    >>> new = propose(0, seen, count=2, lrs=[0.1, 0.4], noises=[None], seed=0)
    >>> new == propose(0, seen, count=2, lrs=[0.1, 0.4], noises=[None], seed=0), all(0.1 <= p.lr <= 0.4 for p in new)
    (True, True)
    """
    import optuna
    from optuna.distributions import BaseDistribution, FloatDistribution

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space: dict[str, BaseDistribution] = {"lr": FloatDistribution(min(lrs), max(lrs), log=True)}
    positive = [noise for noise in noises if noise]
    if positive:
        space["noise"] = FloatDistribution(min(positive), max(positive), log=True)
    sampler = optuna.samplers.TPESampler(seed=hash((seed, generation)) % 2**31, n_startup_trials=5)
    study = optuna.create_study(sampler=sampler)
    for point, loss in sorted(seen.items()):
        params = {"lr": point.lr, **({"noise": point.noise} if positive else {})}
        if all(isinstance(space[k], FloatDistribution) and _within(params[k], space[k]) for k in space):
            worth = loss if isfinite(loss) else _WORST
            study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=worth))
    found: list[Point] = []
    for _ in range(count):
        asked = study.ask(space)
        found.append(Point(tidy(asked.params["lr"]), tidy(asked.params["noise"]) if positive else None))
        # Pending points count as the worst loss, so that the next one is proposed elsewhere.
        study.tell(asked, max((loss for loss in seen.values() if loss < inf), default=_WORST))
    return found


def _within(value: float | None, distribution: object) -> bool:
    low, high = getattr(distribution, "low", inf), getattr(distribution, "high", -inf)
    return value is not None and low <= value <= high
