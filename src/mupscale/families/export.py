"""The class of the wide checkpoint: the base's own with folds (the default), or Granite's, with the multipliers in its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import Fault, MupscaleError, raise_faults
from .goal import Goal
from .grown import grown
from .models import Config, as_data, config_from, model_class
from .symbols import symbols

EXPORTS = ("granite",)
_OWN = "leave export out: its own class holds it"
# Model types with the tensors of Granite, so that a Granite configuration can describe the result.
_LLAMA_LIKE = ("llama", "mistral", "qwen2", "granite")
# Fields that Granite and they have in common, and that do not grow.
_CARRIED = (
    "vocab_size", "num_hidden_layers", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "rope_parameters", "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range", "attention_dropout", "dtype",
)  # fmt: skip


def check_export(export: str | None) -> None:
    """Raise for a class that nothing is exported to."""
    if export not in (None, *EXPORTS):
        raise MupscaleError(
            f"no export is called {export!r}; expected {' or '.join(EXPORTS)}", code="option.unknown_export"
        )


def wide_of(start: Config, goal: Goal, export: str | None, cls: Any) -> tuple[Config, Any]:
    """The wide configuration and its class."""
    wide = grown(start, goal)
    if export != "granite":
        return wide, cls
    k = goal.copies("hidden", symbols(as_data(start)).get("E", 1))
    made = config_from(granite(as_data(start), as_data(wide), k))
    return made, model_class(made, "GraniteForCausalLM")


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
        **{key: wide[key] for key in _CARRIED if key in wide},
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
