"""A checkpoint manager with which a wide torchtitan job starts from a narrow torchtitan checkpoint.

Knows: when torchtitan builds, loads, clips and steps, and how its attention lays out heads. The narrow checkpoint
is read by torchtitan's own manager into a narrow model that is sharded like the wide one, so how a checkpoint spells
its tensors (fused projections are stored apart) stays torchtitan's business; `load_grown_` does the rest. torchtitan is
imported when it is first needed, and not before. Written for torchtitan 0.3; does not follow pipeline stages.
"""

from __future__ import annotations

import json
from dataclasses import field, make_dataclass, replace
from importlib import import_module
from math import inf
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import Fault, MupscaleError, raise_faults
from ..lazy import lazy_subclass
from ..plans.plan import Plan
from ..runs.growth_record import KEY
from ..runs.run import Run
from ..sharded.load import load_grown_
from ..training.units.clip import Clip, clip_before_step_
from ..training.units.stepping import step_in_units_
from .titan_layouts import titan_plan

_TRAINER = "train_state"
"""The name under which torchtitan's Trainer saves itself."""


class Growing:
    """The checkpoint manager of a wide torchtitan job: `initial_load_path` names a narrow checkpoint, and it grows.

    Every step uses each tensor's own learning rate, eps and decay, and `max_norm` clips by the norm that is the same at every
    width. Rates, schedules and what is saved stay written at the reference. torchtitan makes the manager; what you write is its
    `Config`, which adds to torchtitan's own:

    - `base`: the ModelSpec of the narrow run
    - `noise` and `seed`: as for `upscale`
    - `reference`: the ModelSpec at which the constants were written, where the base was itself grown
    - `declared`: what cannot be read off the configs
    - `small`: two small ModelSpecs that prove the plan, without which it is refused unless `prove` is false

    Args:
        config: The `Config`.
        model_parts: The wide model, as torchtitan shards it.
        optimizers: torchtitan's container of optimizers.
        states: What else torchtitan saves and loads.
        **rest: What torchtitan's own manager takes besides.

    Raises:
        MupscaleError: If the plan is not proved, or the job uses what cannot be carried.

    >>> hasattr(Growing, "dcp_load")                          # beyond torchtitan's own: it grows what it loads
    True
    """

    states: dict[str, Any]
    initial_load_path: str | None
    exclude_from_loading: list[str]

    def __init__(
        self,
        config: Any,
        *,
        model_parts: list[nn.Module],
        optimizers: Any,
        states: dict[str, Any],
        **rest: Any,
    ) -> None:
        trainer = states[_TRAINER]
        _refuse(config, trainer)
        super().__init__(config, model_parts=model_parts, optimizers=optimizers, states=states, **rest)  # type: ignore[call-arg]
        self._grown, self._model = config, model_parts[0]
        for spec in (config.base, config.reference):
            if spec is not None:
                spec.model.update_from_config(config=trainer.config)
        small = None if config.small is None else tuple(spec.model for spec in config.small)
        self.plan = titan_plan(config.base.model, trainer.model_config, small=small, declared=config.declared)
        if not self.plan.proved and config.prove:
            what = "the layouts were read off the attention modules, and nothing has measured them"
            remedy = (
                "give small=(narrow, wide), two ModelSpecs of the same kind that are small enough to run, or "
                "prove=False to go without a proof"
            )
            raise_faults(
                "nothing has proved this plan", [Fault("proof.missing", "checkpoint.small", what, remedy)]
            )
        self.early: Plan | None = None
        if config.reference is not None:
            self.early = titan_plan(
                config.reference.model, config.base.model, small=small, declared=config.declared
            )
        self.since = self.plan if self.early is None else self.early.then(self.plan)
        self._optimizers = list(optimizers)
        self.units = [
            step_in_units_(optimizer, self.since, model=self._model) for optimizer in self._optimizers
        ]
        self.clipping = self._take_over_clipping(trainer)
        self.states[KEY] = _Plans(self.plan, self.since)

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load a checkpoint of this wide job as ever; what `initial_load_path` names is narrow, and grows."""
        stock: Any = super()
        if not from_hf and checkpoint_id != self.initial_load_path:
            stock.dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        manager, base, optimizers = self._base()
        wanted = manager._states_to_load(model_only=not self.states.keys() & state_dict.keys())
        manager.dcp_load(wanted, checkpoint_id, from_hf, from_quantized)
        carried = "optimizer" in wanted
        load_grown_(
            Run(base, list(optimizers) if carried else (), since=self.early),
            Run(self._model, self._optimizers if carried else ()),
            plan=self.plan,
            noise=self._grown.noise,
            seed=self._grown.seed,
            since=self.early,
            prove=self._grown.prove,
        )
        for scheduler in self.states["lr_scheduler"]:
            # torchtitan leaves the rate of the next step in the saved groups, which are the base's.
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate

    def _base(self) -> tuple[Any, nn.Module, Any]:
        """A stock manager, the narrow model sharded like the wide one, and the narrow model's optimizers."""
        trainer, spec = self.states[_TRAINER], self._grown.base
        config, settings = trainer.config, import_module("torchtitan.config")
        dtype = import_module("torchtitan.tools.utils").set_default_dtype
        with torch.device("meta"), dtype(settings.TORCH_DTYPE_MAP[config.training.dtype]):
            model = spec.model.build()
        model = spec.parallelize_fn(
            model,
            parallel_dims=trainer.parallel_dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=settings.CompileConfig(enable=False),  # it is read, and never run
            ac_config=None,
            dump_folder=config.dump_folder,
        )
        model.to_empty(device="cpu" if config.training.enable_cpu_offload else trainer.device)
        model.init_weights(buffer_device=None)
        optimizers = config.optimizer.build(model_parts=[model])
        adapter = spec.state_dict_adapter
        kind = import_module("torchtitan.components.checkpointer").CheckpointManager
        shared = {key: value for key, value in self.states.items() if key != KEY}
        manager = kind(
            kind.Config(enable=True, keep_latest_k=0, exclude_from_loading=self.exclude_from_loading),
            dataloader=shared["dataloader"],
            model_parts=[model],
            optimizers=optimizers,
            lr_schedulers=shared["lr_scheduler"],
            states=shared,
            sd_adapter=adapter(spec.model, config.hf_assets_path) if adapter else None,
        )
        return manager, model, optimizers

    def _take_over_clipping(self, trainer: Any) -> list[RemovableHandle]:
        """Clip by the norm that is the same at every width, at the trainer's max_norm, and let it log that norm."""
        training, metrics = trainer.config.training, trainer.metrics_processor
        if training.max_norm == inf:
            return []
        handles = clip_before_step_(
            self._optimizers, self.since, model=self._model, max_norm=training.max_norm
        )
        hooks = self._optimizers[0]._optimizer_step_pre_hooks.values()
        clip, log = [hook for hook in hooks if isinstance(hook, Clip)][-1], metrics.log

        def log_reference_norm(
            step: int, mean: float, most: float, norm: float, *rest: Any, **more: Any
        ) -> None:
            log(step, mean, most, norm if clip.last_norm is None else float(clip.last_norm), *rest, **more)

        metrics.log = log_reference_norm
        # The trainer's own norm depends on the width.
        trainer.config.training = replace(training, max_norm=inf)
        return handles


