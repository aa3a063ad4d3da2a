"""A callback with which Lightning's `Trainer` goes on training a grown model.

Knows: when Lightning clips, steps and saves. The units are `training/stepping.py`'s, the norm is
`training/clip.py`'s. lightning is imported when the callback is first asked for, and not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ..errors import Fault, raise_faults
from ..lazy import lazy_subclass
from ..plans.names import parameter_names
from ..training.clip import Clip
from ..training.stepping import InUnits, step_in_units_
from .going_on import Grown, both_plans, put_plans_

_SHARDING = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "XLAFSDPStrategy")


class FitHooks:
    """Lightning trains a grown model with it: `Trainer(callbacks=[LightningCallback("wide.ckpt")])`.

    Every step uses each tensor's own learning rate, eps and decay, and `gradient_clip_val` clips by the norm that is
    the same at every width. Schedulers, logged rates and what is saved stay as they are, written at the reference.
    Takes the grown checkpoint, a grown directory, the run, or the plan from the reference to the model; `prefix` is
    what the module puts before the plan's names.

    >>> from torch import nn
    >>> import mupscale as mu
    >>> plan = mu.plan_between(lambda n: nn.Linear(n, n), 2, 4)
    >>> type(mu.trainers.LightningCallback(plan)).__name__                   # pass it to the Trainer
    'LightningCallback'
    """

    def __init__(self, since: Grown, *, prefix: str = "model.") -> None:
        self.plans = both_plans(since)
        self.prefix = prefix
        self._units: list[InUnits] = []
        self._clips: dict[int, Clip] = {}
        self._clip_value: float | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._take_off(trainer)
        self._refuse(trainer, pl_module)
        model, since = pl_module.get_submodule(self.prefix.rstrip(".")), self.plans[1]
        self._units = [step_in_units_(optimizer, since, model=model) for optimizer in trainer.optimizers]
        self._clip_value = trainer.gradient_clip_val
        if self._clip_value:
            by_value = str(getattr(trainer.gradient_clip_algorithm, "value", "norm")) == "value"
            norm, value = (None, self._clip_value) if by_value else (self._clip_value, None)
            names = parameter_names(model)
            for optimizer in trainer.optimizers:
                self._clips[id(optimizer)] = Clip(since, names, norm, value, 2.0, [optimizer])
        trainer.gradient_clip_val = None

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        # Not a step hook: Lightning computes gradients in a closure, after those have run.
        clip = self._clips.get(id(optimizer))
        if clip is not None:
            clip(optimizer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        put_plans_(checkpoint, *self.plans)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._take_off(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._take_off(trainer)

    def _take_off(self, trainer: Any) -> None:
        if self._units:
            trainer.gradient_clip_val = self._clip_value
        for units in self._units:
            units.remove()
        self._units, self._clips = [], {}

    def _refuse(self, trainer: Any, pl_module: Any) -> None:
        faults = []
        strategy = type(trainer.strategy).__name__
        if strategy in _SHARDING:
            remedy = "train on one device or with DDP, or use param_groups and clip_ in a loop of your own"
            faults.append(Fault(strategy, "its optimizer and its norm hold parts of tensors", remedy))
        plain = _base(type(pl_module))
        if (
            plain is not None
            and plain.configure_gradient_clipping is not type(pl_module).configure_gradient_clipping
        ):
            remedy = "clip with mupscale.diagnostics.clip_grad_norm_(model, run, max_norm=…) there, and leave gradient_clip_val unset"
            if trainer.gradient_clip_val:
                what = "the module clips in a way of its own, by a norm that depends on the width"
                faults.append(Fault("configure_gradient_clipping", what, remedy))
        raise_faults("the callback cannot follow this Trainer", faults)


def _base(module: type) -> Any:
    """Lightning's own module class, from which the user's derives."""
    return next((c for c in module.__mro__ if c.__name__ == "LightningModule"), None)


def _callback() -> Any:
    """The class all callbacks derive from, under whichever name Lightning is installed."""
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback as OldCallback

        return OldCallback
    return Callback


if TYPE_CHECKING:
    from lightning.pytorch import Callback

    class LightningCallback(FitHooks, Callback):
        """`FitHooks` as a callback."""


__getattr__ = lazy_subclass(__name__, "LightningCallback", FitHooks, _callback)
