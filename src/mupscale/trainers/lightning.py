"""A callback with which Lightning's `Trainer` continues training a grown model.

Knows: when Lightning clips, steps and saves. The units are `training/units/stepping.py`'s, the norm is
`training/units/clip.py`'s. lightning is imported when the callback is first asked for, and not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ..errors import Fault, raise_faults
from ..lazy import lazy_subclass
from ..models.names import parameter_names
from ..runs.growth_record import KEY, record_of
from ..training.rates.rewarm import saved_schedules, state_of
from ..training.rates.schedules import GrowthSchedule
from ..training.units.clip import Clip
from ..training.units.stepping import InUnits, step_in_units_
from .going_on import Grown, both_plans, read_provenance, schedule_settings, schedulers_for

_SHARDING = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "XLAFSDPStrategy")


class FitHooks:
    """A callback with which Lightning trains a grown model: `Trainer(callbacks=[LightningCallback("wide.ckpt")])`.

    Every step uses each tensor's own learning rate, eps and decay, and `gradient_clip_val` clips by the norm that is
    the same at every width. Schedulers, logged rates and what is saved stay as they are, written at the reference.

    Args:
        since: The grown checkpoint, a grown directory, the run, or the plan from the reference to the model.
        peak_lr: The peak of `rewarm`, written at the reference. By default half of the earlier peak.
        step_cost: What one step costs from now on; needed if the checkpoint has a `GrowthSchedule`.
        rewarm: The schedule to start if that of the checkpoint has ended. A checkpoint of the rewarmed run continues it.
        prefix: What the module puts before the plan's names.

    Raises:
        MupscaleError: If `since` has no record of growth, or the settings of the schedule contradict each other.

    >>> from torch import nn
    >>> import mupscale as mu
    >>> plan = mu.plans.plan_between(lambda n: nn.Linear(n, n), 2, 4)
    >>> type(mu.trainers.LightningCallback(plan)).__name__                   # pass it to the Trainer
    'LightningCallback'
    """

    def __init__(
        self,
        since: Grown,
        *,
        peak_lr: float | None = None,
        step_cost: float | None = None,
        rewarm: GrowthSchedule | None = None,
        prefix: str = "model.",
    ) -> None:
        self.plans = both_plans(since)
        self._record = record_of(self.plans, read_provenance(since))
        self._schedule = schedule_settings(peak_lr, step_cost, rewarm)
        self._states: list[dict[str, Any]] = []
        self.prefix = prefix
        self._units: list[InUnits] = []
        self._clips: dict[int, Clip] = {}
        self._clip_value: float | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._take_off(trainer)
        self._refuse(trainer, pl_module)
        self._go_on(trainer)
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

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        # Lightning would load these states into the schedulers of the module, which may be of any class.
        states = checkpoint.get("lr_schedulers", [])
        if any(map(saved_schedules, states)):
            self._states, checkpoint["lr_schedulers"] = list(states), []

    def _go_on(self, trainer: Any) -> None:
        """Replace the schedulers of the module by those to continue with, which step after every optimizer step."""
        configs, (states, self._states) = trainer.lr_scheduler_configs, (self._states, [])
        expected = len(states or trainer.optimizers)
        if (states or self._schedule["rewarm"] is not None) and len(configs) != expected:
            what = f"the module configures {len(configs)}, expected {expected}, one for each optimizer"
            remedy = 'return {"optimizer": optimizer, "lr_scheduler": scheduler} from configure_optimizers'
            raise_faults(
                "the schedule cannot be continued with these schedulers",
                [Fault("lightning.schedulers_do_not_match", "lr_scheduler", what, remedy)],
            )
        schedulers = [config.scheduler for config in configs]
        states = states or [state_of(scheduler) for scheduler in schedulers]
        chosen = schedulers_for(schedulers, [s.optimizer for s in schedulers], states, **self._schedule)
        for config, scheduler in zip(configs, chosen, strict=True):
            if scheduler is not config.scheduler:
                config.scheduler, config.interval, config.frequency = scheduler, "step", 1
                config.reduce_on_plateau = False

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        # Not a step hook: Lightning computes gradients in a closure, after those have run.
        clip = self._clips.get(id(optimizer))
        if clip is not None:
            clip(optimizer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint[KEY] = self._record

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
            remedy = "train on one device or with DDP, or use param_groups and clip_before_step_ in a loop of your own"
            faults.append(
                Fault(
                    "trainer.shards_parameters",
                    strategy,
                    "its optimizer and its norm hold parts of tensors",
                    remedy,
                )
            )
        plain = _base(type(pl_module))
        if (
            plain is not None
            and plain.configure_gradient_clipping is not type(pl_module).configure_gradient_clipping
        ):
            remedy = "clip with mupscale.trainers.clip_grad_norm_(model, run, max_norm=…) there, and leave gradient_clip_val unset"
            if trainer.gradient_clip_val:
                what = "the module clips in a way of its own, by a norm that depends on the width"
                faults.append(Fault("lightning.clips_by_itself", "configure_gradient_clipping", what, remedy))
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
