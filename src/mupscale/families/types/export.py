"""The class of the wide checkpoint: the base's own with folds (the default), Granite's, or its own untied.

Granite has the multipliers in its configuration. Untying keeps the outputs exact, but not the training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import Fault, MupscaleError, raise_faults
from ...plans.plan import Plan
from ..config.fields import DECODERS
from ..config.goal import Goal
from ..config.grown import grown
from ..models import Config, as_data, config_from, model_class
from .symbols import symbols

EXPORTS = ("granite", "untie")
_OWN = "leave export out: its own class holds it"
# Model types with the tensors of Granite, so that a Granite configuration can describe the result.
_LLAMA_LIKE = ("llama", "mistral", "qwen2", "granite")


def start_of(config: Config, export: str | None) -> Config:
    """The configuration whose tensors the plan starts from: the base's own, or the base untied."""
    if export not in (None, *EXPORTS):
        raise MupscaleError(
            f"no export is called {export!r}; expected {' or '.join(EXPORTS)}", code="option.unknown_export"
        )
    if export != "untie":
        return config
    data = as_data(config)
    if not data.get("tie_word_embeddings"):
        raise MupscaleError(
            "there is nothing to untie: this configuration does not tie its embeddings; leave export out",
            code="option.nothing_to_untie",
        )
    return config_from({**data, "tie_word_embeddings": False})


def wide_of(start: Config, goal: Goal, export: str | None, cls: Any) -> tuple[Config, Any]:
    """The wide configuration and its class."""
    wide = grown(start, goal)
    if export != "granite":
        return wide, cls
    k = goal.copies("hidden", symbols(as_data(start)).get("E", 1))
    made = config_from(granite(as_data(start), as_data(wide), k))
    return made, model_class(made, "GraniteForCausalLM")


def untied(plan: Plan, ties: Mapping[str, str]) -> Plan:
    """The plan of the untied model, reading from a base that is tied: outputs are kept, training is not."""
    changes = {
        alias: replace(plan.tensors[alias], sources=(name,))
        for alias, name in ties.items()
        if alias in plan.tensors
    }
    if not changes:
        raise MupscaleError(
            "this class ties its embeddings whatever its configuration says, so it cannot be untied; leave export out",
            code="family.always_tied",
        )
    return replace(plan.with_tensors(changes), exact="static")


def granite(base: Mapping[str, Any], wide: Mapping[str, Any], k: int) -> dict[str, Any]:
    """The Granite configuration of a grown Llama-like model; raises with reasons if there is none."""
    names = symbols(base)
    kind = base.get("model_type")
    faults = []
    if kind not in _LLAMA_LIKE:
        faults.append(
            Fault(
                "family.not_like_granite",
                str(kind),
                "Granite has the tensors of Llama, Mistral and Qwen2 only",
                _OWN,
            )
        )
    if kind != "llama" and base.get("sliding_window") and base.get("use_sliding_window", True):
        faults.append(
            Fault(
                "family.granite_has_no_window",
                "sliding_window",
                f"attention is cut at {base['sliding_window']} tokens, and Granite has no window",
                _OWN,
            )
        )
    if kind == "qwen2":
        faults.append(
            Fault(
                "family.granite_adds_bias",
                "attention bias",
                "Granite adds o_proj.bias, which trains and which the base does not have",
                _OWN,
            )
        )
    raise_faults("this model does not fit into Granite exactly", faults)
    return {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        **{key: wide[key] for key in DECODERS if key in wide},
        **{
            key: wide[key]
            for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        },
        "head_dim": names["D"],
        "attention_bias": bool(base.get("attention_bias")),
        "mlp_bias": bool(base.get("mlp_bias")),
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": names["D"] ** -0.5,
        "logits_scaling": float(k),
    }
