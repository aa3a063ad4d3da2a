"""The stock models of the study: a dense Llama of any width and depth, and three kinds of experts in its place.

By the number of experts: 0 is a Llama; 8 is a GraniteMoeShared whose dense layer stays beside eight experts of half its
width, of which a token takes two; 4 is a Mixtral with four experts of the dense width, of which a token takes two. So a
token of either passes twice as many feed-forward weights as one of the Llama. With a number for each token, it is a Mixtral.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import fields as fields_of
from functools import cache
from typing import Any

from torch import nn

import mupscale as mu
from mupscale.plans import family_plan

from ...data import subwords
from ...setting import Setting
from ..spec import Spec
from .text import MEASURED, WORDS, Tokens, fields, task

SHARED, MIXTRAL, TOP_K = 8, 4, 2


def raw(width: int, layers: int, experts: int = 0, top_k: int = 0) -> dict[str, Any]:
    """The content of a config.json."""
    same = {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    dense = {**fields(width, layers), **same}  # classes differ in what they take for these
    ffn = dense["intermediate_size"]
    if not experts:
        return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **dense}
    routed = {
        "num_local_experts": experts,
        "num_experts_per_tok": top_k or TOP_K,
        "router_aux_loss_coef": 0.0,
    }
    if experts == MIXTRAL or top_k:
        return {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **dense, **routed}
    sizes = {"intermediate_size": ffn // 2, "shared_intermediate_size": ffn}
    named = {"model_type": "granitemoeshared", "architectures": ["GraniteMoeSharedForCausalLM"]}
    head = dense.pop("head_dim")
    # The class scales attention by a field of its own, whose default is not the usual one.
    return {**named, **dense, **routed, **sizes, "attention_multiplier": head**-0.5}


def build(config: dict[str, Any]) -> nn.Module:
    """The stock model of a config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    told = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    stock: Any = AutoModelForCausalLM
    model: nn.Module = stock.from_config(AutoConfig.for_model(config["model_type"], **told))
    return model


@dataclass(frozen=True, eq=False)
class Stock(Setting):
    """A setting whose plans are those of the family, as for a checkpoint."""

    layers: int = 0
    experts: int = 0
    top_k: int = 0

    def plan(self, narrow: int, wide: int) -> mu.Plan:
        return _plan(narrow, wide, self.layers, self.experts, self.top_k)

    def fresh(self, width: int, lr: float, seed: int, *, mup: bool = True) -> mu.Run:
        """Constants are in units at whole multiples of the reference; at others they are literal, and the rate is tuned there."""
        return super().fresh(width, lr, seed, mup=mup and width % self.reference == 0)


@cache
def _plan(narrow: int, wide: int, layers: int, experts: int, top_k: int) -> mu.Plan:
    return family_plan(raw(narrow, layers, experts, top_k), wide // narrow).plan


def setting(
    spec: Spec,
    tokens: Callable[[], Tokens] = lambda: subwords(WORDS),
    measured: int = MEASURED,
    **sizes: Any,
) -> Setting:
    """The models of a spec's depth and experts at any width, on text. The base's width is the reference."""
    made = task(tokens, measured=measured, **sizes)
    layers, experts, top_k = spec.layers, spec.experts, spec.top_k

    def as_dense(width: int) -> nn.Module:
        """A Llama that takes the FLOPs of the model with experts, but for those of the router."""
        config = raw(width, layers)
        return build({**config, "intermediate_size": (top_k or TOP_K) * config["intermediate_size"]})

    told = {field.name: getattr(made, field.name) for field in fields_of(made)}
    told |= {
        "name": f"llama of {layers} layers and {experts} experts",
        "build": lambda width: build(raw(width, layers, experts, top_k)),
        "counted": as_dense if experts else None,
    }
    return Stock(**told, layers=layers, experts=experts, top_k=top_k)
