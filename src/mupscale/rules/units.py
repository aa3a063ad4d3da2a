"""The one idea: widening is a change of units.

Every tensor has a weight scale s and a number of copies c. Then W' = s dup(W), the chain rule gives
G' = r dup(G) with s r c = 1, and a quantity that behaves like W^a G^b is multiplied by s^a r^b.
Knows: this arithmetic, exactly. Which quantity has which units is data in `optimizers.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from .scale import ONE as NO_CHANGE
from .scale import Scale


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a quantity: powers of the weight, of the gradient, and of the filled share.

    `filled` is the share of a tensor that is not zero padding. Only quantities that average over a
    whole tensor (Adafactor's) depend on it.

    >>> str(W / G), str((W / G) ** Fraction(1, 2)), str(G**2)
    ('W G^-1', 'W^1/2 G^-1/2', 'G^2')
    """

    weight: Fraction = Fraction(0)
    gradient: Fraction = Fraction(0)
    filled: Fraction = Fraction(0)

    def __mul__(self, other: Units) -> Units:
        return Units(self.weight + other.weight, self.gradient + other.gradient, self.filled + other.filled)

    def __truediv__(self, other: Units) -> Units:
        return self * other**-1

    def __pow__(self, power: int | Fraction) -> Units:
        return Units(self.weight * power, self.gradient * power, self.filled * power)

    def __str__(self) -> str:
        named = (("W", self.weight), ("G", self.gradient), ("filled", self.filled))
        parts = [name if power == 1 else f"{name}^{power}" for name, power in named if power]
        return " ".join(parts) or "1"


NEUTRAL = Units()
"""No units: a count, a momentum, a beta. Widening copies it."""
W = Units(weight=Fraction(1))
"""The units of a weight, and of Adam's learning rate: multiplied by s."""
G = Units(gradient=Fraction(1))
"""The units of a gradient, a first moment, Adam's eps: multiplied by r."""
FILLED = Units(filled=Fraction(1))
"""The share of a tensor that is not zero padding; Adafactor's means have it in their units."""


@dataclass(frozen=True, slots=True)
class Change:
    """The change of units of one tensor: s, c, filled, and r which follows from s r c = 1.

    >>> change = Change(s=Scale.of("1/2"), c=Fraction(6))      # k_in = 2, k_out = 3
    >>> str(change.r), str(change.factor(W / G))
    ('1/3', '3/2')
    """

    s: Scale = NO_CHANGE
    c: Fraction = Fraction(1)
    filled: Fraction = Fraction(1)

    @property
    def r(self) -> Scale:
        """The gradient scale, 1/(s c)."""
        return (self.s * Scale.of(self.c)) ** -1

    def factor(self, units: Units) -> Scale:
        """What a quantity with these units is multiplied by: s^a r^b filled^f."""
        return _factor(self, units)

    def norm_weight(self, p: int | Fraction = 2) -> Scale:
        """The weight of this tensor in sum |g|^p that makes a gradient norm the same at every width.

        sum |G'|^p = c r^p sum |G|^p, so the weight is s r^(1-p); for the usual norm, s/r.
        """
        return self.factor(W * G ** (1 - Fraction(p)))

    def norm_weight_root(self, p: float) -> Scale:
        """The weight on a tensor's own p-norm: the p-th root of `norm_weight`."""
        power = Fraction(p).limit_denominator(1000)
        return self.norm_weight(power) ** (1 / power)


@lru_cache(maxsize=4096)
def _factor(change: Change, units: Units) -> Scale:
    filled = Scale.of(change.filled) ** units.filled
    return change.s**units.weight * change.r**units.gradient * filled
