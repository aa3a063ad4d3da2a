"""Independent standard Gaussians, one column at a time, from three samplers.

Knows: scrambled Sobol points, whitening, plain pseudo-random numbers. Knows nothing about programs.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from mupscale.arguments import wrong_whole
from mupscale.errors import Fault, raise_faults
from mupscale.tensors.devices import on_cpu

from .kets import Rows

Sampler = Literal["sobol", "white", "plain"]


class Draws:
    """Columns of Gaussian samples, each independent of all before it.

    `sobol` takes scrambled Sobol points, `white` makes pseudo-random columns centred and orthonormal, so that means
    and products of linear programs have no error, and `plain` leaves them as they are.

    >>> Draws(1024, seed=0, sampler="white").column().mean().abs() < 1e-15
    tensor(True)
    """

    def __init__(self, samples: int, seed: int, sampler: Sampler) -> None:
        faults = [*wrong_whole("samples", samples, least=2), *wrong_whole("seed", seed)]
        if sampler not in get_args(Sampler):
            what = f"it is {sampler!r}, expected one of {', '.join(get_args(Sampler))}"
            faults.append(
                Fault("limits.unknown_sampler", "sampler", what, 'write sampler="sobol", for example')
            )
        if not faults and sampler == "sobol" and samples & (samples - 1):
            faults.append(
                Fault(
                    "limits.not_a_power_of_two",
                    "samples",
                    f"it is {samples}, expected a power of two, in which Sobol points are balanced",
                    "write samples=2**13, for example",
                )
            )
        raise_faults("nothing can be drawn", faults)
        self.samples = samples
        self.sampler: Sampler = sampler
        self._generator = torch.Generator().manual_seed(seed)
        self._seed = seed
        self._used = 0
        self._points = torch.empty(samples, 0, dtype=torch.float64, device="cpu")
        self._earlier = Rows()

    def column(self) -> Tensor:
        """The next column."""
        if self.sampler == "sobol":
            return self._sobol()
        column = torch.randn(self.samples, generator=self._generator, dtype=torch.float64, device="cpu")
        return self._whitened(column) if self.sampler == "white" else column

    def _sobol(self) -> Tensor:
        if self._used == self._points.shape[1]:
            more = max(64, 2 * self._used)
            if more > SobolEngine.MAXDIM:
                what = f"this program needs more than {self._used} Gaussians"
                raise_faults(
                    "there are no more Sobol dimensions",
                    [Fault("limits.too_many_gaussians", "sampler", what, 'write sampler="white"')],
                )
            # Each dimension has a scramble of its own, so columns of a larger engine continue where a smaller one ended.
            with on_cpu():
                engine = SobolEngine(more, scramble=True, seed=self._seed + more)  # type: ignore[no-untyped-call]
                points = engine.draw(self.samples, dtype=torch.float64)
            points[:, : self._used] = self._points
            self._points = points
        column = self._points[:, self._used].contiguous()
        self._used += 1
        cell = 2.0**-30  # of one point, 0 included; its middle is never 0 or 1
        gaussian: Tensor = torch.special.ndtri(column + cell / 2)
        return gaussian

    def _whitened(self, column: Tensor) -> Tensor:
        earlier = self._earlier.all(self.samples)
        for _ in range(2):
            column = column - column.mean()
            column = column - (earlier @ column / self.samples) @ earlier
        column = column / (column @ column / self.samples).sqrt()
        self._earlier.append(column)
        return column
