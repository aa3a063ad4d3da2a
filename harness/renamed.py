"""The Llama of `continued.py` under the names and in the layouts of torchtitan and Megatron, converted by plain tensor operations.

Knows what converters of both do. The faults that converters have had are here too.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from harness.continued import SIZES, Job

QUERIES, KEYS = SIZES["num_attention_heads"], SIZES["num_key_value_heads"]
SIZE = SIZES["hidden_size"] // QUERIES
ARGS = Namespace(
    num_attention_heads=QUERIES, num_query_groups=KEYS, group_query_attention=True, kv_channels=SIZE
)
"""What Megatron stores of the arguments of such a job."""
Convert = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
_TITAN = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers.": "layers.",
}  # fmt: skip
_MEGATRON = {
    "self_attn.o_proj": "self_attention.linear_proj", "mlp.down_proj": "mlp.linear_fc2",
    "post_attention_layernorm": "pre_mlp_layernorm", "model.embed_tokens": "embedding.word_embeddings",
    "model.norm": "decoder.final_layernorm", "lm_head": "output_layer", "model.layers.": "decoder.layers.",
}  # fmt: skip


def _called(name: str, table: Mapping[str, str]) -> str:
    for stock, own in table.items():
        name = name.replace(stock, own)
    return name


def titan(tensors: Mapping[str, Tensor], paired: bool = True) -> dict[str, Tensor]:
    """Under torchtitan's names. Without `paired`, rows of queries and keys stay as they are, a fault of converters."""
    found = {}
    for name, tensor in tensors.items():
        if paired and ("q_proj" in name or "k_proj" in name):
            tensor = tensor.reshape(-1, 2, SIZE // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        found[_called(name, _TITAN)] = tensor.clone()
    return found


def megatron(
    tensors: Mapping[str, Tensor], grouped: bool = True, swapped: bool = False, stored: int = 0
) -> dict[str, Tensor]:
    """Under Megatron's names. Faults: not `grouped`, all queries before all keys; `swapped`, up before gate; another layer `stored`."""
    found = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            if grouped:
                each = [part.reshape(KEYS, -1, *part.shape[1:]) for part in parts]
                whole = torch.cat(each, 1).flatten(0, 1)
            else:
                whole = torch.cat(parts)
            found[_called(name.replace("self_attn.q_proj", "self_attention.linear_qkv"), _MEGATRON)] = whole
        elif "gate_proj" in name:
            parts = [tensor, tensors[name.replace("gate_proj", "up_proj")]]
            whole = torch.cat(parts[::-1] if swapped else parts)
            found[_called(name.replace("mlp.gate_proj", "mlp.linear_fc1"), _MEGATRON)] = whole
        elif not any(part in name for part in ("k_proj", "v_proj", "up_proj")):
            found[_called(name, _MEGATRON)] = tensor.clone()
    if stored:
        one, other = (f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in (0, 1))
        found[one], found[other] = found[other], found[one]
    return found


def renamed(job: Job, convert: Convert) -> Job:
    """The same run of a model with other names: parameters, state and groups."""
    named = dict(job.model.named_parameters())
    state = job.optimizer.state
    slots = {
        key: convert({name: state[p][key] for name, p in named.items()})
        for key in ("exp_avg", "exp_avg_sq")
        if all(key in state[p] for p in named.values())
    }
    weights = convert({name: p.detach() for name, p in named.items()})
    own = {name: nn.Parameter(tensor) for name, tensor in weights.items()}
    group_of = {id(p): at for at, group in enumerate(job.optimizer.param_groups) for p in group["params"]}
    marks = convert({n: torch.full_like(p, group_of[id(p)]) for n, p in named.items()})
    counts = convert({n: torch.full_like(p, float(state[p]["step"])) for n, p in named.items()})
    groups = [
        {
            **{k: v for k, v in group.items() if k != "params"},
            "params": [own[n] for n in own if _one(marks[n]) == at],
        }
        for at, group in enumerate(job.optimizer.param_groups)
    ]
    optimizer = torch.optim.AdamW(groups)
    for name, parameter in own.items():
        held: dict[str, Any] = {key: tensors[name] for key, tensors in slots.items()}
        optimizer.state[parameter] = {"step": torch.tensor(_one(counts[name])), **held}
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule = LambdaLR(optimizer, lambda step: 0.9**step)
    schedule.load_state_dict(job.schedule.state_dict())
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return Job(_nested(own), optimizer, schedule, job.steps)


def _one(tensor: Tensor) -> float:
    return float(tensor.flatten()[0])


def _nested(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    model = nn.Module()
    for name, parameter in parameters.items():
        at: Any = model
        *path, leaf = name.split(".")
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at._modules[part]
        at.register_parameter(leaf, parameter)
    return model
