"""Checkpoint directories with the tensors of a Llama, made without any model, and the plan that doubles them.

Knows: names, shapes and layouts of Llama's tensors. Weights are random bits of a sensible size, or holes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

import mupscale as mu
from mupscale.checkpoints.request import SHARD_BYTES
from mupscale.checkpoints.shards import stored_plan, weight_moves
from mupscale.families.config.goal import Way
from mupscale.families.process import plan_in_process
from mupscale.files.directory import Directory, read_directory
from mupscale.files.headers import header_bytes
from mupscale.files.places import item_size, torch_dtype
from mupscale.jobs.bytes.blocks import raw_bytes
from mupscale.jobs.digests import make_job
from mupscale.jobs.job import BLOCK_BYTES, Job, Text
from mupscale.noise.resolved import NoisePlan, ResolvedNoise
from mupscale.noise.where import Exempt, noisy_weights
from mupscale.plans.new_blocks import Order, source_of
from mupscale.tensors.noise import Waking

Shapes = dict[str, tuple[int, ...]]
_PART = 64 << 20


@dataclass(frozen=True)
class Llama:
    """The sizes that decide every shape."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    def shapes(self) -> Shapes:
        h, kv = self.hidden, self.kv_heads * self.head
        found: Shapes = {"model.embed_tokens.weight": (self.vocabulary, h)}
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            found |= {
                f"{layer}.self_attn.q_proj.weight": (h, h),
                f"{layer}.self_attn.k_proj.weight": (kv, h),
                f"{layer}.self_attn.v_proj.weight": (kv, h),
                f"{layer}.self_attn.o_proj.weight": (h, h),
                f"{layer}.mlp.gate_proj.weight": (self.ffn, h),
                f"{layer}.mlp.up_proj.weight": (self.ffn, h),
                f"{layer}.mlp.down_proj.weight": (h, self.ffn),
                f"{layer}.input_layernorm.weight": (h,),
                f"{layer}.post_attention_layernorm.weight": (h,),
            }
        return found | {"model.norm.weight": (h,), "lm_head.weight": (self.vocabulary, h)}

    def plan(self, k: int, order: Order | None = None) -> mu.Plan:
        """Hidden size, heads and feed-forward times k; the number of queries to a key stays.

        `order` says which blocks are new, as in `plans/new_blocks.py`.
        """
        hidden, ffn = f"{self.hidden}x{k}", f"{self.ffn}x{k}"
        group = self.heads // self.kv_heads * self.head
        axes: Mapping[str, Sequence[str]] = {
            "embed_tokens": (str(self.vocabulary), f"out: {hidden}"),
            "lm_head": (str(self.vocabulary), f"in: {hidden}"),
            "q_proj": (f"out: {self.kv_heads}x{k} * {group}", f"in: {hidden}"),
            "k_proj": (f"out: {self.kv_heads}x{k} * {self.head}", f"in: {hidden}"),
            "v_proj": (f"out: {self.kv_heads}x{k} * {self.head}", f"in: {hidden}"),
            "o_proj": (f"out: {hidden}", f"in: {self.kv_heads}x{k} * {group}"),
            "gate_proj": (f"out: {ffn}", f"in: {hidden}"),
            "up_proj": (f"out: {ffn}", f"in: {hidden}"),
            "down_proj": (f"out: {hidden}", f"in: {ffn}"),
            "norm": (f"out: {hidden}",),
            "input_layernorm": (f"out: {hidden}",),
            "post_attention_layernorm": (f"out: {hidden}",),
        }
        parsed = {key: tuple(map(mu.rules.Axis.parse, texts)) for key, texts in axes.items()}
        tensors: dict[str, mu.plans.TensorPlan] = {}
        wide = self if order is None else replace(self, layers=len(order))
        for name in wide.shapes():
            kind = name.split(".")[-2]
            source, new = (name, False) if order is None else source_of(name, "model.layers", order)
            tensors[name] = mu.plans.TensorPlan((source,), parsed[kind])
            if new:
                tensors[name] = mu.plans.TensorPlan(
                    (),
                    parsed[kind],
                    fill="one" if kind.endswith("norm") else "zero",
                    like=source,
                    quiet=kind in ("o_proj", "down_proj"),
                )
        return mu.Plan(tensors)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the stock class."""
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
        }

    def grown(self, k: str, to: str | None, by: Way = "copies") -> mu.Plan:
        """The plan that the command line makes for `-k`, `--to` and `--by`, made in a process of its own."""
        return stored_plan(plan_in_process(self.config, k, to=to, by=by, steps=0))

    def noise(self, plan: mu.Plan, size: float = 0.01, seed: int = 0) -> NoisePlan:
        """The same noise for every matrix that gets noise: what it costs does not depend on its size."""
        tensors = {
            name: ResolvedNoise(size, std=size, zeros=Waking(size, entry.cut) if entry.padded else None)
            for name, entry in noisy_weights(plan, Exempt(), vectors=False).items()
        }
        return NoisePlan(tensors, seed)


def write_directory(
    path: Path, shapes: Shapes, dtype: str, shards: int = 1, *, holes: bool = False, seed: int = 0
) -> Directory:
    """A directory with a config and the tensors, in so many shards of about one size; as holes, on no disk."""
    path.mkdir(parents=True)
    sizes = {name: torch.Size(shape).numel() * item_size(dtype) for name, shape in shapes.items()}
    total, before, parts = sum(sizes.values()), 0, [dict[str, tuple[int, ...]]() for _ in range(shards)]
    for name, shape in shapes.items():
        parts[min(shards - 1, before * shards // total)][name] = shape
        before += sizes[name]
    generator = torch.Generator().manual_seed(seed)
    where: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = "model.safetensors" if shards == 1 else f"model-{number:05d}-of-{shards:05d}.safetensors"
        where |= dict.fromkeys(part, file)
        header = header_bytes({name: (dtype, shape) for name, shape in part.items()}, {"format": "pt"})
        with open(path / file, "wb") as stream:
            stream.write(header)
            if holes:
                stream.truncate(len(header) + sum(sizes[name] for name in part))
                continue
            for name in sorted(part):  # the order of the header, for one dtype
                _write_random(stream, sizes[name], dtype, generator)
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (path / "tokenizer.json").write_text("{}")
    return read_directory(path)


def _write_random(stream: IO[bytes], size: int, dtype: str, generator: torch.Generator) -> None:
    kind = torch_dtype(dtype)
    while size:
        count = min(size, _PART)
        values = torch.randn(count // kind.itemsize, generator=generator).to(kind)
        stream.write(raw_bytes(values))
        size -= count


def job_for(
    plan: mu.Plan,
    directory: Directory,
    out: Path,
    noise: NoisePlan | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
    block_bytes: int = BLOCK_BYTES,
    dtype: str | None = None,
) -> Job:
    """A whole job for a directory: weights, index, config, tokenizer."""
    files, moves, index = weight_moves(plan, directory, noise, dtype, shard_bytes)
    texts = [Text("config.json", json.dumps(directory.config))]
    if index is not None:
        texts.append(Text("model.safetensors.index.json", index))
    return make_job(
        directory.path,
        out,
        files,
        moves,
        carried=directory.carried,
        texts=texts,
        block_bytes=block_bytes,
        about={"plan": plan.hash, "noise": None if noise is None else noise.as_json()},
    )
