"""Megatron continues from a torch_dist checkpoint that was grown, and its losses are the base's.

A small `GPTModel` of megatron-core (grouped queries, gated units, rotary positions, RMSNorm) is trained with Megatron's own
optimizer and schedule on CPUs, and saved by its `dist_checkpointing`. `grow_megatron_checkpoint` writes a checkpoint of twice
the width, without noise; a stock model of that width loads it with Megatron's own loader and continues. Cases: one rank; tied
embeddings; the distributed optimizer over two ranks; tensor parallelism over two ranks. On one rank new units are woken as well,
and the first loss is the base's. Controls load the same checkpoint and change one thing: moments without units, no moments, the
base's learning rates.

    python benchmarks/megatron_run.py
    python benchmarks/megatron_run.py --fsdp

With `--fsdp` the model is sharded by Megatron-FSDP, on one rank, and saved as Megatron's training loop saves it, by
torch.distributed.checkpoint under explicit names (format `fsdp_dtensor`).

Needs an environment of its own: `pip install torch==2.13.0 numpy psutil packaging safetensors`, then
`pip install --no-deps megatron-core==0.16.1`; with `--fsdp` also einops. Prints a row for every job and, last, `weights=N plain=A
tied=B distributed=C tensor=D awake=U control=E`, with `--fsdp` `weights=N fsdp=A awake=U control=B`: how many wide weights are not
bit for bit those of `mu.grow`, the largest relative difference of a loss from the base's by case, that of the first loss with new
units, and the smallest of the controls' largest differences, one of which is new units once they are trained. The exit code is 1
when N is not 0, a case is above 1e-5 or the controls are below 1e-3.
Without megatron-core it prints SKIPPED.
"""

from __future__ import annotations

import argparse
import sys
import types
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

import mupscale as mu
from harness.program import Outcome, option, run
from harness.torchrun import AWAKE, CHANGED, Curves, compared, finish
from mupscale.formats.megatron.grow import grow_megatron_checkpoint

WORDS, WIDTH, K, LENGTH, ROWS = 64, 32, 2, 16, 8
STOP, END = 8, 16
RATE, LEAST = 1e-2, 1e-3
TIMEOUT = 1200  # seconds for a case, on machines that are shared
CASES = {"plain": 1, "tied": 1, "distributed": 2, "tensor": 2}
"""How many ranks each has."""
FSDP = "megatron.core.distributed.fsdp"
NAMED = "megatron.core.transformer.fsdp_dtensor_checkpoint"


