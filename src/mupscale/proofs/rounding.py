"""How far a base run parts from itself by rounding, and what a deviation of the wide run is compared with.

Some tensors are zero by nature: the bias of a convolution before a batch norm, the key bias of attention, the running
mean behind two norms. Their values are rounding, and an optimizer may turn rounding into steps of full size. Small
models with batch norms amplify rounding in everything. Neither is a fault of the plan. So where a deviation is found,
a twin of the base is trained beside it, whose weights were moved by one unit in the last place. What parts the twin
from the base by as much as the wide run is parted is rounding.

Worked example, in float64: Linear, BatchNorm, Linear without bias, BatchNorm, ReLU, Linear, widened from 4 to 8. The
second running mean is zero by nature. After five steps the wide one is 1.7e-09 away, above the tolerance of 1e-09, and
the base's twins are 2.0e-09 away from the base: rounding. If s of the last layer is wrong by 1 %, the first loss is
1.2e-03 away, and the twins' is 1.8e-16 away: no rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod, sqrt

import torch
from torch import nn
from torch.optim import Optimizer

from ..plans.plan import Plan
from ..plans.tensor_plan import TensorPlan
from .identity import GRADIENT_TOLERANCE, Identity

MULTIPLE = 64.0
"""A deviation of up to this multiple of the base's own is rounding. Sums of the wide run are longer and in another
order, and there are few twins. On 24 exact runs per dtype the largest multiple is 4.1 in float32 and 28 in bfloat16,
but for one run with 262: a gradient entry near zero had another sign, and the first step of AdamW made a full step of that. Such a run is called broken in bfloat16, and not in float64."""
COARSE = 1e-3
"""Tolerances above this one are those of 16-bit types: a wrong factor of 1 % hides in the rounding of single entries, and
only the factor over all entries of a tensor shows it."""
_SIGMAS = 6.0
"""How many standard errors a factor must be away from 1 to count as wrong."""

_NOISE = 0.25
"""A gradient whose entries round by more than this, relative to their size, has no factor to speak of."""

_ENTRIES = 256
"""A tensor of fewer entries is not judged by its factor: their rounding does not average out. In bfloat16 the factor
of a bias of 4 entries was found up to 11 times as far off as its twins'."""

_UNIT = {"F64": 2**-53, "F32": 2**-24, "BF16": 2**-8, "F16": 2**-11}
"""The relative rounding of one number, by the dtype's name in safetensors."""

_STORED = 50
"""Where stored weights were rounded, gradients may be off by this many roundings of one number. On a trained Llama with zeros,
stored in float32, the worst of 38 tensors was off by 11; a wrong fold is off by a thousand times more."""


@dataclass(frozen=True)
class Rounding:
    """How far a base run and its twin are apart; empty where this was not measured."""

    losses: Sequence[float] = ()
    """The largest relative difference of a loss up to each step."""
    weights: Sequence[Mapping[str, float]] = ()
    """The same of every weight and buffer, by its base name."""
    identity: Identity = field(default_factory=Identity)
    """The comparison of the gradients of the first step."""

    def loss(self, i: int) -> float:
        """How far the loss of step i may be from the base's."""
        return MULTIPLE * self.losses[min(i, len(self.losses) - 1)] if self.losses else 0.0

    def weight(self, entry: TensorPlan, i: int) -> float:
        """How far a weight may be from the base's in new units after step i."""
        if not self.weights:
            return 0.0
        own = self.weights[min(i, len(self.weights) - 1)]
        return MULTIPLE * max((own.get(source, 0.0) for source in entry.sources), default=0.0)

    def gradient(self, entry: TensorPlan) -> float:
        """How far a gradient may be from the base's in new units."""
        return MULTIPLE * max((self.identity.errors.get(s, 0.0) for s in entry.sources), default=0.0)

    def factor(self, entry: TensorPlan) -> float | None:
        """How far the factor between a gradient and the expected one may be from 1; None if it was not measured.

        The entries of a tensor round independently, so that their least-squares factor is known to their spread over
        the root of their number. What they share, the rounding of the loss for example, shows in the twin's factor.
        """
        known = [s for s in entry.sources if s in self.identity.spreads]
        spread = max((self.identity.spreads[s] for s in known), default=0.0)
        entries = prod(entry.base_shape)
        if not known or len(known) < len(entry.sources) or spread > _NOISE or entries < _ENTRIES:
            return None
        shared = max(abs(self.identity.ratios[s] - 1) for s in known)
        return 2 * shared + _SIGMAS * spread / sqrt(entries)


def stored_tolerance(plan: Plan, dtypes: Iterable[str]) -> float:
    """What gradients of stored weights may differ by: those multiplied by no power of two were rounded when they were stored."""
    scales = [entry.change.s.fraction for entry in plan.tensors.values() if entry.sources]
    if all(s is not None and _power_of_two(s.numerator) and _power_of_two(s.denominator) for s in scales):
        return GRADIENT_TOLERANCE
    return max(GRADIENT_TOLERANCE, _STORED * max(_UNIT[dtype] for dtype in dtypes if dtype in _UNIT))


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def together(draws: Sequence[Rounding]) -> Rounding:
    """The largest of what several twins measured."""
    first, found = draws[0], [draw.identity for draw in draws]
    ratios = {n: max((f.ratios[n] for f in found), key=lambda r: abs(r - 1)) for n in first.identity.ratios}
    return Rounding(
        [max(step) for step in zip(*(draw.losses for draw in draws), strict=True)],
        [_largest(step) for step in zip(*(draw.weights for draw in draws), strict=True)],
        Identity(_largest([f.errors for f in found]), (), ratios, (), _largest([f.spreads for f in found])),
    )


def _largest(draws: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: max(draw.get(name, 0.0) for draw in draws) for name in draws[0]}


def move_(model: nn.Module, seed: int) -> None:
    """Move every weight by about one unit in the last place of its dtype, up or down at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            _move_(parameter, torch.finfo(parameter.dtype).eps, generator)


def disturb_(optimizer: Optimizer, eps: float, seed: int) -> None:
    """Move the gradients that an optimizer is about to use by one unit in the last place of a coarser dtype."""
    if not eps:
        return
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    _move_(parameter.grad, eps, generator)


def _move_(tensor: torch.Tensor, eps: float, generator: torch.Generator) -> None:
    up = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.uint8, device="cpu").bool()
    more, less = (torch.tensor(1 + e, dtype=tensor.real.dtype, device=tensor.device) for e in (eps, -eps))
    tensor.mul_(torch.where(up.to(tensor.device), more, less))
