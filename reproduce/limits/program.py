"""The language of programs: initial vectors and matrices, and the operations that every backend implements.

Knows: names, kinds, operators, and what must be refused. Knows nothing about widths or distributions; a program
text is ordinary Python on a backend, and the backend decides whether a vector is N numbers or a random one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from torch import Tensor

from mupscale.arguments import shown, wrong_whole
from mupscale.errors import Fault, MupscaleError, raise_faults

Kind = Literal["duplicated", "noise"]
"""How an initial object came into the wide model: copied from the base, or drawn at the wide width."""


class Vector:
    """A vector of the program; it adds, subtracts, and is multiplied by numbers.

    >>> from reproduce.limits import LinearKets
    >>> kets = LinearKets(k=2)
    >>> x = kets.vector("x", "noise")
    >>> kets.dot(x, 3 * x - x)
    2.0
    """

    __slots__ = ("backend", "data")

    def __init__(self, backend: Backend, data: Any) -> None:
        self.backend = backend
        self.data = data

    def __add__(self, other: Vector) -> Vector:
        return self.backend.combine([1.0, 1.0], [self, other])

    def __sub__(self, other: Vector) -> Vector:
        return self.backend.combine([1.0, -1.0], [self, other])

    def __mul__(self, factor: float) -> Vector:
        return self.backend.combine([float(factor)], [self])

    __rmul__ = __mul__


class Matrix:
    """An initial matrix of the program: `W @ x`, `W.T @ x`."""

    __slots__ = ("backend", "kind", "scale", "state", "transposed")

    def __init__(
        self, backend: Backend, kind: Kind, scale: float, state: Any, transposed: bool = False
    ) -> None:
        self.backend = backend
        self.kind: Kind = kind
        self.scale = scale
        self.state = state
        self.transposed = transposed

    @property
    def T(self) -> Matrix:  # noqa: N802
        return Matrix(self.backend, self.kind, self.scale, self.state, not self.transposed)

    def __matmul__(self, x: Vector) -> Vector:
        self.backend.check_own(x)
        return self.backend.product(self, x)


class Backend(ABC):
    """One meaning of a program. Scalars are Python numbers, so programs branch and loop as they like.

    Sizes are natural: a noise matrix has entries N(0, 1/N) times its scale, a duplicated one is dup(W)/k with W of
    entries N(0, 1/n) times its scale, and vectors have entries N(0, 1) times theirs.
    """

    def __init__(self, k: int) -> None:
        raise_faults("a width is multiplied by a whole number", wrong_whole("k", k, least=1))
        self.k = k
        self._names: set[str] = set()

    def vector(self, name: str, kind: Kind, scale: float = 1.0) -> Vector:
        """An initial vector of independent N(0, scale²) entries, once for each unit or once for each k copies."""
        self._register(name, kind)
        return Vector(self, self.draw_vector(name, kind, scale))

    def matrix(self, name: str, kind: Kind, scale: float = 1.0) -> Matrix:
        """An initial matrix, independent of everything else in the program."""
        self._register(name, kind)
        return Matrix(self, kind, scale, self.draw_matrix(name, kind, scale))

    def dots(self, xs: Sequence[Vector], y: Vector) -> list[float]:
        """⟨x, y⟩ = x·y/N for each of several vectors."""
        self.check_own(y, *xs)
        return [self.inner(x, y) for x in xs]

    def dot(self, x: Vector, y: Vector) -> float:
        """⟨x, y⟩ = x·y/N, and in the limit (1/k) Tr⟨x|y⟩."""
        return self.dots([x], y)[0]

    def check_own(self, *vectors: Vector) -> None:
        """Refuse vectors of another backend, which have other widths or random draws, and values that are not vectors."""
        strangers = [shown(vector) for vector in vectors if not isinstance(vector, Vector)]
        if strangers:
            raise MupscaleError(
                f"{strangers[0]} was passed, expected a vector of the program; write backend.vector(name, kind)",
                code="limits.not_a_vector",
            )
        if any(vector.backend is not self for vector in vectors):
            raise MupscaleError(
                "a vector of another backend was passed; run the whole program on one backend",
                code="limits.vector_of_other_backend",
            )

    def _register(self, name: str, kind: Kind) -> None:
        faults = []
        if name in self._names:
            faults.append(
                Fault(
                    "limits.name_taken",
                    name,
                    "this backend already has an initial object of that name",
                    "take another, or a new backend",
                )
            )
        if kind not in get_args(Kind):
            faults.append(
                Fault(
                    "limits.unknown_kind",
                    name,
                    f"kind {kind!r}, expected one of two",
                    'write "duplicated" or "noise"',
                )
            )
        raise_faults("this initial object cannot be made", faults)
        self._names.add(name)

    @abstractmethod
    def draw_vector(self, name: str, kind: Kind, scale: float) -> Any:
        """What a new initial vector is here."""

    @abstractmethod
    def draw_matrix(self, name: str, kind: Kind, scale: float) -> Any:
        """What a new initial matrix is here."""

    @abstractmethod
    def product(self, matrix: Matrix, x: Vector) -> Vector:
        """MatMul, with the matrix or its transpose."""

    @abstractmethod
    def apply(self, function: Callable[..., Tensor], *xs: Vector) -> Vector:
        """An elementwise function of vectors."""

    @abstractmethod
    def outer(
        self, function: Callable[..., Tensor], xs: Sequence[Vector], others: Sequence[Vector]
    ) -> Vector:
        """The mean over all units β of function(xs at α, others at β): OuterNonlin with r = 1."""

    @abstractmethod
    def average(self, x: Vector) -> float:
        """The mean entry."""

    @abstractmethod
    def inner(self, x: Vector, y: Vector) -> float:
        """⟨x, y⟩ of two vectors that are known to belong here."""

    @abstractmethod
    def combine(self, coefficients: Sequence[float], vectors: Sequence[Vector]) -> Vector:
        """A linear combination of at least one vector."""
