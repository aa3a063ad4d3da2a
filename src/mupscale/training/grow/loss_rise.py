"""The rise of the loss due to noise, and when to warn about it.

Works with two losses and a noise size only, wherever they were measured.
"""

from __future__ import annotations

from decimal import Decimal

import torch
from torch import Tensor, nn

from ...arguments import shown
from ...errors import MupscaleError
from ...noise.kinds import AddedNoise, Noise, PairedNoise, given_size
from ...proofs.identity import Loss, keeping_buffers
from ...proofs.modes import in_mode
from ...tensors.random_states import forked

RISE, SHARE = 0.1, 0.1
"""A rise above the larger of 0.1 and a tenth of the base's loss is a jump. On a trained Llama (`benchmarks/noise_damage.py`)
the default noise, t = 0.05, raises 1.85 by 0.06 and stays below; t = 0.1 raises it by 0.28 and is above. The floor of 0.1
keeps a loss near zero, which noise easily multiplies, from warning at once."""


def measured(loss: Loss, model: nn.Module, seed: int = 0) -> float:
    """The loss of a model in eval mode without gradients, at one seed.

    Its modes and buffers and torch's generators are kept: a measurement changes nothing.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    >>> same = lambda m: m(torch.ones(1, 2)).sum()
    >>> measured(same, model) == measured(same, model), model[1].training
    (True, True)
    """
    with in_mode(False, model), keeping_buffers(model), forked(model, seed=seed), torch.no_grad():
        value = loss(model)
    given: object = value
    if not isinstance(given, (int, float)) and not (isinstance(given, Tensor) and given.numel() == 1):
        found = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else shown(given)
        raise MupscaleError(
            f"loss(model) returned {found}, expected one number; return the mean over the batch",
            code="argument.loss_not_one_number",
        )
    return float(value)


def is_jump(before: float, after: float) -> bool:
    """Whether noise raised the loss by more than is usual for a model that stays usable; nan counts as a jump.

    >>> is_jump(1.70, 4.50), is_jump(2.060, 2.152), is_jump(1.0, float("nan"))
    (True, False, True)
    """
    return not after - before <= largest_rise(before)


def largest_rise(before: float) -> float:
    """By how much a loss may rise before it is a jump."""
    return max(RISE, SHARE * abs(before))


def smaller(size: float) -> float:
    """The next smaller size in steps of 1, 2 and 5.

    >>> smaller(0.2), smaller(0.1), smaller(0.05), smaller(0.07), smaller(1.0)
    (0.1, 0.05, 0.02, 0.05, 0.5)
    """
    exponent = Decimal(str(size)).adjusted()
    steps = [Decimal(step).scaleb(power) for power in (exponent - 1, exponent) for step in (1, 2, 5)]
    return float(max(step for step in steps if step < Decimal(str(size))))


def jump_message(before: float, after: float, remedy: str) -> str:
    """The warning about a jump."""
    return (
        f"noise raises the loss from {before:.6g} to {after:.6g}: much of what the base had learned is lost; {remedy}, "
        "unless the training ahead is long enough to learn it again"
    )


def less_of(noise: Noise) -> str:
    """What to write for less noise of the same kind; "" for kinds that move no output.

    >>> from mupscale import MupNoise, SignalNoise
    >>> less_of(SignalNoise(0.2)), less_of(MupNoise({"w": 0.3}))
    ('write SignalNoise(0.1)', 'write smaller sizes in MupNoise')
    """
    size, kind = given_size(noise), type(noise).__name__
    if not isinstance(noise, AddedNoise):
        return ""
    if not isinstance(size, (int, float)) or size <= 0:
        return f"write smaller sizes in {kind}"
    word = "t=" if isinstance(noise, PairedNoise) and noise.t is not None else ""
    return f"write {kind}({word}{smaller(size):g})"
