"""A run of the study as data: what is trained, for how many FLOPs, and which run it starts from."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import log2
from typing import Any, Literal

State = Literal["carried", "wrong_units", "fresh", "fresh_rewarmed", "asymmetric", "kept", "empty"]
"""What growth does to the optimizer's state: carried in its units, copied as if it had none, emptied, or emptied for all
copies of a unit but the first and warmed up again (SPARKLING, arXiv 2602.02472), which parts copies without noise.
With new units it is kept for what was there and empty for what is new, or all empty; both are warmed up again."""
WARMED_UP_AGAIN: tuple[State, ...] = ("fresh_rewarmed", "asymmetric", "kept", "empty")


@dataclass(frozen=True)
class Spec:
    """One run. Without `start` it is trained from scratch for `budget` FLOPs.

    With a `start` at its end (`at` = 1) the run begins a new schedule over `budget` more FLOPs: it is warmed up again,
    and grown if the width differs. With a `start` at a share of its way (`at` < 1) the schedule goes on: the budget is
    the same, and a share `at` of it is spent already.

    >>> base = Spec(width=64, budget=10**9, lr=2**-6, seed=0)
    >>> grown = Spec(width=128, budget=10**9, lr=2**-6, seed=0, start=base, noise=0.1)
    >>> grown.rewarmed, grown.label
    (True, '64 -> 128 +1e+09 lr=2^-6 t=0.1 seed 0')
    """

    width: int
    budget: int
    lr: float
    """The peak rate, at the reference width."""
    seed: int
    layers: int = 4
    """Of the MLP, and where growth is compared in several directions; other models have their own."""
    experts: int = 0
    """Of each layer; 0 is a dense model."""
    top_k: int = 0
    """How many experts a token goes to, where a mixture grows; 0 for the usual number."""
    start: Spec | None = None
    at: float = 1.0
    noise: float = 0.0
    """t of SignalNoise: the spectral norm of the noise over that of the weight."""
    state: State = "carried"
    method: str = "ours"
    """A name of `methods.METHODS`."""
    by_rule: bool = False
    """Whether the noise is the library's own choice, by its rule for the steps that follow; the result has its t."""
    centred: bool = False
    """Whether new channels of a stream that LayerNorm centres carry the mean of the others; else such a stream grows by copies."""
    one_rate: bool = False
    """Whether all tensors get the base's rate and decay; else a tensor that a fold has scaled has its rate in that unit."""
    stop: float = 1.0
    """The share of its steps after which the run ends; its schedule is that of the whole."""

    @property
    def grows(self) -> bool:
        return self.start is not None and self.start.shape != self.shape

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What growth changes: width, layers, experts, experts of a token."""
        return self.width, self.layers, self.experts, self.top_k

    @property
    def rewarmed(self) -> bool:
        """Whether a new schedule begins on a trained model."""
        return self.start is not None and self.at == 1.0

    @property
    def key(self) -> dict[str, Any]:
        """What the result is stored under: every field that is not at its default."""
        told = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {**told, "start": self.start.key} if self.start is not None else told

    @property
    def label(self) -> str:
        told = [f"{self.width}" if self.start is None else f"{self.start.width} -> {self.width}"]
        told.append(f"{'+' if self.rewarmed else ''}{self.budget:.4g}")
        if self.at < 1:
            told.append(f"f={self.at:g}")
        told.append(f"lr=2^{log2(self.lr):g}")
        if self.grows and self.method == "ours":
            told.append("t by rule" if self.by_rule else f"t={self.noise:g}")
        if self.layers != 4:
            told.append(f"layers={self.layers}")
        if self.experts:
            told.append(f"experts={self.experts}" + (f" top_k={self.top_k}" if self.top_k else ""))
        if self.method != "ours":
            told.append(self.method)
        if self.centred:
            told.append("centred")
        if self.one_rate:
            told.append("one rate")
        if self.state != "carried":
            told.append(self.state)
        if self.stop != 1:
            told.append(f"first {self.stop:.0%}")
        return " ".join([*told, f"seed {self.seed}"])

    def with_seed(self, seed: int) -> Spec:
        """The same run with another seed, from its start on."""
        start = None if self.start is None else self.start.with_seed(seed)
        return replace(self, seed=seed, start=start)

    def with_layers(self, layers: int) -> Spec:
        """The same run under so many layers, from its start on."""
        start = None if self.start is None else self.start.with_layers(layers)
        return replace(self, layers=layers, start=start)


def spec_of(key: dict[str, Any]) -> Spec:
    """The spec that a result is stored under.

    >>> grown = Spec(128, 10**9, 2**-6, 0, start=Spec(64, 10**9, 2**-6, 0), noise=0.1)
    >>> spec_of(grown.key) == grown
    True
    """
    start = spec_of(key["start"]) if "start" in key else None
    return Spec(**{**key, "start": start})
