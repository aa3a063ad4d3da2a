"""The closed recursions of the paper's two worked examples, as plain numbers.

Knows: the formulas of its appendix, in both conventions of time: where growth replaces a gradient step, that
step has rate 0, and the printed sums to T-2 follow. Knows nothing about kets, so that the calculus can be
tested against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mupscale.arguments import wrong_whole
from mupscale.errors import raise_faults

from .examples import Slope
from .schedule import Schedule, check_noise


def three_layer_recursion(
    schedule: Schedule, *, x: float, sigma: float, noise: Mapping[str, float], slope: Slope
) -> list[float]:
    """The limit of `three_layer`. It does not depend on k, nor on the noise of B.

    y = ⟨A, B C x⟩. A step of rate·slope subtracts rate·slope · A (C x)ᵀ from B, and so rate·slope · |A|² |C
    x|² from y. The noise of B is independent of A and C, so it adds nothing to y; the noise of A and C makes
    them longer. Below, |A|² |C x|² is 1 before growth and 1.25² after it: 0.5 · 1 and 0.5 · 0.5 are added,
    then 0.5 · 0.25 · 1.25².

    >>> settings = dict(x=1.0, sigma=1.0, noise={"A": 0.5, "B": 0.5, "C": 0.5}, slope=lambda y: y - 1)
    >>> [round(y, 6) for y in three_layer_recursion(Schedule(steps=4, grow_at=2, rate=0.5), **settings)]
    [0.0, 0.5, 0.75, 0.945312]
    """
    check_noise(noise, "ABC")
    before = x**2 * sigma**4  # |A|² |C x|²
    after = x**2 * (sigma**2 + noise["C"] ** 2) * (sigma**2 + noise["A"] ** 2)
    outputs: list[float] = []
    total = 0.0
    for t, rate in enumerate(schedule.rates()):
        outputs.append(total)
        total -= rate * slope(total) * (before if t < schedule.grow_at else after)
    return outputs


@dataclass(frozen=True)
class FourLayer:
    """Coefficients of the second layer h: M on C D x and N on Bᵀ A from before growth, M' and N' on those after it."""

    outputs: list[float]
    M: list[float]
    N: list[float]
    M_after: list[float]
    N_after: list[float]


def four_layer_recursion(
    schedule: Schedule, *, k: int, x: float, sigma: float, noise: Mapping[str, float], slope: Slope
) -> list[float]:
    """The limit of `four_layer`.

    >>> settings = dict(x=1.0, sigma=1.0, noise=dict.fromkeys("ABCD", 0.0), slope=lambda y: y - 1)
    >>> [round(y, 4) for y in four_layer_recursion(Schedule(steps=4, grow_at=2, rate=0.1), k=2, **settings)]
    [0.0, 0.2, 0.3629, 0.498]
    """
    return four_layer_coefficients(schedule, k=k, x=x, sigma=sigma, noise=noise, slope=slope).outputs


def four_layer_coefficients(
    schedule: Schedule,
    *,
    k: int,
    x: float,
    sigma: float,
    noise: Mapping[str, float],
    slope: Slope | Sequence[float],
) -> FourLayer:
    """The same with its coefficients; `slope` may be a sequence with one number per step.

    y = ⟨A, B C D x⟩ with B and C trained. The second layer h = C D x and the backward vector b = Bᵀ A see
    each other's updates, u_s being rate times slope of step s:

        h_t = C D x - Σ_{s<t} u_s |D x|² b_s        C lost u_s b_s (D x)ᵀ at step s
        b_s = Bᵀ A  - Σ_{r<s} u_r |A|² h_r          B lost u_r A h_rᵀ at step r

    Inserting b into h shows that h_t = M_t · C D x + N_t · Bᵀ A with numbers M and N, and these are the sums
    below: `through` is u_s |D x|², and `backward` is -b_s's coefficient from the second sum. After growth the
    initial terms are the longer vectors with noise, of which the old ones are a part; their coefficients are
    M' and N'.

    At step 1, with all sizes 1, u_0 = -0.1 and through_0 = -0.1, h_1 = C D x + 0.1 Bᵀ A:

    >>> settings = dict(x=1.0, sigma=1.0, noise=dict.fromkeys("ABCD", 0.0), slope=lambda y: y - 1)
    >>> found = four_layer_coefficients(Schedule(steps=2, grow_at=2, rate=0.1), k=2, **settings)
    >>> found.M[1], found.N[1]
    (1.0, 0.1)
    """
    raise_faults("a width is multiplied by a whole number", wrong_whole("k", k, least=1))
    check_noise(noise, "ABCD")
    rates, T = schedule.rates(), schedule.grow_at
    s2 = sigma**2
    A2, B2, C2, D2 = (noise[name] ** 2 for name in "ABCD")
    # What growth adds to |C D x|² and to |Bᵀ A|²: the old matrix with the vector's noise, the matrix's noise
    # with the old vector, noise with noise. The old matrix is duplicated and averages over the k copies,
    # hence 1/k in the first.
    extra_M = (s2 * D2 / k + s2 * C2 + C2 * D2) * x**2
    extra_N = s2 * A2 / k + s2 * B2 + A2 * B2
    steps: list[float] = []  # rate times slope of each step taken so far
    outputs: list[float] = []
    M: list[float] = []
    N: list[float] = []
    M_after: list[float] = []
    N_after: list[float] = []

    def backward(values: Sequence[float], s: int) -> float:
        """What the backward pass at step s sees of a coefficient, through the updates of B."""
        old = s2 * sum(steps[r] * values[r] for r in range(min(s, T)))
        return old + (s2 + A2) * sum(steps[r] * values[r] for r in range(T, s))

    for t, rate in enumerate(rates):
        grown = t >= T
        through = [x**2 * (s2 if s < T else s2 + D2) * steps[s] for s in range(t)]  # the updates of C
        M.append(sum(through[s] * backward(M, s) for s in range(t)) + (0.0 if grown else 1.0))
        N.append(
            sum(through[s] * backward(N, s) for s in range(t)) - sum(through[s] for s in range(min(t, T)))
        )
        M_after.append(1 + sum(through[s] * backward(M_after, s) for s in range(T, t)) if grown else 0.0)
        N_after.append(sum(through[s] * (backward(N_after, s) - 1) for s in range(T, t)) if grown else 0.0)

        def overlap(s: int, t: int = t) -> float:
            """⟨h_s, h_t⟩: old parts meet old and new ones, the noise in the new parts only meets itself."""
            both = x**2 * (M[s] + M_after[s]) * (M[t] + M_after[t])
            both += (N[s] + N_after[s]) * (N[t] + N_after[t])
            return s2**2 * both + M_after[s] * M_after[t] * extra_M + N_after[s] * N_after[t] * extra_N

        # y_t = ⟨Bᵀ A, h_t⟩ by the initial B, minus what its updates add.
        remembered = s2**2 * (N[t] + N_after[t]) + extra_N * N_after[t]
        learned = sum((s2 if s < T else s2 + A2) * steps[s] * overlap(s) for s in range(t))
        outputs.append(remembered - learned)
        here = slope(outputs[t]) if callable(slope) else slope[t]
        steps.append(rate * here)
    return FourLayer(outputs, M, N, M_after, N_after)
