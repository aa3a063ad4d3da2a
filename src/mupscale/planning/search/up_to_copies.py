"""Compare calls of the base and the wide model: is each output a set of copies of the base's, times one factor?

Layouts are not known here: two outputs agree when the wide one's channels are, in some order, the base's channels
with equal numbers of copies, times a power of k. With k = 2 the factors that code can cause are powers of 2^(1/4):

>>> x = torch.randn(5, 3, dtype=torch.float64)
>>> compare = Comparison({Fraction(2)})
>>> str(compare.factor(x, x[:, [2, 0, 1, 2, 1, 0]])), str(compare.factor(x, x.repeat(1, 2) * 2**0.5))
('1', '2^(1/2)')
>>> compare.factor(x, torch.randn(5, 6, dtype=torch.float64)) is None
True
>>> [str(compare.factor(x, torch.nn.functional.pad(x, (0, n)) * 2)) for n in (1, 3)]  # a channel of zeros counts as none
['2', '2']
>>> carrying = torch.cat([x, x.mean(1, keepdim=True).expand(5, 3)], 1)  # and so do channels that carry the mean of the others
>>> compare.factor(x, carrying) is None, str(Comparison({Fraction(2)}, centred=True).factor(x, carrying))
(True, '1')
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import product
from math import log
from typing import Literal

import torch
from torch import Tensor

from ...rules.scale import ONE, Scale

# Relative to the largest entry. Tighter than the test of the loss (1e-9): a head size in the wrong place changes a
# freshly initialised model by 1e-8 only. float64 rounds at 1e-16,
# and the rest is room for what sums and norms make of that.
_TOLERANCE = 1e-10
Left = Literal["none", "zeros", "means"]
"""Which channels of a wide output count as none."""
_QUARTERS = 12
"""The largest exponent of k is 12/4: a product of three sums over the width."""


class Comparison:
    """The factors that can stand between two outputs, for the growth ratios of one plan."""

    def __init__(self, ratios: Iterable[Fraction], centred: bool = False) -> None:
        self.left_out: tuple[Left, ...] = ("none", "zeros", "means") if centred else ("none", "zeros")
        # More than three ratios give more products than a measured number can tell apart.
        self.bases = [Scale.of(k) for k in sorted(set(ratios))[:3]]
        near = [0, *(sign * j for j in range(1, _QUARTERS + 1) for sign in (1, -1))]
        powers = [[k ** Fraction(j, 4) for j in near] for k in self.bases]
        found = {ONE: 0.0}
        for each in powers:
            found.update({scale: log(float(scale)) for scale in each})
        for one, two in product(range(len(powers)), repeat=2):
            if one < two:
                pairs = product(powers[one][:9], powers[two][:9])
                found.update({a * b: log(float(a * b)) for a, b in pairs})
        self.known = [(value, scale) for scale, value in found.items()]

    def scale(self, ratio: float) -> Scale | None:
        """The product of powers of the growth ratios that a measured ratio is, or None."""
        if not ratio > 0:
            return None
        value = log(ratio)
        distance, scale = min((abs(value - known), i) for i, (known, _) in enumerate(self.known))
        return self.known[scale][1] if distance <= _TOLERANCE else None

    def factor(self, base: Tensor, wide: Tensor) -> Scale | None:
        """The factor by which `wide` differs from copies of `base`, or None if it is no set of copies.

        Shapes that cannot be compared give 1: nothing speaks against them.
        """
        compared = False
        for left in self.left_out:  # a whole multiple may consist of copies, or of one of each and zeros
            pair = _profiles(base, wide, left)
            if pair is not None and (not compared or pair[0].numel() == pair[1].numel() > 0):
                compared = True
                if (scale := self._factor(*pair)) is not None:
                    return scale
        return None if compared else ONE

    def _factor(self, x: Tensor, y: Tensor) -> Scale | None:
        size, other = (float(t.abs().max()) if t.numel() else 0.0 for t in (x, y))
        if not size > 0 or not other > 0:
            return ONE if size == other else None
        if float((y - x).abs().max()) <= _TOLERANCE * size:
            return ONE
        scale = self.scale(float((x * y).sum() / (x * x).sum()))
        if scale is None or not float((y - x * float(scale)).abs().max()) <= _TOLERANCE * other:
            return None
        return scale


def is_batched(tensor: Tensor) -> bool:
    """True for a tensor inside `torch.vmap`, whose entries nothing outside of it can read."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _profiles(base: Tensor, wide: Tensor, left: Left) -> tuple[Tensor, Tensor] | None:
    """One number per channel of both outputs, sorted, the base's once per copy; None if sizes do not fit.

    Channels that are zero everywhere are left out of the wide output if it is no whole multiple, or if they are to be
    `left` out; "means" leaves out those that equal the mean over all channels, as many as the base does not have.
    """
    if base.dim() != wide.dim() or base.is_complex():
        return None
    growing = [d for d, (a, b) in enumerate(zip(base.shape, wide.shape, strict=True)) if a != b]
    if not growing:
        x, y = base.detach().reshape(-1), wide.detach().reshape(-1)
        finite = x.isfinite() & y.isfinite()
        return x[finite].double(), y[finite].double()
    fixed = [d for d in range(base.dim()) if d not in growing]
    x, y = (t.detach().permute(*fixed, *growing).flatten(len(fixed)) for t in (base, wide))
    n, m = x.shape[-1], y.shape[-1]
    if not n:
        return None
    x, y = x.reshape(-1, n).double(), y.reshape(-1, m).double()
    if left == "means":
        apart = (y - y.mean(1, keepdim=True)).abs().amax(0)
        likest = apart.argsort()[: m - n]
        if n < m and float(apart[likest].max()) <= _TOLERANCE * float(y.abs().max()):
            y = y[:, [i for i in range(m) if i not in set(likest.tolist())]]
            m = n
    elif m % n or left == "zeros":
        y = y[:, (y != 0).any(0)]
        m = y.shape[-1]
    if m % n:
        return None
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(len(x), generator=generator, dtype=torch.float64, device="cpu").to(x.device)
    finite = x.isfinite().all(1) & y.isfinite().all(1)
    x, y = ((weights.to(t.device)[finite] @ t[finite]).sort().values for t in (x, y))
    return x.repeat_interleave(m // n), y
