"""Megatron-FSDP goes on from an fsdp_dtensor checkpoint that was grown, and its losses are the base's.

The model and the batches are those of `megatron_run.py`, on one rank: a small `GPTModel` with grouped queries and gated units, sharded by
the Megatron-FSDP of megatron-core, with Megatron's distributed optimizer and schedule. It is saved as Megatron's training loop
saves it, by torch.distributed.checkpoint under explicit names. `grow_megatron_checkpoint` writes a checkpoint of twice the width,
without noise; a job of that width loads it and goes on. Controls load the same checkpoint and change one thing: moments
without units, no moments, the base's learning rates.

    python benchmarks/megatron_fsdp.py

Needs the environment of `megatron_run.py` and einops. Prints a row for every job and, last, `weights=N fsdp=A control=B`: how many wide
weights are not bit for bit those of `mu.widen`, the largest relative difference of a loss from the base's, and the smallest of the
controls' largest differences. The exit code is 1 when N is not 0, A is above 1e-5 or B below 1e-3. Without megatron-core it
prints SKIPPED.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh

import mupscale as mu
from benchmarks import megatron_run
from benchmarks.megatron_run import CONTROLS, END, LEAST, RATE, STOP, WIDTH, Job, K
from harness.program import Outcome, option, run
from harness.torchrun import Curves

FSDP = "megatron.core.distributed.fsdp"
NAMED = "megatron.core.transformer.fsdp_dtensor_checkpoint"


class Ended:
    """A stream of CUDA, or an event, that has always ended."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: Ended()


class Cuda(types.ModuleType):
    """torch.cuda with streams that are none."""

    Stream = Event = Ended

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_stream(self, *_: Any) -> Any:
        return Ended()

    def stream(self, _: Any) -> Any:
        return nullcontext()

    def empty_cache(self) -> None:
        pass


class Torch(types.ModuleType):
    """torch as Megatron-FSDP sees it: its CUDA devices are the CPU."""

    cuda = Cuda("cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, kind: Any, *more: Any) -> torch.device:
        return torch.device("cpu") if "cuda" in str(kind) else torch.device(kind, *more)


class Mesh:
    """Meshes of devices, on the CPU."""

    @staticmethod
    def from_group(group: Any, device_type: str, **more: Any) -> Any:
        return DeviceMesh.from_group(group, device_type="cpu", **more)


@contextmanager
def one_by_one(*_: Any, **__: Any) -> Iterator[Any]:
    """gloo does not join collectives: each is waited for."""
    yield Ended()


def on_cpu() -> None:
    """Replace what Megatron-FSDP of megatron-core 0.16.1 takes from CUDA, beyond `megatron_run.on_cpu`."""
    megatron_run.on_cpu()
    adapter, buffers = (
        import_module(f"{FSDP}.{name}") for name in ("mcore_fsdp_adapter", _inner("param_and_grad_buffer"))
    )
    seen: Any = Torch("torch")
    for module in (
        adapter,
        buffers,
        *(import_module(f"{FSDP}.{_inner(name)}") for name in ("megatron_fsdp", "utils")),
    ):
        module.torch = seen  # type: ignore[attr-defined]
    adapter.DeviceMesh = Mesh  # type: ignore[attr-defined]
    buffers._coalescing_manager = one_by_one  # type: ignore[attr-defined]


def _inner(name: str) -> str:
    return f"src.megatron_fsdp.{name}"


class FsdpJob(Job):
    """A job whose model Megatron-FSDP shards."""

    def tree(self, loading: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """What is saved, or loaded into; and the state dicts of the model and of the optimizer that it was made from."""
        by_name = import_module(NAMED)
        model = self.wrapped.state_dict_for_save_checkpoint()
        by_name.handle_fp8_extra_state_case(model)
        sharding = {"distrib_optim_sharding_type": "fsdp_dtensor"}
        state = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=sharding)
        halves, halved = by_name.handle_swiglu_in_state_dict(self._named(), model, state)
        tree = {"model": halves, "optimizer": halved, "opt_param_scheduler": self.schedule.state_dict()}
        import_module(f"{FSDP}.{_inner('uneven_dtensor')}").preprocess_state_dict_for_uneven_dtensor(tree)
        return tree, model, state

    def _named(self) -> Any:
        """A model that finds parameters behind any number of wrappers: 0.16.1 looks for a name with one too few."""
        own = {name.replace("module.", ""): parameter for name, parameter in self.wrapped.named_parameters()}
        return Namespace(
            config=self.model.config,
            get_parameter=lambda name: own[name.replace("module.", "")],
            named_modules=self.wrapped.named_modules,
        )

    def save(self, folder: Path) -> None:
        more = {"iteration": STOP, "args": Namespace(hidden_size=WIDTH)}
        save({**self.tree(loading=False)[0], **more}, storage_writer=FileSystemWriter(folder))

    def load(self, folder: Path) -> None:
        tree, model, state = self.tree(loading=True)
        load(tree, storage_reader=FileSystemReader(folder))
        self.wrapped.load_state_dict(model, strict=False)
        read = tree["optimizer"]
        steps = {
            name: (read["state"].get(name) or read["state"][f"{name}_w"])["step"] for name in state["state"]
        }
        loaded = {name: {**entry, "step": steps[name].clone()} for name, entry in state["state"].items()}
        self.optimizer.load_state_dict(
            {**state, "state": loaded, "param_to_group_meta": read["param_to_group_meta"]}
        )
        self.schedule.load_state_dict(tree["opt_param_scheduler"])


def wrapped_by(model: Any) -> Any:
    """The model sharded by Megatron-FSDP, with parameters, gradients and state."""
    config = import_module("megatron.core.distributed").DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        use_distributed_optimizer=True,
        gradient_reduce_div_fusion=False,  # an operation of NCCL
    )
    adapter = import_module(f"{FSDP}.mcore_fsdp_adapter")
    return adapter.FullyShardedDataParallel(model.config, config, model, device=torch.device("cpu"))


