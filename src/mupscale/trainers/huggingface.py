"""A callback with which the stock Hugging Face `Trainer` continues training a grown model.

Knows: when the Trainer clips, steps, logs and saves. The units are `training/units/stepping.py`'s, the norm is
`training/units/clip.py`'s. transformers is imported when the callback is first asked for, and not before.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.hooks import RemovableHandle

from ..checkpoints.result.not_carried import NEFTUNE
from ..errors import Fault, MupscaleError, raise_faults
from ..lazy import lazy_subclass
from ..plans.plan import Plan
from ..runs.growth_record import FORMAT, NAME, record_of
from ..tensors.parts import is_sharded
from ..training.rates.rewarm import state_of
from ..training.rates.schedules import GrowthSchedule
from ..training.units.clip import Clip, clip_before_step_
from ..training.units.stepping import InUnits, step_in_units_
from .going_on import Grown, both_plans, read_provenance, schedule_settings, schedulers_for
from .sentences import in_sentence_model


class TrainerHooks:
    """A callback with which the stock `Trainer` trains a grown model: `Trainer(..., callbacks=[HuggingFaceCallback("./wide")])`.

    Every step uses each tensor's own learning rate, eps and decay, and clips by the norm that is the same at
    every width. The scheduler, the logged rate and what is saved stay those of the stock Trainer, written at
    the reference, so a later checkpoint is resumed in the same way. `SentenceTransformerTrainer` takes it too.

    Args:
        since: The grown directory, the run, or the plan from the reference to the model.
        peak_lr: The peak of `rewarm`, written at the reference. By default half of the earlier peak.
        step_cost: What one step costs from now on; needed if the checkpoint has a `GrowthSchedule`.
        rewarm: The schedule to start if that of the checkpoint has ended. A checkpoint of the rewarmed run continues it.

    Raises:
        MupscaleError: If `since` has no record of growth, or the settings of the schedule contradict each other.

    >>> from torch import nn
    >>> import mupscale as mu
    >>> plan = mu.plans.plan_between(lambda n: nn.Linear(n, n), 2, 4)
    >>> type(mu.trainers.HuggingFaceCallback(plan)).__name__                 # pass it to the Trainer
    'HuggingFaceCallback'
    """

    def __init__(
        self,
        since: Grown,
        *,
        peak_lr: float | None = None,
        step_cost: float | None = None,
        rewarm: GrowthSchedule | None = None,
    ) -> None:
        self.plans = both_plans(since)
        self._schedule = schedule_settings(peak_lr, step_cost, rewarm)
        self._record = _record(since, self.plans)
        self._units: InUnits | None = None
        self._clip: Clip | None = None
        self._clip_handles: list[RemovableHandle] = []
        self._max_norm: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._take_off(args)
        _refuse_sharding(args, given["optimizer"])
        if getattr(args, "neftune_noise_alpha", None):
            warnings.warn(f"neftune_noise_alpha: {NEFTUNE}", stacklevel=2)
        inner, model = _unwrapped(given["optimizer"]), given["model"]
        since = in_sentence_model(self.plans[1], model)
        self._go_on(given["lr_scheduler"], inner)
        self._units = step_in_units_(inner, since, model=model)
        self._max_norm = args.max_grad_norm
        if self._max_norm:
            self._clip_handles = clip_before_step_(inner, since, model=model, max_norm=self._max_norm)
            self._clip = [h for h in inner._optimizer_step_pre_hooks.values() if isinstance(h, Clip)][-1]

    def _go_on(self, scheduler: Any, optimizer: Optimizer) -> None:
        """Put the schedule to continue with into the Trainer's scheduler, which the Trainer does not let be replaced."""
        if type(scheduler) is not LambdaLR:
            what = f"a {type(scheduler).__name__}, expected a LambdaLR, which all but a few kinds of the Trainer are"
            fault = Fault(
                "trainer.scheduler_not_replaceable",
                "lr_scheduler",
                what,
                'write TrainingArguments(lr_scheduler_type="linear")',
            )
            raise_faults("this scheduler cannot be replaced", [fault] if any(self._schedule.values()) else [])
            return
        [chosen] = schedulers_for([scheduler], [optimizer], [state_of(scheduler)], **self._schedule)
        if chosen is not scheduler:
            vars(scheduler).update(vars(chosen))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Only between here and the step does the Trainer clip; what it saves has the user's own value.
        args.max_grad_norm = 0.0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        args.max_grad_norm = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        args.max_grad_norm = self._max_norm

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """The norm that was clipped by, in place of the plain one, which depends on the width."""
        if self._clip is None or self._clip.last_norm is None:
            return
        for entry in (logs, state.log_history[-1] if state.log_history else None):
            if entry is not None and "grad_norm" in entry:
                entry["grad_norm"] = float(self._clip.last_norm)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            (folder / NAME).write_bytes(self._record)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._take_off(args)

    def _take_off(self, args: Any) -> None:
        """Leave optimizer and arguments as they were; a run that raised may have left them otherwise."""
        if self._units is not None:
            self._units.remove()
            args.max_grad_norm = self._max_norm
        for handle in self._clip_handles:
            handle.remove()
        self._units, self._clip, self._clip_handles = None, None, []


def _record(since: Grown, plans: tuple[Plan, Plan]) -> bytes:
    """What `mupscale.json` of the grown directory says; kept, because old checkpoints are deleted while a run continues."""
    if isinstance(since, str | Path) and Path(since).is_dir():
        return (Path(since) / NAME).read_bytes()
    record = {"format": FORMAT, **record_of(plans, read_provenance(since))}
    return json.dumps(record, indent=1, sort_keys=True).encode()


def _unwrapped(optimizer: Any) -> Optimizer:
    """The torch optimizer inside accelerate's wrapper."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise MupscaleError(
            f"the Trainer's optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer",
            code="trainer.not_a_torch_optimizer",
        )
    return optimizer


def _refuse_sharding(args: Any, optimizer: Any) -> None:
    """Raise if parameters are sharded: by the Trainer's arguments, or by accelerate's own, which they do not show."""
    remedy = (
        "start it as DDP with torchrun --nproc_per_node=… and without sharding, or use param_groups and clip_before_step_ in a loop of "
        "your own"
    )
    settings = [f"TrainingArguments({name}=…)" for name in ("deepspeed", "fsdp") if getattr(args, name, None)]
    groups = getattr(optimizer, "param_groups", ())
    if not settings and any(is_sharded(p) for group in groups for p in group["params"]):
        settings = ["accelerate's FSDP"]
    other = "leave the callback out, and build the optimizer from mu.trainers.groups_for(model, wide)"
    what = "its optimizer and its norm hold parts of tensors"
    faults = [
        Fault("trainer.shards_parameters", name, what, other if "deepspeed" in name else remedy)
        for name in settings
    ]
    raise_faults("this Trainer shards parameters, and the callback cannot follow them", faults)


if TYPE_CHECKING:
    from transformers import TrainerCallback

    class HuggingFaceCallback(TrainerHooks, TrainerCallback):
        """`TrainerHooks` as a callback."""


def _parent() -> type:
    from transformers import TrainerCallback

    return TrainerCallback


__getattr__ = lazy_subclass(__name__, "HuggingFaceCallback", TrainerHooks, _parent)
