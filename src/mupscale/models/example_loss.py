"""A loss from example inputs: a fixed random projection of everything that a model returns.

For a model of which only inputs are at hand. Its gradients reach every tensor that the outputs depend on, so they test
the forward; the loss that the model is trained with is not tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from math import sqrt
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import shown
from ..errors import Fault, MupscaleError, raise_faults
from ..tensors.nested import tensors_in
from .names import pattern_of, strip_wrappers

ExampleInputs = tuple[Any, ...] | Mapping[str, Any]
"""What forward is called with: a tuple of positional arguments, or a mapping of named ones."""


class Projection:
    """`loss(model)` of example inputs: the sum of every floating output times fixed random numbers.

    The first model that is measured fixes the shapes of the outputs; a model whose outputs have other shapes is refused.

    >>> loss = Projection((torch.ones(2, 3),))
    >>> loss(nn.Linear(3, 4)).shape
    torch.Size([])
    >>> try:
    ...     loss(nn.Linear(3, 8))
    ... except MupscaleError as error:
    ...     print(error.code)
    model.output_grows
    """

    def __init__(self, inputs: ExampleInputs) -> None:
        if not isinstance(inputs, (tuple, Mapping)):
            raise MupscaleError(
                f"example_inputs is {shown(inputs)}, expected a tuple of the arguments of forward, or a dict of named "
                "ones; write example_inputs=(x,)",
                code="argument.wrong_type",
            )
        self.inputs = inputs
        self.shapes: list[tuple[int, ...]] | None = None

    def __call__(self, model: nn.Module) -> Tensor:
        out = model(**self.inputs) if isinstance(self.inputs, Mapping) else model(*self.inputs)
        found = [tensor for tensor in tensors_in(out) if tensor.is_floating_point() or tensor.is_complex()]
        if not found:
            raise MupscaleError(
                f"forward returned {shown(out)}, which holds no floating tensor; pass loss=, a function of the model",
                code="model.no_floating_output",
            )
        shapes = [tuple(tensor.shape) for tensor in found]
        if self.shapes is None:
            self.shapes = shapes
        raise_faults("the outputs of the two models have different shapes", _different(self.shapes, shapes))
        generator = torch.Generator().manual_seed(0)
        parts = []
        for tensor in found:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            weights = torch.randn(real.shape, generator=generator, dtype=torch.float64, device="cpu")
            # Divided by the root of their number, so that the sum is about as large as one entry.
            weights = weights.to(real.device, real.dtype) / sqrt(max(1, real.numel()))
            parts.append((real * weights).sum())
        return reduce(add, parts)


def _different(base: list[tuple[int, ...]], wide: list[tuple[int, ...]]) -> list[Fault]:
    remedy = "pass loss=, a function of the model that returns one number"
    if len(base) != len(wide):
        what = f"{len(base)} tensors in the base, {len(wide)} in the wide model"
        return [Fault("model.other_number_of_outputs", "outputs", what, remedy)]
    why = "an axis of the output grows, so outputs do not show what is trained"
    return [
        Fault("model.output_grows", f"output {i}", f"{a} in the base, {b} in the wide model: {why}", remedy)
        for i, (a, b) in enumerate(zip(base, wide, strict=True))
        if a != b
    ]


def refuse_unreached(unreached: tuple[str, ...], growing: set[str]) -> None:
    """Raise if a growing tensor gets no gradient from the outputs: then they do not test it."""
    patterns = dict.fromkeys(pattern_of(name) for name in unreached if strip_wrappers(name) in growing)
    what = "it grows and the outputs give it no gradient, so nothing tests it"
    remedy = "pass loss=, the loss that it is trained with"
    faults = [Fault("proof.tensor_not_reached", pattern, what, remedy) for pattern in patterns]
    raise_faults("example inputs do not reach every tensor", faults)
