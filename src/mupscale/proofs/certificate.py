"""The certificate: what was measured, whether it holds, and the likely cause if it does not.

It prints as a table and is saved as JSON. It measures nothing itself; `compare.py` fills it in.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

from ..errors import Fault, MupscaleError
from ..tensors.differences import curve_gap
from ..text import columns
from .causes import FailureKind
from .modes import Modes
from .rounding import COARSE


@dataclass(frozen=True)
class TensorProof:
    """One tensor: its change of units and the two errors measured."""

    name: str
    s: str
    r: str
    gradient: float | None
    """Relative distance of G' from r · dup(G), zeros off the image included; None if it had no gradient."""
    weight: float
    """The same distance of W' from s · dup(W), the largest over all steps."""
    silent: bool
    """True when its gradient is zero or rounding, so that it does not test the gradient scale."""
    rounding: bool = False
    """True when its gradient is rounding. Some optimizers turn rounding into steps, so its weight is not tested."""
    gradient_rounding: float = 0.0
    """The distance of the gradient that rounding alone explains; 0 where this was not measured."""
    weight_rounding: float = 0.0
    """The same for the weight."""
    sight: float | None = None
    """The smallest deviation of a factor from 1 that its gradient would have shown; None where this was not measured."""

    @property
    def shown_gradient(self) -> str:
        """The error of the gradient as a table shows it."""
        return "silent" if self.silent else "none" if self.gradient is None else f"{self.gradient:.1e}"

    @property
    def errors(self) -> tuple[tuple[float, float], ...]:
        """The errors that were tested, each with what rounding alone explains."""
        gradient = () if self.silent else ((self.gradient or 0.0, self.gradient_rounding),)
        return (*gradient, *(() if self.rounding else ((self.weight, self.weight_rounding),)))


@dataclass(frozen=True)
class Failure:
    """The first thing that deviates, and the likely cause."""

    step: int
    where: str
    what: str
    cause: str
    """What a reader may do about it; empty as long as nobody has looked for it."""
    kind: FailureKind
    """What deviates, or why nothing was compared: programs decide by it, and not by the words beside it. "unrecorded" in
    pickles of 0.2.0."""
    another_plan: bool = False
    """Whether another plan may cure it, so that searching for one pays."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read pickles of 0.2.0 too, which have the words alone."""
        self.__dict__.update({"kind": "unrecorded", "another_plan": False, **state})


