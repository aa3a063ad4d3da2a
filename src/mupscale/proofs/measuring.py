"""The measuring loop of every proof on two models: compare, judge by the base's own rounding, and explain.

Growing proves a plan by one loss, and `verify` certifies a growth by one loss or by steps. They differ in the copies that they
make, and in nothing else:

    1. compare a fresh pair of copies                         nothing deviates: measure the other mode as well, done
    2. take the loss of two copies of the base                they differ: the loss draws its own batch, done
    3. compare three twins of the base with it (rounding.py), and a fresh pair again, up to what rounding explains
    4. look for the cause of what still deviates (diagnose.py)

In 16-bit types 2 and 3 come first, because a small deviation hides there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from ..models.dropout import EVERY_COPY, without_dropout
from ..models.example_loss import Projection
from ..noise.apart import moved_tokens
from ..plans.plan import OUTPUTS_ALONE
from ..runs.run import Run
from .causes import CLIPPING
from .certificate import Certificate, Failure
from .compare import Settings, certificate_of, compare_losses, compare_steps, judge_losses
from .diagnose import diagnose
from .identity import Loss, evaluated
from .modes import Modes, measured_modes, mode_of_steps
from .observed import observed
from .rounding import COARSE, Rounding
from .trial import Step, Trial
from .twin import rounding_of_loss, rounding_of_steps, unrepeated


@dataclass(kw_only=True)
class Measuring(ABC):
    """One measurement. A subclass says how its copies are made."""

    loss: Loss | None
    step: Step | None = None
    """Measured in place of the loss, where there is one."""
    steps: int = 1
    dtype: torch.dtype
    tolerance: float
    settings: Settings = lambda trial: None
    dropout: dict[str, None] = field(default_factory=dict)
    """Where dropout was met, and switched off."""

    @abstractmethod
    def pair(self) -> Trial:
        """A base and a wide run that were not measured yet."""

    @abstractmethod
    def copy(self) -> Run:
        """A copy of the base."""

    def certificate(self, memory: int = 0) -> Certificate:
        """What holds, and the likely cause of what does not."""
        coarse = self.tolerance > COARSE and self._unrepeated() is None
        trial, failure = self._judged(self.pair, self._rounding(None) if coarse else Rounding())
        if failure is not None and not failure.cause:
            with without_dropout():
                failure = self.explained(failure)
        modes = self._modes(trial) if failure is None else {}
        return certificate_of(trial, failure, self.dtype, memory, tuple(self._remarks(trial)), modes)

    def between(self) -> bool:
        """Whether a token lies between copies of experts, so that its loss is not the base's: a new pair may have none."""
        trial = self.pair()
        assert self.loss is not None
        with self._without_dropout(trial):
            return moved_tokens(trial.plan, trial.base.model, trial.wide.model, self.loss)

    def explained(self, failure: Failure) -> Failure:
        """A failure that rounding does not explain, with its likely cause."""
        return diagnose(self.pair, self.step, self.loss, failure)

    def _judged(
        self, fresh: Callable[[], Trial], rounding: Rounding, training: bool | None = None
    ) -> tuple[Trial, Failure | None]:
        """Compare, and judge again with the base's own rounding where something deviates and it was not measured."""
        trial = replace(fresh(), rounding=rounding)
        failure = self._compared(trial)
        if failure is None or failure.cause or rounding.losses:
            return trial, failure
        if (other := self._unrepeated()) is not None:
            return trial, other
        once = trial.once
        if once is not None:  # a loss leaves the models as they were, so it would give the same again
            trial = replace(trial, rounding=self._rounding(training), losses=[])
            return trial, judge_losses(trial, once)
        trial = replace(fresh(), rounding=self._rounding(training))
        return trial, self._compared(trial)

    def _compared(self, trial: Trial) -> Failure | None:
        if self.step is None:
            assert self.loss is not None
            with self._without_dropout(trial):
                return compare_losses(trial, self.loss)
        with self._without_dropout(trial), observed() as seen:
            failure = compare_steps(trial, self.step, self.steps, self.settings)
        widths = (not t.change.norm_weight().is_one for t in trial.plan.tensors.values())
        if failure is None and seen.clips is not None and any(widths):
            what = f"the step calls torch.nn.utils.{seen.clips}, which did not act in these steps"
            return Failure(len(trial.losses) - 1, "all tensors", what, CLIPPING, "clipping")
        return failure

    def _unrepeated(self) -> Failure | None:
        with without_dropout():
            return unrepeated(self.copy, self.step, self.loss, self.tolerance)

    def _rounding(self, training: bool | None) -> Rounding:
        """How far the base parts from itself, in a mode or in its own."""

        def copy() -> Run:
            run = self.copy()
            if training is not None:
                run.model.train(training)
            return run

        with without_dropout():
            if self.step is not None:
                return rounding_of_steps(self.copy, self.step, self.steps)
            assert self.loss is not None
            return rounding_of_loss(copy, self.loss)

    def _modes(self, trial: Trial) -> Modes:
        """What holds in train and in eval mode, after one of them was found exact."""
        if self.step is not None:
            return mode_of_steps(trial.base.model, trial.ran)
        assert self.loss is not None

        def measure() -> str:
            if self._same_code(trial):
                return ""
            again = lambda: replace(trial, losses=[])  # noqa: E731
            _, failure = self._judged(again, trial.rounding, trial.base.model.training)
            return "" if failure is None else f"{failure.where}: {failure.what}"

        with self._without_dropout(trial):
            return measured_modes(measure, self.loss, trial.base.model, trial.wide.model)

    def _same_code(self, trial: Trial) -> bool:
        """Whether both models compute in this mode what they computed before, to the bit.

        Gradients and buffers of the base alone are looked at, which cost a fraction of the wide model's: a mode that changes
        them changes them in the base too.
        """
        assert self.loss is not None
        assert trial.once is not None
        base, wide = trial.once.base, trial.once.wide
        found = evaluated(trial.base.model, self.loss, wanted=lambda value: value == base.value)
        left = {**found.grads, **found.buffers}
        return (
            found.value == base.value
            and all(
                a is b or (a is not None and b is not None and torch.equal(a, b))
                for a, b in (
                    (tensor, left.get(name)) for name, tensor in {**base.grads, **base.buffers}.items()
                )
            )
            and evaluated(trial.wide.model, self.loss, wanted=lambda _: False).value == wide.value
        )

    @contextmanager
    def _without_dropout(self, trial: Trial) -> Iterator[None]:
        with without_dropout(trial.base.model, trial.wide.model) as off:
            yield
        self.dropout |= off.dropout

    def _remarks(self, trial: Trial) -> Iterator[str]:
        """What was measured does not show."""
        if trial.plan.carries_mean:
            yield f"exact in {OUTPUTS_ALONE}; gradients were pulled back"
        if self.step is None and isinstance(self.loss, Projection):
            yield "forward only: a projection of the outputs was measured, and no loss"
        if self.dropout:
            yield f"dropout was off ({', '.join(self.dropout)}): {EVERY_COPY}"
