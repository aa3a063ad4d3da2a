"""Regions of equal noise put together are the noise of the rectangle."""

from dataclasses import replace

import pytest
import torch

from mupscale.rules.axes import Axis
from mupscale.tensors.noise import TensorNoise, Waking
from mupscale.tensors.philox import Stream
from mupscale.tensors.triton.regions import regions

AXES = tuple(map(Axis.parse, ("out: 6x2+5", "in: 9x2+4")))
PLAIN = TensorNoise(Stream(3, "w"), 0.3)
KINDS = {
    "plain": PLAIN,
    "a row without": replace(PLAIN, without_row=4),
    "waking": replace(PLAIN, zeros=Waking(0.7, level=0.5)),
    "waking, cut, a row without": replace(PLAIN, zeros=Waking(0.7, (0,), 0.5), without_row=14),
    "zeros alone": replace(PLAIN, std=0.0, zeros=Waking(0.7)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("start", "shape"), [((0, 0), (17, 22)), ((3, 5), (13, 17)), ((4, 20), (1, 2))])
def test_regions_together_are_the_rectangle(kind, start, shape):
    noise = KINDS[kind]
    want = noise.add_(torch.zeros(shape), AXES, start)
    got, covered = torch.zeros(shape), torch.zeros(shape)
    for region in regions(noise, AXES, start, shape):
        at = tuple(
            slice(low - first, low - first + n)
            for low, n, first in zip(region.start, region.shape, start, strict=True)
        )
        covered[at] += 1
        got[at] = replace(PLAIN, std=region.std).add_(torch.zeros(region.shape), AXES, region.start)
        got[at] += region.level
    assert torch.equal(covered, torch.ones(shape))
    assert torch.equal(got, want)