@dataclass(frozen=True)
class Certificate:
    """The measured proof that a wide run continues its base; "exact" means within `tolerance`. It is true if nothing deviated.

    Raises:
        MupscaleError: If it names no failure although its worst error is above its tolerance.

    >>> import torch, mupscale as mu
    >>> from torch import nn
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> loss = lambda model: model(torch.ones(2, 3)).sum()
    >>> certificate = mu.verify(make(4), lambda: make(8), loss=loss)
    >>> certificate.holds, bool(certificate), certificate.worst < 1e-12
    (True, True, True)
    """

    tensors: tuple[TensorProof, ...]
    """Every tensor: its change of units, and how far its gradient and its weight are off."""
    base_losses: tuple[float, ...]
    """The loss of the base at each step."""
    wide_losses: tuple[float, ...]
    """The loss of the wide run at each step."""
    moved: float
    """How far the base's weights moved, relative to their size. Steps that change nothing would prove nothing."""
    tolerance: float
    """The relative error that counts as equal."""
    dtype: str
    """The dtype in which the copies were compared."""
    plan_hash: str
    """The hash of the plan that was measured."""
    memory: int
    """Peak memory of the two copies in bytes, as it was estimated."""
    failure: Failure | None
    """The first thing that deviates, with its likely cause; None if nothing does."""
    loss_rounding: float = 0.0
    """The relative difference of a loss that rounding alone explains; 0 where this was not measured."""
    remarks: tuple[str, ...] = ()
    """What the certificate does not cover, and under which conditions it was measured."""
    modes: Modes = field(default_factory=dict)
    """What holds in train and in eval mode: a kind, what deviates, or why it was not measured; empty after a failure."""

    def __post_init__(self) -> None:
        if self.holds and not self.worst <= self.tolerance:
            raise MupscaleError(
                f"this certificate contradicts itself: it names no failure, and its worst relative error is {self.worst:.1e}, "
                f"expected at most its tolerance {self.tolerance:.0e}; give it the failure that was measured",
                code="proof.contradicts_itself",
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read pickles of 0.2.0 too, which do not say in which modes they were measured."""
        self.__dict__.update({"modes": {}, **state})

    @property
    def holds(self) -> bool:
        """True when nothing deviated."""
        return self.failure is None

    def __bool__(self) -> bool:
        return self.holds

    @property
    def worst(self) -> float:
        """The largest relative error of a loss, a gradient or a weight that was tested and that rounding does not explain."""
        left = (e if e == e else inf for _, e, own in self._errors if not self.tolerance < e <= own)
        return max(left, default=0.0)

    @property
    def _errors(self) -> list[tuple[str, float, float]]:
        """What was tested, by how much it is off, and what of that rounding alone explains."""
        losses = ("the loss", curve_gap(self.base_losses, self.wide_losses), self.loss_rounding)
        return [losses, *((tensor.name, *pair) for tensor in self.tensors for pair in tensor.errors)]

    def _explained(self) -> list[str]:
        """Lines on what is above the tolerance and explained by rounding, and on what low precision can see."""
        lines = []
        names = list(dict.fromkeys(n for n, e, own in self._errors if self.tolerance < e <= own))
        if names:
            shown = ", ".join(names[:3] + [f"{len(names) - 3} more"] * (len(names) > 3))
            lines.append(
                f"rounding: {shown} differ by more than the tolerance, and so does the base from itself "
                "when its weights move by one unit in the last place"
            )
        sights = {t.name: t.sight for t in self.tensors if t.sight is not None and not t.silent}
        if sights and self.tolerance > COARSE:
            least, most = min(sights, key=lambda n: sights[n]), max(sights, key=lambda n: sights[n])
            lines.append(
                f"{self.dtype} shows a wrong factor on one tensor from {sights[least]:.1%} ({least}) "
                f"to {sights[most]:.1%} ({most}); float64 shows smaller ones"
            )
        return lines

    def raise_if_broken(self) -> Certificate:
        """Return the certificate, or raise an error that names the first deviation."""
        if self.failure is not None:
            where, remedy = (
                f"step {self.failure.step}, {self.failure.where}",
                f"likely cause: {self.failure.cause}",
            )
            fault = Fault("proof.run_deviates", where, self.failure.what, remedy)
            raise MupscaleError("the wide run does not continue the base run", [fault])
        return self

    def to_json(self) -> str:
        """The certificate as JSON, its verdict first."""
        return json.dumps({"holds": self.holds, "worst": self.worst, **asdict(self)}, indent=1)

    def __str__(self) -> str:
        head = ("tensor", "s", "r", "gradient", "weight")
        rows = [(t.name, t.s, t.r, t.shown_gradient, f"{t.weight:.1e}") for t in self.tensors]
        losses = enumerate(zip(self.base_losses, self.wide_losses, strict=True))
        lines = [*columns([head, *rows], indent=0).splitlines(), ""]
        lines += [*(f"step {i:3}  base {a:.15g}  wide {b:.15g}" for i, (a, b) in losses), ""]
        steps = len(self.base_losses)
        verdict = "exact" if self.holds else "BROKEN"
        lines.append(
            f"{verdict}: worst relative error {self.worst:.1e} over {steps} steps in {self.dtype} "
            f"(tolerance {self.tolerance:.0e}); the base moved by {self.moved:.1e}"
        )
        # Steps in train mode leave eval mode unmeasured, which changes no training.
        shown = {n: m for n, m in self.modes.items() if n == "train" or m.kind != "unmeasured"}
        lines += [f"{name} mode: {mode}" for name, mode in shown.items() if mode.kind != "exact" or mode.what]
        lines += [*self._explained(), *self.remarks]
        if self.failure is not None:
            f = self.failure
            lines.append(f"first deviation: step {f.step}, {f.where}: {f.what}")
            lines.append(f"likely cause: {f.cause}")
        return "\n".join(lines)