class OnCpu(TorchFunctionMode):
    """What asks for memory of a GPU gets it from the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if "cuda" in str(given.get("device")):
            given["device"] = "cpu"
        return func(*args, **given)


def on_cpu() -> None:
    """Replace what megatron-core 0.16.1 takes from CUDA without asking."""
    plain: Any = torch.Tensor.type
    sharded: Any = import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    fill = sharded._set_main_param_and_optimizer_states

    def with_step(optimizer: Any, parameter: Any, tensors: dict[str, Tensor]) -> None:
        """Without Transformer Engine, its state has a step that its own loader leaves out."""
        group, place = optimizer.model_param_group_index_map[parameter]
        inner = optimizer.optimizer
        step = inner.state[inner.param_groups[group]["params"][place]]["step"]
        fill(optimizer, parameter, {**tensors, "step": step})

    changes: dict[tuple[Any, str], Any] = {
        (torch.cuda, "synchronize"): lambda *_: None,
        (torch.cuda, "current_device"): lambda: torch.device("cpu"),
        (sharded, "_set_main_param_and_optimizer_states"): with_step,
        (torch.Tensor, "cuda"): lambda tensor, *_, **__: tensor,
        # Its distributed optimizer compares type() with names of CUDA's tensors.
        (torch.Tensor, "type"): lambda tensor, *to, **more: (
            plain(tensor, *to, **more) if to or more else f"torch.cuda.{plain(tensor).rpartition('.')[2]}"
        ),
        # Random states of CUDA for dropout, which is off here.
        (import_module("megatron.core.tensor_parallel.random").CudaRNGStatesTracker, "fork"): lambda *_: (
            nullcontext()
        ),
    }
    for (owner, name), value in changes.items():
        setattr(owner, name, value)
    OnCpu().__enter__()  # type: ignore[no-untyped-call]


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


def fsdp_on_cpu() -> None:
    """Replace what Megatron-FSDP takes from CUDA beyond that."""
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


@dataclass
class Job:
    """A model with what trains it, as Megatron's training loop holds them."""

    model: Any
    wrapped: Any
    optimizer: Any
    schedule: Any
    case: str

    def saved(self, loading: bool = False) -> dict[str, Any]:
        """The sharded state dict that is saved, or that is loaded into."""
        if loading and self.case == "distributed":
            # Without Transformer Engine, its state dict fails before the first step.
            self.optimizer.chained_optimizers[0]._init_optimizer_states_with_dummy_values()
        model = self.model.sharded_state_dict()
        by_name = {"distrib_optim_sharding_type": "fully_reshardable"} if self.case == "distributed" else {}
        state = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=by_name)
        tree = {**model, "optimizer": state, "opt_param_scheduler": self.schedule.state_dict()}
        return tree if loading else {**tree, "iteration": STOP, "args": Namespace(hidden_size=WIDTH)}

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        import_module("megatron.core.dist_checkpointing").save(self.saved(), str(folder))

    def load(self, folder: Path) -> None:
        tree = import_module("megatron.core.dist_checkpointing").load(self.saved(loading=True), str(folder))
        weights = {name: tree[name] for name in self.model.state_dict() if name in tree}
        self.model.load_state_dict(weights, strict=False)
        self.optimizer.load_state_dict(tree["optimizer"])
        self.schedule.load_state_dict(tree["opt_param_scheduler"])
        for state in self.inner.state.values():
            # The distributed optimizer gives all of them one tensor, which torch's AdamW counts up once for each.
            state["step"] = state["step"].clone()

    @property
    def inner(self) -> torch.optim.Optimizer:
        """torch's optimizer inside of Megatron's."""
        found: torch.optim.Optimizer = self.optimizer.chained_optimizers[0].optimizer
        return found

    def states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """The state of each parameter, with its name in the model."""
        for name, parameter in self.model.named_parameters():
            yield name, self.inner.state[parameter]


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

    @property
    def inner(self) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = self.optimizer.optimizer
        return found

    def states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        for parameter, state in self.inner.state.items():
            yield self.optimizer._param_name(parameter).replace("module.", ""), state

    def weights(self) -> dict[str, Tensor]:
        """Copies of all weights, under the names of the model."""
        state = self.wrapped.state_dict_for_save_checkpoint()
        whole = {name: t.full_tensor().clone() for name, t in state.items() if t is not None}
        return {name.replace("module.", ""): tensor for name, tensor in whole.items()}

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


def wrapped_by_fsdp(model: Any) -> Any:
    """The model sharded by Megatron-FSDP, with parameters, gradients and state."""
    config = import_module("megatron.core.distributed").DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        use_distributed_optimizer=True,
        gradient_reduce_div_fusion=False,  # an operation of NCCL
    )
    adapter = import_module(f"{FSDP}.mcore_fsdp_adapter")
    return adapter.FullyShardedDataParallel(model.config, config, model, device=torch.device("cpu"))


def model_of(width: int, case: str, ranks: int = 1) -> nn.Module:
    """A GPTModel; with `ranks`, the part of it that one of them has."""
    configs = import_module("megatron.core.transformer.transformer_config")
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    config = configs.TransformerConfig(
        num_layers=2,
        hidden_size=width,
        num_attention_heads=width // 8,
        num_query_groups=width // 16,
        kv_channels=8,
        ffn_hidden_size=3 * width,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.2,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=ranks,
    )
    model: nn.Module = import_module("megatron.core.models.gpt.gpt_model").GPTModel(
        config,
        specs.get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=case == "tied",
        position_embedding_type="rope",
    )
    return model