def job_of(width: int, overrides: Any = None) -> FsdpJob:
    job = megatron_run.job_of(width, "plain", overrides, wrapped_by)
    return FsdpJob(job.model, job.wrapped, job.optimizer, job.schedule, "fsdp")


def worker(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    on_cpu()
    import_module("megatron.core.parallel_state").initialize_model_parallel()
    plan = megatron_run.plan_of("plain")
    narrow, wide = folder / "narrow", folder / "wide"
    job = job_of(WIDTH)
    megatron_run.train(job, 0, STOP)
    job.save(narrow)
    base = {name: tensor.clone() for name, tensor in full(job).items()}
    curves: Curves = {"base": megatron_run.train(job, STOP, END)}
    mu.trainers.grow_megatron_checkpoint(narrow, wide, plan=plan)
    for name in ("wide", *CONTROLS):
        job = job_of(K * WIDTH, mu.trainers.megatron_overrides(wide))
        job.load(wide)
        if name == "wide":
            curves["different"] = [float(different(full(job), plan, base))]
        else:
            change_(job, name, plan)
        curves[name] = megatron_run.train(job, STOP, END)
    (folder / "curves.json").write_text(json.dumps(curves))
    dist.destroy_process_group()


def change_(job: FsdpJob, control: str, plan: mu.Plan) -> None:
    """Take from a wide job what a control goes without."""
    inner = job.optimizer.optimizer
    fastest = max(group["lr"] for group in inner.param_groups)  # that of the tensors whose weight scale is 1
    for group in inner.param_groups if control == "rates" else ():
        group["max_lr"], group["min_lr"], group["lr"] = RATE, LEAST, fastest
    for parameter, state in inner.state.items() if control != "rates" else ():
        r = float(plan[job.optimizer._param_name(parameter).replace("module.", "")].change.r)
        for key, units in (("exp_avg", r), ("exp_avg_sq", r * r)):
            state[key].mul_(0.0 if control == "fresh" else 1 / units)


def different(own: dict[str, Tensor], plan: mu.Plan, base: dict[str, Tensor]) -> int:
    """How many tensors of a wide job are not what `widen` makes of the base's."""
    narrow = megatron_run.model_of(WIDTH, "plain")
    narrow.load_state_dict(base, strict=False)
    wide = mu.widen(narrow, megatron_run.model_of(K * WIDTH, "plain"), plan=plan).model
    return sum(not torch.equal(own[name], tensor) for name, tensor in wide.named_parameters())


def full(job: FsdpJob) -> dict[str, Tensor]:
    """The weights of a job, under the names of its model."""
    state = job.wrapped.state_dict_for_save_checkpoint()
    return {name.replace("module.", ""): t.full_tensor() for name, t in state.items() if t is not None}


def measure(chosen: argparse.Namespace) -> Outcome:
    if chosen.worker is not None:
        worker(Path(chosen.worker[1]))
        return Outcome("")
    if find_spec("megatron") is None or find_spec("einops") is None:
        return Outcome("SKIPPED: megatron-core or einops is not installed; this file says how")
    return megatron_run.compared(__file__, {"fsdp": 1})


if __name__ == "__main__":
    sys.exit(run(measure, option("--worker", nargs=2, help=argparse.SUPPRESS), doc=__doc__))
