"""What Megatron writes for a run, torch_dist and fsdp_dtensor, as its ranks cut it; what reading such checkpoints is shown on.

A run has a `model` whose parameters have Megatron's names and an `optimizer`.
"""

from __future__ import annotations

import io
import json
import pickle
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

CUT = {"linear_qkv": 0, "linear_proj": 1, "linear_fc1": 0, "linear_fc2": 1, "word_embeddings": 0}
"""The dimension along which ranks of tensor parallelism cut a weight."""
SCHEDULE = {
    "max_lr": 0.05, "min_lr": 0.01, "num_steps": 3, "lr_warmup_steps": 1, "start_wd": 0.1, "end_wd": 0.1,
}  # fmt: skip
ARGS = Namespace(hidden_size=8)
MODEL, STATE, META = (
    "model.module.",
    "optimizer.state.module.module.",
    "optimizer.param_to_group_meta.module.module.",
)
MOMENTS = ("exp_avg", "exp_avg_sq")


def key_of(name: str) -> tuple[str, int | None]:
    """The name under which Megatron stores a parameter, and its layer."""
    for own, saved in (
        ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
        ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ):
        name = name.replace(own, saved)
    parts = name.split(".")
    return (name, None) if "layers" not in parts else (".".join(parts[:2] + parts[3:]), int(parts[2]))


def pieces(name: str, tensor: Tensor, ranks: int) -> Iterator[tuple[list[int], Tensor, int]]:
    """(start, part, rank): gated units keep gate and up apart, so a rank has two pieces of them."""
    dim = next((d for part, d in CUT.items() if f"{part}." in name and "layer_norm" not in name), None)
    if ranks == 1 or dim is None or tensor.dim() <= dim:
        yield [0] * tensor.dim(), tensor, 0
        return
    many = 2 * ranks if "linear_fc1" in name else ranks
    first = 0
    for at, part in enumerate(tensor.chunk(many, dim)):
        yield [first if d == dim else 0 for d in range(tensor.dim())], part, at % ranks
        first += part.shape[dim]


Cut = Callable[[str, Tensor, int], Iterator[tuple[list[int], Tensor, int]]]


def rows(_: str, tensor: Tensor, ranks: int) -> Iterator[tuple[list[int], Tensor, int]]:
    """(start, part, rank) as FSDP2 cuts every tensor: along its rows."""
    at = 0
    for rank, part in enumerate(tensor.chunk(ranks) if tensor.dim() else [tensor]):
        yield [at, *[0] * (tensor.dim() - 1)][: tensor.dim()], part, rank
        at += len(part) if tensor.dim() else 0


@dataclass
class Stored:
    """What goes into a directory: tensors by name and layer, and the files of its ranks."""

    ranks: int
    cut: Cut = pieces

    def write(
        self, folder: Path, tensors: Mapping[tuple[str, int | None], Tensor], values: Mapping[str, Any]
    ) -> None:
        files = [io.BytesIO() for _ in range(self.ranks)]
        described: dict[str, Any] = {}
        stored: dict[Any, Any] = {}
        items: list[Any] = []
        layers = 1 + max((layer for _, layer in tensors if layer is not None), default=0)

        def put(index: MetadataIndex, rank: int, thing: Any) -> None:
            at = files[rank].tell()
            torch.save(thing, raw := io.BytesIO())
            files[rank].write(raw.getvalue())
            stored[index] = _StorageInfo(f"__{rank}_0.distcp", at, files[rank].tell() - at)

        for (name, layer), tensor in tensors.items():
            first = [] if layer is None else [layer]
            shape = torch.Size([layers, *tensor.shape] if first else tensor.shape)
            properties = TensorProperties(tensor.dtype)
            entry = described.setdefault(name, TensorStorageMetadata(properties, shape, []))
            for low, piece, rank in self.cut(name, tensor, self.ranks):
                start, part = torch.Size(first + low), piece[(None,) * len(first)].clone()
                chunk = ChunkStorageMetadata(start, part.shape)
                entry.chunks.append(chunk)
                put(MetadataIndex(name, start), rank, part)
                written = TensorWriteData(chunk, properties, shape)
                items.append(WriteItem(MetadataIndex(name, start), WriteItemType.SHARD, tensor_data=written))
        for name, value in values.items():
            described[name] = BytesStorageMetadata()
            put(MetadataIndex(name), 0, value)
        metadata: Any = Metadata(described, None, stored)
        metadata.all_local_plans = [SavePlan(items)]
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        for rank, file in enumerate(files):
            (folder / f"__{rank}_0.distcp").write_bytes(file.getvalue())
        (folder / "metadata.json").write_text(
            json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        )


