"""Plans found on the device are those found on the CPU: the same hash, for models of the zoo of every kind, and Hugging Face's."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch.utils._pytree import tree_map

import mupscale as mu
from harness.devices.case import Group
from harness.devices.models import (
    Residual,
    Trained,
    adamw,
    plus_one_tied,
    proved,
    rms_mlp,
    stepping,
    trained,
    trained_on_tokens,
)
from harness.zoo import ZOO
from harness.zoo.entry import GRADIENT_SEED, Exact

case = Group("plans")
Device = torch.device
MODELS = (
    "gpt_heads_grow", "heads_fixed", "nanogpt_heads_grow", "gpt_tied_heads_grow", "hf_llama_tied_heads_grow",
    "hf_gpt2_heads_grow", "multi_query", "qk_norm_heads_grow", "latent_attention", "relative_bias_heads_grow",
    "swiglu_fused", "glu_functional", "rms_functional", "layernorm_by_hand", "groupnorm_groups_fixed", "experts_stacked",
    "resnet_inner_width", "unet", "channel_shuffle", "flatten", "house_llama",
    "matrix_factorisation", "mlp_batchnorm", "bilinear", "perceiver",
)  # fmt: skip
"""Fused qkv (gpt, nanogpt, gpt2), tied readouts, norms by hand, and one of most kinds; none needs an LSTM or a GRU, which
the device lacks."""
QUICK = ("gpt_heads_grow", "gpt_tied_heads_grow")


def hash_of(name: str, device: Device) -> str:
    """The hash of the plan that `infer_plan` finds with the entry's loss and declarations."""
    entry = ZOO[name]
    assert isinstance(entry.judgement, Exact)
    with torch.device("cpu"):
        model = entry.start().model.to(device)
        batch = tree_map(
            lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, entry.batch(GRADIENT_SEED)
        )

    def loss(model: torch.nn.Module) -> Any:
        if entry.objective is not None:
            return entry.objective(model, batch)
        return entry.criterion(model(*batch[: entry.inputs]), *batch[entry.inputs :])

    declared = mu.Declared(**entry.judgement.declarations)
    with torch.device(device):  # some models make their positions and masks without saying where
        return mu.infer_plan(model, entry.grown, loss=loss, declared=declared).hash


for entry_name in MODELS:

    @case(name=entry_name, quick=entry_name in QUICK)
    def _(device: Device, name: str = entry_name) -> Any:
        return hash_of(name, device)


@case
def plus_one_norm_with_tied_readout(device: Device) -> Any:
    base = trained_on_tokens(device, plus_one_tied)
    return mu.infer_plan(base.run.model, lambda: plus_one_tied(16), loss=base.loss).hash


@case
def one_block_deeper(device: Device) -> Any:
    base = trained(device, Residual, 2)
    order = {"blocks": [0, 1, None]}
    return mu.infer_plan(base.run.model, lambda: Residual(3), loss=base.loss, order=order).hash


@case
def padded_to_a_width_that_is_no_multiple(device: Device) -> Any:
    base = trained(device, rms_mlp)
    return mu.infer_plan(base.run.model, lambda: rms_mlp(40), loss=base.loss, by="padded").hash


huggingface = Group("huggingface")


def llama(width: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 1,
        "num_attention_heads": width // 4, "num_key_value_heads": width // 4, "max_position_embeddings": 32,
        "tie_word_embeddings": False, "attn_implementation": "sdpa",
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes))


def trained_llama(device: Device | str) -> Trained:
    with torch.device("cpu"):
        torch.manual_seed(0)
        ids, model = torch.randint(32, (2, 8)).to(device), llama(8).to(device)

    def loss(model: Any) -> Any:
        value: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return value

    found = Trained(mu.Run(model, adamw(model.parameters())), loss, stepping(loss), ids)
    found.steps(found.run, 3)
    return found


def _plan_of_the_cpu(base: Trained) -> mu.Plan:
    ids = base.x.cpu()
    return mu.plans.plan_between(llama, 8, 16, loss=lambda m: m(input_ids=ids, labels=ids).loss)


@huggingface
def llama_with_loss(device: Device) -> Any:
    base = trained_llama(device)
    grown = mu.upscale(base.run, lambda: llama(16), mu.SignalNoise(0.05), loss=base.loss)
    return proved(grown), base.steps(grown)


@huggingface
def llama_by_a_plan_of_the_cpu(device: Device) -> Any:
    base = trained_llama(device)
    grown = mu.upscale(base.run, lambda: llama(16), mu.SignalNoise(0.05), plan=_plan_of_the_cpu(base))
    return grown, base.steps(grown)


@huggingface
def llama_verified(device: Device) -> Any:
    base = trained_llama(device)
    plan = _plan_of_the_cpu(base)
    return mu.verify(base.run, lambda: llama(16), step=base.step, plan=plan, steps=3).holds


@huggingface
def llama_from_pretrained_with_a_device_map(device: Device) -> Any:
    from transformers import LlamaForCausalLM

    base = trained_llama("cpu")
    with tempfile.TemporaryDirectory() as folder:
        base.run.model.save_pretrained(folder)  # type: ignore[operator]
        model = LlamaForCausalLM.from_pretrained(folder, device_map={"": str(device)})
    return mu.grow(model, lambda: llama(16).to(device), plan=_plan_of_the_cpu(base)).model


@huggingface
def llama_over_two_devices_by_a_device_map(device: Device) -> Any:
    from accelerate import dispatch_model  # type: ignore[import-untyped]
    from transformers import LlamaForCausalLM

    first, last = (str(device), "cpu" if device.type == "cpu" else f"{device.type}:1")
    places = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers"), first)
    places |= dict.fromkeys(("model.norm", "lm_head"), last)
    base = trained_llama("cpu")
    with tempfile.TemporaryDirectory() as folder:
        base.run.model.save_pretrained(folder)  # type: ignore[operator]
        model = LlamaForCausalLM.from_pretrained(folder, device_map=places)
    grown = mu.grow(model, lambda: dispatch_model(llama(16), places), loss=base.loss)
    kept = [p.device == q.device for p, q in zip(model.parameters(), grown.model.parameters(), strict=True)]
    return proved(grown), kept
