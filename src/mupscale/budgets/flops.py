"""FLOPs of one training step, forward and backward: by the paper's formulas, and counted on the model itself.

Knows arithmetic of sizes, and how to run a model without memory under `torch.utils.flop_counter`. Runs, their
lengths and comparisons are in `cost.py`.

A formula takes six FLOPs for each weight and position: a multiply and an add forward, twice that backward. The
count sees what the model does: no gradient for the input of the first layer, nothing for gains and biases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from ..errors import Fault, MupscaleError, raise_faults
from ..families.copy.losses import tensors_in
from ..models.build import build

TRAINING = 6
"""FLOPs of training for each multiply-accumulate of the forward pass."""


def mlp_flops(inputs: int, width: int, outputs: int, layers: int) -> int:
    """Training FLOPs of an MLP for one sample, biases left out: the paper's formula.

    >>> mlp_flops(54, 500, 7, layers=4)
    3183000
    """
    return TRAINING * (inputs * width + (layers - 2) * width**2 + width * outputs)


def resnet18_flops(width: int, classes: int, size: int) -> int:
    """Training FLOPs of a ResNet-18 with a 3x3 stem for one image; `width` is 64 in the standard one.

    >>> resnet18_flops(64, classes=100, size=32)
    3332812800
    """
    channels, total = width, 3 * width * 9 * size**2
    for stage in range(4):
        out = width * 2**stage
        size = size if stage == 0 else size // 2
        shortcut = 0 if out == channels else channels * out
        total += (9 * channels * out + 3 * 9 * out * out + shortcut) * size**2
        channels = out
    return TRAINING * (total + channels * classes)


def gpt2_parameters(width: int, layers: int, vocabulary: int) -> int:
    """Parameters of a GPT-2 with tied embeddings, all but the position table.

    >>> gpt2_parameters(768, layers=12, vocabulary=50257)
    123653376
    """
    block = 12 * width**2 + 13 * width
    return vocabulary * width + layers * block + 2 * width


def transformer_flops(parameters: int | Fraction, layers: int, width: int, context: int) -> int:
    """Training FLOPs of a transformer for one token: 6N + 12 L H Q T, with `width` = H Q.

    >>> transformer_flops(gpt2_parameters(768, 12, 50257), layers=12, width=768, context=1024)
    855166464
    """
    return int(TRAINING * parameters) + 12 * layers * width * context


@dataclass(frozen=True)
class Step:
    """One training step of a model of some width: its parameters, and its FLOPs both ways."""

    width: int
    parameters: int
    formula: int
    counted: int


def step_of(make: Callable[[], nn.Module] | nn.Module, batch: Any, width: int = 0) -> Step:
    """FLOPs of one training step on one batch; the model needs no memory.

    A batch is what the model is called with: a tensor, a tuple of arguments, or a mapping of keywords. The
    formula takes six FLOPs for each multiply-accumulate of the forward pass, which is the paper's for MLPs and
    ResNets, and for transformers but for their gains and biases.

    >>> step = step_of(lambda: nn.Sequential(nn.Linear(54, 500), nn.ReLU(), nn.Linear(500, 7)), torch.zeros(10, 54))
    >>> step.formula == 10 * mlp_flops(54, 500, 7, layers=2)
    True
    >>> step.formula - step.counted == 10 * 2 * 54 * 500    # no gradient for the data
    True
    """
    model = build(make).to("meta")
    forward, counted = count(model, batch)
    parameters = sum(p.numel() for p in model.parameters())
    return Step(width, parameters, TRAINING * forward // 2, counted)


def count(model: nn.Module, batch: Any) -> tuple[int, int]:
    """FLOPs of forward, and of forward and backward, of a model on the meta device, operation by operation.

    >>> count(nn.Linear(8, 4, device="meta"), torch.zeros(2, 8))      # backward: the weight's gradient alone
    (128, 256)
    """
    claim = "the FLOPs of this model cannot be counted"
    unseen = [name or "model" for name, m in model.named_modules() if isinstance(m, nn.Bilinear)]
    raise_faults(
        claim,
        [
            Fault(
                "cost.bilinear_not_counted",
                n,
                "torch's counter does not see nn.Bilinear",
                "write it as einsum",
            )
            for n in unseen
        ],
    )
    moved = tree_map_only(Tensor, lambda t: t.to("meta"), batch)
    keywords: Mapping[str, Any] = moved if isinstance(moved, Mapping) else {}
    positional: Sequence[Any] = () if keywords else moved if isinstance(moved, tuple) else (moved,)
    try:
        # Tensors that the forward pass makes for itself, such as positions, belong on the meta device too.
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            outputs = [t for _, t in tensors_in(model(*positional, **keywords)) if t.requires_grad]
            forward = int(counter.get_total_flops())
            if outputs:
                torch.stack([t.sum().float() for t in outputs]).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # model code: any exception is reported
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        remedy = (
            "it runs on the meta device, where tensors have shapes and no values: "
            "the batch must fit, and the forward pass may not read values"
        )
        fault = Fault(
            "cost.forward_pass_failed", type(model).__name__, f"{type(error).__name__}: {text[:300]}", remedy
        )
        raise MupscaleError(claim, [fault]) from error
    total = int(counter.get_total_flops())
    where = type(model).__name__
    if not outputs:
        raise MupscaleError(
            claim,
            [
                Fault(
                    "cost.no_gradient", where, "none of its outputs has a gradient", "return what is trained"
                )
            ],
        )
    if not forward:
        raise MupscaleError(
            claim,
            [Fault("cost.nothing_to_count", where, "it has no matrix product, convolution or attention")],
        )
    return forward, total


@dataclass(frozen=True)
class Quadratic:
    """A polynomial of degree two through three points, exact: what FLOPs are as a function of the width.

    >>> Quadratic(((1, 3), (2, 7), (3, 13)))(10)
    Fraction(111, 1)
    """

    points: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]

    def __call__(self, x: int | Fraction) -> Fraction:
        total = Fraction(0)
        for i, (xi, y) in enumerate(self.points):
            term = Fraction(y)
            for j, (xj, _) in enumerate(self.points):
                term *= 1 if i == j else (Fraction(x) - xj) / (xi - xj)
            total += term
        return total


def quadratic(known: Sequence[tuple[int, int]]) -> Quadratic | None:
    """The polynomial through the first three points, or None when the others do not lie on it.

    >>> quadratic([(1, 1), (2, 4), (3, 9), (4, 16)]) is None, quadratic([(1, 1), (2, 8), (3, 27), (4, 64)]) is None
    (False, True)
    """
    first, second, third, *rest = known
    curve = Quadratic((first, second, third))
    return curve if all(curve(x) == y for x, y in rest) else None
