"""Exact positive numbers: fractions and their roots.

Knows: how to multiply, compare, print and parse numbers such as 3/2 or 2^(-1/4) without rounding.
Weight scales are kept in this form so that plans compose, compare and hash exactly; the one
rounding happens when a tensor is multiplied. Knows nothing of what the numbers mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from math import isfinite
from typing import Union

from ..arguments import shown
from ..errors import MupscaleError

Exact = Union[int, Fraction, str, float, "Scale"]

# Roots become floats through decimals of 60 digits: a float64 has 17, so the rounding of a few factors does
# not reach it, and the result does not depend on the machine's libm.
_DIGITS = Context(prec=60)
# A float such as 0.5 or 0.375 means itself. The float64 nearest to 1/3 or 0.1 has a denominator of 2^54 or
# 2^55 and stands for another number, which the caller is asked to write as text. The bound lies between, with
# room for both.
_LARGEST_DYADIC = 2**24
# "3", "1/3", "2^2", "2^-1", "2^(-1/4)": a fraction, then optionally its exponent.
_TERM = re.compile(r"^(\d+)(?:/(\d+))?(?:\^\(?(-?\d+)(?:/(\d+))?\)?)?$")


@lru_cache(maxsize=4096)
def _factorise(number: int) -> tuple[tuple[int, int], ...]:
    """Primes and their powers, by trial division: the numbers are ratios of widths, so their primes are small.

    >>> _factorise(360)
    ((2, 3), (3, 2), (5, 1))
    """
    powers: dict[int, int] = {}
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            powers[divisor] = powers.get(divisor, 0) + 1
            number //= divisor
        divisor += 1 if divisor == 2 else 2
    if number > 1:
        powers[number] = powers.get(number, 0) + 1
    return tuple(powers.items())


@dataclass(frozen=True, slots=True)
class Scale:
    """A positive number as a product of primes with rational exponents, so that scales multiply and compare exactly.

    Args:
        powers: Pairs of prime and exponent. Write `Scale.of("1/2")` instead.

    >>> half = Scale.of("1/2")
    >>> half * Scale.of(2) == Scale.of(1), str(half ** Fraction(1, 4)), float(half)
    (True, '2^(-1/4)', 0.5)
    """

    powers: tuple[tuple[int, Fraction], ...] = ()

    @staticmethod
    def of(value: Exact) -> Scale:
        """Read an integer, a fraction, a text such as "2^(-1/2)", or an exactly representable float."""
        if isinstance(value, Scale):
            return value
        if isinstance(value, str):
            return _parse(value)
        if isinstance(value, float) and not (
            isfinite(value) and value.as_integer_ratio()[1] <= _LARGEST_DYADIC
        ):
            raise MupscaleError(
                f"{value!r} is not an exact scale; write a fraction or a root as text, "
                'such as "1/3" or "2^(-1/2)"',
                code="scale.inexact_float",
            )
        try:
            fraction = Fraction(value)
        except TypeError:
            fraction = Fraction(0)
        if fraction <= 0:
            raise MupscaleError(
                f'{shown(value)} is not an exact scale, expected a number above 0; for example write 2 or "1/3"',
                code="scale.not_a_positive_number",
            )
        powers: dict[int, Fraction] = {}
        for number, sign in ((fraction.numerator, 1), (fraction.denominator, -1)):
            for prime, power in _factorise(number):
                powers[prime] = powers.get(prime, Fraction(0)) + sign * power
        return _normal(powers.items())

    def __mul__(self, other: Scale) -> Scale:
        powers = dict(self.powers)
        for prime, power in other.powers:
            powers[prime] = powers.get(prime, Fraction(0)) + power
        return _normal(powers.items())

    def __truediv__(self, other: Scale) -> Scale:
        return self * other**-1

    def __pow__(self, exponent: int | Fraction) -> Scale:
        return _normal((prime, power * exponent) for prime, power in self.powers)

    @property
    def fraction(self) -> Fraction | None:
        """The value as a fraction, or None when it is irrational."""
        if any(power.denominator != 1 for _, power in self.powers):
            return None
        value = Fraction(1)
        for prime, power in self.powers:
            value *= Fraction(prime) ** int(power)
        return value

    @property
    def operand(self) -> tuple[float, bool]:
        """What a number is multiplied by or, if the flag is True, divided by: a quotient is rounded once.

        >>> Scale.of("1/3").operand, Scale.of("2").operand
        ((3.0, True), (2.0, False))
        """
        fraction = self.fraction
        if fraction is not None and fraction.numerator == 1:
            return float(fraction.denominator), True
        return float(self), False

    @property
    def is_one(self) -> bool:
        """True for the scale that changes nothing."""
        return not self.powers

    def __float__(self) -> float:
        fraction = self.fraction
        if fraction is not None:
            return float(fraction)
        value = Decimal(1)
        for prime, power in self.powers:
            exponent = _DIGITS.divide(Decimal(power.numerator), Decimal(power.denominator))
            value = _DIGITS.multiply(value, _DIGITS.power(Decimal(prime), exponent))
        return float(value)

    def __str__(self) -> str:
        fraction = self.fraction
        if fraction is not None:
            return str(fraction)
        return "*".join(str(prime) if power == 1 else f"{prime}^({power})" for prime, power in self.powers)

    def __repr__(self) -> str:
        return f"Scale.of({str(self)!r})"


ONE = Scale()
"""The scale that changes nothing."""


def _normal(powers: Iterable[tuple[int, Fraction]]) -> Scale:
    return Scale(tuple(sorted((prime, Fraction(power)) for prime, power in powers if power != 0)))


def _parse(text: str) -> Scale:
    product = ONE
    for term in text.replace(" ", "").split("*"):
        match = _TERM.match(term)
        if match is None or any(
            group is not None and int(group) == 0 for group in (match[1], match[2], match[4])
        ):
            raise MupscaleError(
                f'{text!r} is not an exact scale; expected a product such as "1/3", "2^(-1/2)" or "3*2^(1/4)"',
                code="scale.not_a_product",
            )
        base = Scale.of(Fraction(int(match[1]), int(match[2] or 1)))
        product = product * base ** Fraction(int(match[3] or 1), int(match[4] or 1))
    return product
