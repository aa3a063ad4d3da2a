"""Programs at a finite width: the numbers themselves, which is what training computes.

Knows: how N = k·n numbers stand for a vector. The stage before growth is computed at the wide width as well, on
duplicated vectors; that it equals training at width n is the theorem this package is about, and is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from mupscale.arguments import wrong_kind, wrong_whole
from mupscale.errors import Fault, raise_faults

from .program import Backend, Kind, Matrix, Vector


class FiniteWidth(Backend):
    """Run a program with n units before growth and k·n after it.

    `values` gives initial objects by name, in the program's own units and instead of a draw: n or n × n
    numbers for duplicated ones, N or N × N for noise. All others depend on (seed, name) alone.

    >>> finite = FiniteWidth(n=500, k=2, seed=0)
    >>> W, x = finite.matrix("W", "noise"), finite.vector("x", "duplicated")
    >>> abs(finite.dot(W @ x, W @ x) - 1) < 0.2
    True
    """

    def __init__(self, n: int, k: int, seed: int = 0, values: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(k)
        raise_faults("there is no such width", wrong_whole("n", n, least=1))
        given = dict(values or {})
        kinds = [
            f
            for name, value in given.items()
            for f in wrong_kind(name, value, Tensor, "write torch.tensor(…)")
        ]
        raise_faults("these values cannot be used", kinds)
        self.n = n
        self.N = k * n
        self.seed = seed
        self.values = given

    def draw_vector(self, name: str, kind: Kind, scale: float) -> Tensor:
        drawn = self._numbers(name, (self.n if kind == "duplicated" else self.N,), scale)
        return drawn.repeat_interleave(self.k) if kind == "duplicated" else drawn

    def draw_matrix(self, name: str, kind: Kind, scale: float) -> Tensor:
        width = self.n if kind == "duplicated" else self.N
        return self._numbers(name, (width, width), scale / width**0.5)

    def product(self, matrix: Matrix, x: Vector) -> Vector:
        weight: Tensor = matrix.state.T if matrix.transposed else matrix.state
        if matrix.kind == "noise":
            return Vector(self, weight @ x.data)
        means = x.data.view(self.n, self.k).mean(1)  # dup(W)/k, without writing it out
        return Vector(self, (weight @ means).repeat_interleave(self.k))

    def apply(self, function: Callable[..., Tensor], *xs: Vector) -> Vector:
        self.check_own(*xs)
        return Vector(self, function(*(x.data for x in xs)))

    def outer(
        self, function: Callable[..., Tensor], xs: Sequence[Vector], others: Sequence[Vector]
    ) -> Vector:
        self.check_own(*xs, *others)
        rows = [
            function(*(x.data[i : i + 256, None] for x in xs), *(y.data[None] for y in others)).mean(1)
            for i in range(0, self.N, 256)
        ]
        return Vector(self, torch.cat(rows))

    def average(self, x: Vector) -> float:
        self.check_own(x)
        return float(x.data.mean())

    def inner(self, x: Vector, y: Vector) -> float:
        return float(x.data @ y.data) / self.N

    def combine(self, coefficients: Sequence[float], vectors: Sequence[Vector]) -> Vector:
        self.check_own(*vectors)
        total = vectors[0].data * coefficients[0]
        for coefficient, vector in zip(coefficients[1:], vectors[1:], strict=True):
            total.add_(vector.data, alpha=coefficient)
        return Vector(self, total)

    def _numbers(self, name: str, shape: tuple[int, ...], size: float) -> Tensor:
        given = self.values.get(name)
        if given is not None:
            if tuple(given.shape) != shape:
                what = f"shape {tuple(given.shape)} was passed, expected {shape}"
                remedy = "pass n or n × n numbers for duplicated objects, N or N × N for noise"
                raise_faults(
                    "this value does not fit", [Fault("limits.value_of_other_shape", name, what, remedy)]
                )
            return given.cpu().double()
        digest = blake2b(f"{self.seed}\0{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").mul_(size)
