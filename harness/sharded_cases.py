"""What every rank of a sharded job runs: load the same base into shards in every way, and digest what came out.

A stock Llama whose sizes divide unevenly (for all sources), wider, deeper and both, and the same with new units, a
convolutional net, a GPT-2 with fused qkv and a padded Llama (for checkpoints of torch.distributed and the running base).
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import mupscale as mu
from harness.launched import folder
from harness.models import CASES
from mupscale.checkpoints.request import Request
from mupscale.families.config.goal import Goal
from mupscale.families.record import FamilyPlan
from mupscale.models.names import named_tensors
from mupscale.plans.ends import identity_plan

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "tie_word_embeddings": False,
}
UNITS = {
    **SIZES,
    "hidden_size": 36,
    "intermediate_size": 70,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
"""What the same Llama grows to by new units."""
SEED = 7
QUICK = "MUPSCALE_SHARDED_QUICK"
"""Set in the environment of a program and of its ranks: fewer models and goals."""
NOISES: dict[str, tuple[Any, tuple[str, float] | None]] = {
    "none": (None, None),
    "mup": (mu.MupNoise(0.1), ("sigma", 0.1)),
    "signal": (mu.SignalNoise(0.2), ("t", 0.2)),
    "units": (mu.NewUnits(), None),
}
STREAMED = ("none", "mup", "signal")
"""What a request of a directory can ask for."""
SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


@dataclass(frozen=True)
class Model:
    """A base, and how a wide one is built; the goal names the plan."""

    base: Callable[[], nn.Module]
    wide: Callable[[str], nn.Module]
    plan: Callable[[str], mu.Plan]
    goals: tuple[str, ...]


def goals() -> tuple[str, ...]:
    """What the stock Llama grows to: k, or k+to; one of them where a quick run was asked for."""
    return ("3",) if QUICK in os.environ else ("2", "3", "ffn=2+layers=4")


def request(goal: str, noise: tuple[str, float] | None) -> Request:
    """What is asked of a streamed job.

    >>> print(request("ffn=2+layers=3", None).goal)
    -k ffn=2 --to layers=3
    """
    k, _, to = goal.partition("+")
    return Request(Goal.parse(k, to or None), noise, SEED)


def others() -> tuple[str, ...]:
    """Models besides it."""
    return ("GPT-2", "llama+u") if QUICK in os.environ else ("ResNet", "GPT-2", "Llama+p", "llama+u")


def noises(name: str) -> tuple[str, ...]:
    """Those that a model gets: where nothing is copied, the sizes of noise that is added to copies say nothing."""
    return ("none", "units") if name == "llama+u" else tuple(NOISES)


def words_loss(model: nn.Module, number: int = 0) -> Tensor:
    """The loss of a Llama on the words of a step."""
    ids = torch.randint(97, (4, 16), generator=torch.Generator().manual_seed(number))
    found: Tensor = model(input_ids=ids, labels=ids).loss
    return found


def family(goal: str) -> FamilyPlan:
    return _read_family(folder() / f"family{goal}.json")


@cache
def _read_family(path: Path) -> FamilyPlan:
    return FamilyPlan.from_json(path.read_text())


def llama_model(config: Any) -> nn.Module:
    import transformers

    cls: Any = transformers.LlamaForCausalLM
    return cls(transformers.AutoConfig.for_model("llama", **config))  # type: ignore[no-any-return]


def stock_model(grown: FamilyPlan) -> nn.Module:
    """The wide model of a family plan, in its class."""
    import transformers

    fields = {name: value for name, value in grown.wide_config.items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(grown.wide_config["model_type"], **fields)
    return getattr(transformers, grown.wide_architecture)(config)  # type: ignore[no-any-return]


def model_named(name: str) -> Model:
    if name == "llama":
        return Model(
            lambda: llama_model(SIZES),
            lambda goal: stock_model(family(goal)),
            lambda goal: family(goal).plan,
            goals(),
        )
    planned = folder() / f"{name}.json"
    base, wide = ends_of(name)
    return Model(base, lambda _: wide(), lambda _: mu.Plan.from_json(planned.read_text()), ("0",))


def ends_of(name: str) -> tuple[Callable[[], nn.Module], Callable[[], nn.Module]]:
    """What builds the base and the wide model of one of the others."""
    if name == "llama+u":
        return lambda: llama_model(SIZES), lambda: llama_model(UNITS)
    case = CASES[name]
    return lambda: case.make(case.base), lambda: case.make(case.wide)


def adamw(model: nn.Module, plan: mu.Plan) -> torch.optim.AdamW:
    return torch.optim.AdamW(mu.param_groups(model, plan, torch.optim.AdamW, **SETTINGS))


def shard_(model: nn.Module, mesh: DeviceMesh, tensor_parallel: DeviceMesh | None = None) -> nn.Module:
    """Every block on its own, then the rest, as people do it."""
    blocks = [
        m
        for m in model.modules()
        if type(m).__name__ in ("LlamaDecoderLayer", "GPT2Block", "Residual", "LlamaBlock")
    ]
    for block in blocks:
        if tensor_parallel is not None:
            columns = {f"self_attn.{p}_proj": ColwiseParallel() for p in "qkv"}
            columns |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
            rows = {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
            parallelize_module(block, tensor_parallel, {**columns, **rows})
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def digest(run: mu.Run, full: Callable[[Tensor], Tensor]) -> str:
    """One hash over every weight, buffer and moment of a run, by name."""
    names: dict[int, str] = {}
    found: dict[str, Tensor] = {}
    for name, kind, tensor in named_tensors(run.model):
        if id(tensor) not in names:
            names[id(tensor)] = name
            found[f"{kind} {name}"] = tensor
    for optimizer in run.optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                found[f"state {names[id(parameter)]} {key}"] = torch.as_tensor(value)
    digested = hashlib.sha256()
    for name in sorted(found):
        whole = full(found[name].detach()).contiguous()
        digested.update(f"{name} {tuple(whole.shape)} {whole.dtype}".encode())
        digested.update(whole.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digested.hexdigest()[:16]


def gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def wide_run(
    model: Model, goal: str, mesh: DeviceMesh, tensor_parallel: DeviceMesh | None = None, dtype: Any = None
) -> mu.Run:
    """The wide model on the meta device, cut over the ranks, with an optimizer in units."""
    built = mu.plans.on_meta(lambda: model.wide(goal))
    if dtype is not None:
        built = built.to(dtype)
    shard_(built, mesh, tensor_parallel)
    return mu.Run(built, adamw(built, model.plan(goal)))


def base_run(model: Model, mesh: DeviceMesh, checkpoint: Path) -> mu.Run:
    """The base on the same ranks, with its optimizer state."""
    built = shard_(mu.plans.on_meta(model.base), mesh)
    plan = identity_plan(built)
    return mu.load_grown_(checkpoint, mu.Run(built, adamw(built, plan)), plan=plan)


def reloaded(path: Path, goal: str, mesh: DeviceMesh) -> mu.Run:
    """What a streamed job wrote, with its state, as it is."""
    run = wide_run(model_named("llama"), goal, mesh)
    return mu.load_grown_(path, run, plan=replace(family(goal), plan=identity_plan(run.model)))


def save(run: mu.Run, path: Path, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(run.model, run.optimizers[0], options=options)
    with warnings.catch_warnings(action="ignore"):
        save_dcp({"model": get_model_state_dict(run.model), "optim": state}, checkpoint_id=path)


def save_sharded() -> None:
    """A case: every base again, from this number of ranks and with its optimizer state nested instead of flat."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("llama", *others()):
        save(
            base_run(model_named(name), mesh, folder() / f"{name}.dcp1"),
            folder() / f"{name}.sharded",
            flat=False,
        )


