"""Jobs of accelerate and of Lightning, sharded by FSDP2 over two ranks on CPUs: a base, wide ones from its checkpoint, controls.

A small perceptron is trained with AdamW, decay and clipping by a norm: by accelerate (`fsdp_version=2`) and by Lightning
(`ModelParallelStrategy`). From the checkpoint in the middle, jobs of twice the width start through `load_grown_`, without
noise. In Lightning one of them clips in the engine's own hook and one with `mu.clip_before_step_`. The controls start in the same way and
then continue with the engine's own groups and norm, or without clipping. One rank of all jobs of an engine:

    torchrun … harness/engines.py --worker ENGINE FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

import mupscale as mu
from harness.torchrun import Curves, curves_of, finish

WORLD, WIDTH, K, INPUTS, OUTPUTS, ROWS = 2, 16, 2, 8, 2, 16
STOP, END, CLIP = 6, 12, 0.2
CONSTANTS: dict[str, Any] = {"lr": 2e-2, "weight_decay": 0.1}
TIMEOUT = 240  # seconds for an engine
CONTROLS = ("plain", "unclipped")


def make(width: int) -> nn.Sequential:
    hidden = [nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(width, OUTPUTS))


def make_wide_on_meta() -> nn.Module:
    return mu.plans.on_meta(lambda: make(K * WIDTH))


def shard_(model: nn.Module, **given: Any) -> None:
    for part in model.children():
        if isinstance(part, nn.Linear):
            fully_shard(part, **given)
    fully_shard(model, **given)


def plan_of_pair() -> mu.Plan:
    return mu.plans.plan_between(make, WIDTH, K * WIDTH)


def adamw(model: nn.Module, plan: mu.Plan | None = None) -> torch.optim.AdamW:
    """AdamW with groups of the plan, or the plain one."""
    if plan is None:
        return torch.optim.AdamW(model.parameters(), **CONSTANTS)
    return torch.optim.AdamW(mu.param_groups(model, plan, torch.optim.AdamW, **CONSTANTS))


def loss_of(model: Callable[[Tensor], Tensor], step: int) -> Tensor:
    """The loss on this rank's own rows."""
    generator = torch.Generator().manual_seed(WORLD * step + dist.get_rank())
    x = torch.randn(ROWS, INPUTS, generator=generator)
    target = (x[:, :OUTPUTS] * x[:, 1 : OUTPUTS + 1]).sin()
    return (model(x) - target).square().mean()


def over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / WORLD


class AccelerateJobs:
    """The jobs of accelerate; one Accelerator serves them all, and forgets each before the next."""

    def __init__(self, folder: Path) -> None:
        accelerate = import_module("accelerate")
        state, kind = import_module("accelerate.state"), accelerate.DistributedType.FSDP
        self.checkpoint, self.plan = folder / "accelerate", plan_of_pair()
        self.accelerator: Any = accelerate.Accelerator(cpu=True)
        # accelerate ignores its FSDP plugin on CPUs.
        state.PartialState._shared_state["distributed_type"] = kind
        self.accelerator.state.distributed_type = kind
        self.plugins = {
            policy: accelerate.FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy=policy,
                transformer_cls_names_to_wrap=["Linear"],
                cpu_ram_efficient_loading=False,
                state_dict_type="SHARDED_STATE_DICT",
            )
            for policy in ("transformer_based_wrap", "no_wrap")
        }

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, policy: str = "transformer_based_wrap"
    ) -> tuple[Any, Any]:
        self.accelerator.free_memory()
        self.accelerator.state.fsdp_plugin = self.plugins[policy]
        prepared = self.accelerator.prepare(model, optimizer)
        return prepared[0], prepared[1]

    def train(self, model: Any, optimizer: Any, steps: Iterable[int], *, own_norm: bool) -> list[float]:
        losses = []
        for step in steps:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            self.accelerator.backward(loss)
            if own_norm:
                self.accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            losses.append(over_ranks(loss))
        return losses

    def go_on(self, model: Any, optimizer: Any) -> list[float]:
        """Load the optimizer state with the weights, and train to the end in units."""
        mu.load_grown_(self.checkpoint, mu.Run(model, optimizer.optimizer), plan=self.plan)
        mu.clip_before_step_(optimizer.optimizer, self.plan, model=model, max_norm=CLIP)
        return self.train(model, optimizer, range(STOP, END), own_norm=False)

    def base(self) -> list[float]:
        torch.manual_seed(0)
        narrow = make(WIDTH)
        model, optimizer = self.prepare(narrow, adamw(narrow))
        self.train(model, optimizer, range(STOP), own_norm=True)
        weights, state = get_state_dict(model, optimizer.optimizer)
        save({"model": weights, "optim": state}, checkpoint_id=str(self.checkpoint))
        return self.train(model, optimizer, range(STOP, END), own_norm=True)

    def wide(self) -> list[float]:
        model = make(K * WIDTH)
        return self.go_on(*self.prepare(model, adamw(model, self.plan)))

    def stepped(self) -> list[float]:
        broad = make(K * WIDTH)
        model, optimizer = self.prepare(broad, adamw(broad))
        mu.step_in_units_(optimizer.optimizer, self.plan, model=model)
        return self.go_on(model, optimizer)

    def sharded_first(self) -> list[float]:
        model = make_wide_on_meta()
        shard_(model)
        mu.load_grown_(self.checkpoint, model, plan=self.plan)
        return self.go_on(*self.prepare(model, adamw(model, self.plan), "no_wrap"))

    def plain(self) -> list[float]:
        broad = make(K * WIDTH)
        model, optimizer = self.prepare(broad, adamw(broad))
        units = mu.step_in_units_(optimizer.optimizer, self.plan, model=model)
        mu.load_grown_(self.checkpoint, mu.Run(model, optimizer.optimizer), plan=self.plan)
        units.remove()
        return self.train(model, optimizer, range(STOP, END), own_norm=True)