class _Plans:
    """The plans, saved with every checkpoint of the wide job, and compared when it resumes."""

    def __init__(self, plan: Plan, since: Plan) -> None:
        self._plans = {
            key: json.dumps(p.as_json(), sort_keys=True)
            for key, p in (("plan", plan), ("since_reference", since))
        }

    def state_dict(self) -> dict[str, str]:
        return dict(self._plans)

    def load_state_dict(self, stored: dict[str, str]) -> None:
        if stored != self._plans:
            raise MupscaleError(
                "this checkpoint was grown by another plan than the one of base and model config; resume it with the "
                "configs it was grown with",
                code="growth.other_plan",
            )


def _refuse(config: Any, trainer: Any) -> None:
    faults = []
    if not config.enable:
        faults.append(
            Fault(
                "torchtitan.loading_disabled",
                "checkpoint.enable",
                "False, so nothing is loaded",
                "set it to True",
            )
        )
    if config.base is None:
        what = "no spec of the narrow model, so there is nothing to grow from"
        faults.append(
            Fault("torchtitan.base_not_given", "checkpoint.base", what, "pass the ModelSpec of the base run")
        )
    if trainer.parallel_dims.pp_enabled:
        what = "a rank holds some stages, and the plan and the norm are of the whole model"
        faults.append(Fault("torchtitan.pipeline_stages", "pipeline_parallel_degree", what, "set it to 1"))
    raise_faults("this torchtitan job cannot be grown", faults)


if TYPE_CHECKING:

    class GrowingCheckpointManager(Growing):
        """See `Growing`."""

        Config: Any


def _parent() -> type:
    stock: type = import_module("torchtitan.components.checkpointer").CheckpointManager
    return stock


def _config(stock: Any) -> dict[str, Any]:
    """torchtitan's own configuration with what growth needs besides it."""
    hidden = Annotated[Any, import_module("tyro").conf.Suppress]  # values of Python, not of the command line
    fields: list[Any] = [
        ("base", hidden, field(default=None)),
        ("reference", hidden, field(default=None)),
        ("noise", hidden, field(default=None)),
        ("declared", hidden, field(default=None)),
        ("small", hidden, field(default=None)),
        ("prove", bool, field(default=True)),
        ("seed", int, field(default=0)),
    ]
    config = make_dataclass("Config", fields, bases=(stock.Config,), kw_only=True, slots=True)
    config.__module__, config.__qualname__ = __name__, "GrowingCheckpointManager.Config"
    return {"Config": config}


__getattr__ = lazy_subclass(__name__, "GrowingCheckpointManager", Growing, _parent, _config)