def torch_dist(
    folder: Path,
    run: Any,
    ranks: int = 1,
    copies: str | None = None,
    dtype: torch.dtype = torch.float32,
    change: Callable[[Any, Any], object] | None = None,
    args: Any = ARGS,
) -> Path:
    """What Megatron's `dist_checkpointing.save` writes for a run."""
    folder.mkdir(parents=True)
    tensors: dict[Any, Any] = {}
    for name, parameter in run.model.named_parameters():
        key, layer = key_of(name)
        tensors[key, layer] = parameter.detach().to(dtype)
        state = run.optimizer.state[parameter]
        moments = {k: state[k] for k in ("exp_avg", "exp_avg_sq")} | (
            {copies: parameter.detach()} if copies else {}
        )
        tensors |= {(f"optimizer.state.{k}.{key}", layer): value for k, value in moments.items()}
    groups = []
    for wd_mult, group in zip((1.0, 0.0), run.optimizer.state_dict()["param_groups"], strict=True):
        own = {"wd_mult": wd_mult, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
        own |= {"default_config": True, "max_lr": 0.05, "min_lr": 0.01}
        groups.append({**{k: v for k, v in group.items() if k != "params"}, **own})
    saved: Any = {"param_groups": groups, "state": {"common_step": torch.tensor(3.0)}}
    if copies:
        for group in groups:
            group["step"] = 3.0
        saved = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    common = {
        "optimizer": saved,
        "opt_param_scheduler": SCHEDULE,
        "iteration": 3,
        "args": args,
    }
    values = {
        "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2": [None],
        "rng_state/shard_0_1": [Namespace()],
    }
    if change is not None:
        change(tensors, common)
    Stored(ranks).write(folder, tensors, values)
    torch.save(common, folder / "common.pt")
    return folder


def halves(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor under the names that Megatron-FSDP stores it by: gate and up apart."""
    if "linear_fc1" not in name or not tensor.dim():
        return {name: tensor}
    gate, up = tensor.chunk(2)
    return {f"{name}_w": gate, f"{name}_v": up}


def fsdp_dtensor(
    folder: Path,
    run: Any,
    ranks: int = 1,
    change: Callable[[Any, Any], object] | None = None,
    args: Any = ARGS,
) -> Path:
    """What Megatron's training loop writes for a run in this format."""
    folder.mkdir(parents=True)
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    groups = run.optimizer.state_dict()["param_groups"]
    for group, saved in zip(run.optimizer.param_groups, groups, strict=True):
        settings = {key: value for key, value in saved.items() if key != "params"}
        own: dict[str, Any] = {
            "wd_mult": float(group["weight_decay"] > 0),
            "lr_mult": 1.0,
            "is_expert_parallel": False,
        }
        own |= {"is_decoupled_lr": False, "default_config": True, "max_lr": 0.05, "min_lr": None}
        for parameter in group["params"]:
            name = next(n for n, p in run.model.named_parameters() if p is parameter)
            values |= {f"{META}{name}.{key}": value for key, value in {**settings, **own}.items()}
            tensors |= {MODEL + key: part for key, part in halves(name, parameter.detach()).items()}
            state = run.optimizer.state[parameter]
            for key in MOMENTS:
                tensors |= {f"{STATE}{part}.{key}": t for part, t in halves(name, state[key]).items()}
            for part in halves(name, parameter):
                tensors[f"{STATE}{part}.step"] = state["step"]
    values |= {f"opt_param_scheduler.{key}": value for key, value in SCHEDULE.items()}
    values |= {"iteration": 3, "args": args}
    if change is not None:
        change(tensors, values)
    Stored(ranks).write(folder, {(key, None): tensor for key, tensor in tensors.items()}, values)
    (folder / "metadata.json").unlink()
    return folder