def job_of(width: int, case: str, overrides: Any = None) -> Job:
    """A model of Megatron with its wrapper, its optimizer and its schedule."""
    distributed = import_module("megatron.core.distributed")
    optimizers = import_module("megatron.core.optimizer")
    fsdp = case == "fsdp"
    sharded = case == "distributed" or fsdp
    torch.manual_seed(0)
    model = model_of(width, case, 2 if case == "tensor" else 1)
    buffers = distributed.DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    wrapped = (
        wrapped_by_fsdp(model) if fsdp else distributed.DistributedDataParallel(model.config, buffers, model)
    )
    config = optimizers.OptimizerConfig(
        optimizer="adam",
        lr=RATE,
        min_lr=LEAST,
        weight_decay=0.1,
        adam_eps=1e-6,
        clip_grad=0.0,
        use_distributed_optimizer=sharded,
    )
    optimizer = optimizers.get_megatron_optimizer(config, [wrapped], config_overrides=overrides)
    schedule = import_module("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=RATE,
        min_lr=LEAST,
        lr_warmup_steps=4,
        lr_decay_steps=2 * END,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=2 * END,
        wd_incr_style="constant",
    )
    return (FsdpJob if fsdp else Job)(model, wrapped, optimizer, schedule, case)


def train(job: Job, first: int, last: int) -> list[float]:
    """Losses of these steps, the same on every rank: the words of a row follow a rule that can be learned."""
    groups = import_module("megatron.core.parallel_state")
    ranks, rank = groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()
    hidden = torch.tril(torch.ones(1, 1, LENGTH, LENGTH)) < 0.5
    losses = []
    for step in range(first, last):
        starts = torch.randint(WORDS, (ROWS, 1), generator=torch.Generator().manual_seed(step))
        words = ((starts + 5 * torch.arange(LENGTH + 1)) % WORDS).view(ranks, -1, LENGTH + 1)[rank]
        positions = torch.arange(LENGTH).expand(len(words), LENGTH)
        job.wrapped.zero_grad_buffer()
        job.optimizer.zero_grad()
        loss: Tensor = job.wrapped(words[:, :-1], positions, hidden, labels=words[:, 1:]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        import_module("megatron.core.distributed").finalize_model_grads([job.wrapped])
        job.optimizer.step()
        job.schedule.step(1)
        total = loss.detach().clone()
        dist.all_reduce(total, group=groups.get_data_parallel_group())
        losses.append(float(total) / ranks)
    return losses


def plan_of(case: str, by: Any = "copies") -> mu.Plan:
    """The plan between two models of one rank, measured with the loss that is trained."""
    narrow, wide = model_of(WIDTH, case), model_of(K * WIDTH, case)
    words = torch.arange(2 * LENGTH).view(2, LENGTH) % WORDS
    hidden = torch.tril(torch.ones(1, 1, LENGTH, LENGTH)) < 0.5
    return mu.infer_plan(
        narrow,
        wide,
        loss=lambda model: model(words, words % LENGTH, hidden, labels=words.roll(1, 1)).mean(),
        declared=mu.Declared.megatron(
            narrow,
            wide,
            folds={"decoder.final_layernorm.weight": f"1/{K}"} if case == "tied" else {},
        ),
        by=by,
    )


def loaded(model: Any, folder: Path) -> nn.Module:
    """A model of one rank with the weights of a checkpoint."""
    tree = import_module("megatron.core.dist_checkpointing").load(model.sharded_state_dict(), str(folder))
    model.load_state_dict({name: tree[name] for name in model.state_dict() if name in tree}, strict=False)
    return cast(nn.Module, model)


def different(narrow: nn.Module, found: Mapping[str, Tensor], case: str, plan: mu.Plan) -> float:
    """How many tensors of a wide job are not what `grow` makes of the narrow model."""
    made = mu.grow(narrow, model_of(K * WIDTH, case), plan=plan).model
    return float(sum(not torch.equal(found[name], tensor) for name, tensor in made.named_parameters()))


def change_(job: Job, control: str, plan: mu.Plan) -> None:
    """Take from a wide job what a control goes without."""
    fastest = max(group["lr"] for group in job.inner.param_groups)  # that of tensors whose weight scale is 1
    for group in job.inner.param_groups if control == "rates" else ():
        group["max_lr"], group["min_lr"], group["lr"] = RATE, LEAST, fastest
    for name, state in job.states() if control != "rates" else ():
        r = float(plan[name].change.r)
        for key, units in (("exp_avg", r), ("exp_avg_sq", r * r)):
            state[key].mul_(0.0 if control == "fresh" else 1 / units)


def worker(case: str, folder: Path) -> None:
    """All jobs of one case, on this rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    on_cpu()
    if case == "fsdp":
        fsdp_on_cpu()
    import_module("megatron.core.parallel_state").initialize_model_parallel()
    plan, units = plan_of(case), plan_of(case, "units") if case in ("plain", "fsdp") else None
    narrow, wide = folder / "narrow", folder / "wide"
    if case == "tensor":
        cut_over(2)
    job = job_of(WIDTH, case)
    train(job, 0, STOP)
    job.save(narrow)
    own = job.weights() if isinstance(job, FsdpJob) else {}
    curves: Curves = {"base": train(job, STOP, END)}
    if dist.get_rank() == 0:
        grow_megatron_checkpoint(narrow, wide, plan=plan)
        if units is not None:
            grow_megatron_checkpoint(narrow, folder / AWAKE, plan=units, noise=mu.NewUnits())
    dist.barrier()
    for name in ("wide", *((AWAKE, *CHANGED) if case in ("plain", "fsdp") else ())):
        start = folder / AWAKE if name == AWAKE else wide
        job = job_of(K * WIDTH, case, mu.trainers.megatron_overrides(start))
        job.load(start)
        if name in CHANGED:
            change_(job, name, plan)
        elif name == "wide" and isinstance(job, FsdpJob):
            base = model_of(WIDTH, case)
            base.load_state_dict(own, strict=False)
            curves["different"] = [different(base, job.weights(), case, plan)]
        curves[name] = train(job, STOP, END)
    if case == "tensor":
        cut_over(1)
    if case != "fsdp":
        found = dict(loaded(model_of(K * WIDTH, case), wide).named_parameters())
        curves["different"] = [different(loaded(model_of(WIDTH, case), narrow), found, case, plan)]
    finish(folder, curves)


def cut_over(ranks: int) -> None:
    """Let Megatron cut its models over so many ranks from now on."""
    groups = import_module("megatron.core.parallel_state")
    groups.destroy_model_parallel()
    groups.initialize_model_parallel(tensor_model_parallel_size=ranks)


def measure(chosen: argparse.Namespace) -> Outcome:
    if chosen.worker is not None:
        worker(chosen.worker[0], Path(chosen.worker[1]))
        return Outcome("")
    if find_spec("megatron") is None or (chosen.fsdp and find_spec("einops") is None):
        return Outcome("SKIPPED: megatron-core or einops is not installed; this file says how")
    cases = {"fsdp": 1} if chosen.fsdp else {chosen.only: CASES[chosen.only]} if chosen.only else CASES
    return compared(__file__, cases, timeout=TIMEOUT)


if __name__ == "__main__":
    part = option("--worker", nargs=2, help=argparse.SUPPRESS)
    only = option("--only", choices=CASES, help="one of the cases")
    fsdp = option("--fsdp", action="store_true", help="Megatron-FSDP instead of these cases")
    sys.exit(run(measure, part, only, fsdp, doc=__doc__))