def loaded(
    source: Any, model: Model, goal: str, wide: mu.Run, noise: str, plan: Any = None, seed: int = SEED
) -> str:
    """The digest of a wide run that is loaded from a source, a folder below that of the launch or a live base."""
    place = folder() / source if isinstance(source, str) else source
    asked = NOISES[noise][0]
    return digest(
        mu.load_grown_(place, wide, plan=plan or model.plan(goal), noise=asked, seed=seed), gathered
    )


def digests() -> dict[str, str]:
    """A case: everything loaded in every way on this number of ranks."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, str] = {}
    for name in ("llama", *others()):
        model = model_named(name)
        base = base_run(model, mesh, folder() / f"{name}.dcp1")
        for goal in model.goals:
            for noise in noises(name):
                label = f"{name} k={goal} {noise}"
                sources: dict[str, Any] = {"dcp1": f"{name}.dcp1", "sharded": f"{name}.sharded", "live": base}
                for way, source in sources.items():
                    found[f"{label} {way}"] = loaded(source, model, goal, wide_run(model, goal, mesh), noise)
                if name != "llama":
                    continue
                wide = wide_run(model, goal, mesh)
                found[f"{label} hf"] = loaded("hf", model, goal, wide, noise, family(goal))
                for source in ("streamed", "resumed") if noise in STREAMED else ():
                    run = reloaded(folder() / f"{source}.{goal}.{noise}", goal, mesh)
                    found[f"{label} {source}"] = digest(run, gathered)
    model, goal = model_named("llama"), goals()[0]
    wide = wide_run(model, goal, mesh)
    found[f"llama k={goal} mup control"] = loaded("llama.dcp1", model, goal, wide, "mup", seed=SEED + 1)
    for noise in NOISES:  # parameters in bfloat16 next to moments in float32
        wide = wide_run(model, goal, mesh, dtype=torch.bfloat16)
        found[f"llama k={goal} {noise} bf16"] = loaded("llama.sharded", model, goal, wide, noise)
    if world == 4:
        found |= meshes()
    return found


def meshes() -> dict[str, str]:
    """Meshes of two dimensions: replicas of shards, and FSDP over tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model, found = model_named("llama"), {}
    ways = {"hsdp": (mesh,), "fsdp x tp": (mesh["outer"], mesh["inner"])}
    for goal, noise, source, (way, cut) in product(goals(), NOISES, ("llama.sharded", "hf"), ways.items()):
        plan = family(goal) if source == "hf" else None
        wide = wide_run(model, goal, *cut)
        found[f"llama k={goal} {noise} {source} {way}"] = loaded(source, model, goal, wide, noise, plan)
    return found


def plans_to_json() -> dict[str, str]:
    return {name: json.dumps(_plan_of(name).as_json()) for name in others()}


def _plan_of(name: str) -> mu.Plan:
    if name in CASES:
        return CASES[name].plan
    return mu.infer_plan(*ends_of(name), loss=words_loss, by="units")