def run_accelerate(folder: Path) -> Curves:
    jobs = AccelerateJobs(folder)
    names = ("base", "wide", "stepped", "sharded_first", "plain")
    return {name: getattr(jobs, name)() for name in names}


def run_lightning(folder: Path) -> Curves:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.utils.data import DataLoader

    plan, path = plan_of_pair(), folder / "lightning.ckpt"
    inner = plan.rename(lambda name: f"model.{name}")  # the attribute that holds the model

    class Base(lightning.LightningModule):
        first = 0

        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []

        def build(self) -> nn.Module:
            torch.manual_seed(0)
            return make(WIDTH)

        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model = self.build()
                shard_(self.model, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]

        def configure_optimizers(self) -> Any:
            return adamw(self.model)

        def training_step(self, rows: Tensor, index: int) -> Tensor:
            loss = loss_of(self.model, self.first + index)
            self.losses.append(over_ranks(loss))
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            if self.first + self.global_step == STOP:
                self.trainer.save_checkpoint(path)

    class Wide(Base):
        first = STOP

        def build(self) -> nn.Module:
            return make_wide_on_meta()

        def configure_optimizers(self) -> Any:
            return adamw(self.model, plan)

        def on_train_start(self) -> None:
            mu.load_grown_(path, mu.Run(self, self.inner_optimizer()), plan=inner)

        def inner_optimizer(self) -> Any:
            optimizer: Any = self.optimizers()
            return optimizer.optimizer

        def configure_gradient_clipping(self, *_: Any, **given: Any) -> None:
            mu.trainers.clip_grad_norm_(self.model, plan, max_norm=CLIP)

    class Plain(Wide):
        configure_optimizers = Base.configure_optimizers
        configure_gradient_clipping = Base.configure_gradient_clipping

        def on_train_start(self) -> None:
            units = mu.step_in_units_(self.inner_optimizer(), inner, model=self)
            super().on_train_start()
            units.remove()

    class Unclipped(Wide):
        def configure_gradient_clipping(self, *_: Any, **given: Any) -> None:
            """Nothing is clipped here."""

    class Hooked(Unclipped):
        def on_train_start(self) -> None:
            super().on_train_start()
            mu.clip_before_step_(self.inner_optimizer(), plan, model=self.model, max_norm=CLIP)

    def fit(module: Base) -> list[float]:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=WORLD,
            strategy=ModelParallelStrategy(
                data_parallel_size=WORLD, tensor_parallel_size=1, process_group_backend="gloo"
            ),
            max_steps=END - module.first,
            gradient_clip_val=CLIP,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        rows: Any = range(WORLD * (END - module.first))  # steps draw their own
        trainer.fit(module, DataLoader(rows))
        return module.losses

    kinds: dict[str, type[Base]] = {
        "base": Base,
        "wide": Wide,
        "hooked": Hooked,
        "plain": Plain,
        "unclipped": Unclipped,
    }
    curves = {name: fit(kind()) for name, kind in kinds.items()}
    return {**curves, "base": curves["base"][STOP:]}


ENGINES: dict[str, Callable[[Path], Curves]] = {"accelerate": run_accelerate, "lightning": run_lightning}


def worker(engine: str, folder: Path) -> None:
    """One rank of all jobs of one engine."""
    torch.set_num_threads(1)
    finish(folder, ENGINES[engine](folder))


def measure(engine: str) -> Curves:
    return curves_of(__file__, engine, WORLD, timeout=TIMEOUT, settings={"CUDA_VISIBLE_DEVICES": ""})


if __name__ == "__main__":
    worker(sys.argv[2], Path(sys.argv[3]))
