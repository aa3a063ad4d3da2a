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
    """The units of a quantity: powers of the weight, of the gradient, and of sizes. Written as a product: `W / G`.

    Args:
        weight: The power of the weight.
        gradient: The power of the gradient.
        filled: The power of the share of a tensor that is not zero padding. Only quantities that average over a whole tensor
            (Adafactor's) have it.
        rows: The power of the rows of the matrix that an optimizer sees in a tensor. Only Muon and its relatives have this and the
            following.
        columns: The power of its columns.
        short: The power of the smaller of both.
        blocks: The power of the number of such matrices in a tensor.

    >>> str(W / G), str((W / G) ** Fraction(1, 2)), str(G**2 * ROWS)
    ('W G^-1', 'W^1/2 G^-1/2', 'G^2 rows')
    """

    weight: Fraction = Fraction(0)
    gradient: Fraction = Fraction(0)
    filled: Fraction = Fraction(0)
    rows: Fraction = Fraction(0)
    columns: Fraction = Fraction(0)
    short: Fraction = Fraction(0)
    blocks: Fraction = Fraction(0)

    @property
    def powers(self) -> tuple[Fraction, ...]:
        """The powers, in the order of the fields."""
        return (
            self.weight,
            self.gradient,
            self.filled,
            self.rows,
            self.columns,
            self.short,
            self.blocks,
        )

    @property
    def of_matrices(self) -> bool:
        """Whether it depends on the sizes or the number of matrices."""
        return any(self.powers[3:])

    def __mul__(self, other: Units) -> Units:
        return Units(*(mine + its for mine, its in zip(self.powers, other.powers, strict=True)))

    def __truediv__(self, other: Units) -> Units:
        return self * other**-1

    def __pow__(self, power: int | Fraction) -> Units:
        return Units(*(mine * power for mine in self.powers))

    def __str__(self) -> str:
        named = zip(("W", "G", "filled", "rows", "columns", "short", "blocks"), self.powers, strict=True)
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
ROWS = Units(rows=Fraction(1))
"""The rows of the matrix that an optimizer sees in a tensor, padding included."""
COLUMNS = Units(columns=Fraction(1))
"""Its columns."""
SHORT = Units(short=Fraction(1))
"""The smaller of its rows and columns."""
BLOCKS = Units(blocks=Fraction(1))
"""The number of matrices in a tensor: experts, or heads that are stepped one by one."""


@dataclass(frozen=True, slots=True)
class Change:
    """The change of units of one tensor: s, c, and r, which follows from s r c = 1.

    Args:
        s: The weight scale.
        c: How many copies each entry has.
        filled: How many times larger the share that is not zero padding became.
        rows: How many times more rows its matrices have; 1 unless an optimizer's units depend on it, as for the following.
        columns: How many times more columns.
        short: How many times larger the smaller of both is.
        blocks: How many times more matrices there are.

    >>> change = Change(s=Scale.of("1/2"), c=Fraction(6))      # k_in = 2, k_out = 3
    >>> str(change.r), str(change.factor(W / G))
    ('1/3', '3/2')
    """

    s: Scale = NO_CHANGE
    c: Fraction = Fraction(1)
    filled: Fraction = Fraction(1)
    rows: Fraction = Fraction(1)
    columns: Fraction = Fraction(1)
    short: Fraction = Fraction(1)
    blocks: Fraction = Fraction(1)

    @property
    def r(self) -> Scale:
        """The gradient scale, 1/(s c)."""
        return (self.s * Scale.of(self.c)) ** -1

    def factor(self, units: Units) -> Scale:
        """What a quantity with these units is multiplied by: s^a r^b, and its powers of sizes."""
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
    factor = change.s**units.weight * change.r**units.gradient
    sizes = (change.filled, change.rows, change.columns, change.short, change.blocks)
    for size, power in zip(sizes, units.powers[2:], strict=True):
        if power:
            factor = factor * Scale.of(size) ** power
    return factor
