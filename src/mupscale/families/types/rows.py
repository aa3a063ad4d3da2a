"""The registry of model types, as data: facts that a search on two models cannot find.

A row is needed where fields have unusual names, where a layout has unequal parts, where a multiplier lives in the
configuration, or where growth is known not to be exact. Everything else (roles, heads, folds for tied readouts)
is found by the search of `plans/` and proved on a small copy, so most families need no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..config.fields import Width

Fill = Literal["zero", "minus_one"]


@dataclass(frozen=True)
class Row:
    """One model type. Patterns are shell patterns of tensor names; texts are read by `symbols.py`."""

    grows: Mapping[Width, tuple[str, ...]] | None = None
    """Width -> fields of the configuration; None for the usual names."""
    layouts: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    folds: Mapping[str, str] = field(default_factory=dict)
    """Powers of k that tensors absorb, k being the multiplier of the hidden size."""
    config: Mapping[str, str] = field(default_factory=dict)
    """Multipliers that the configuration already has, and by what power of k they change."""
    keeps: tuple[str, ...] = ()
    """Fields that bear a usual name and must not grow."""
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Condition on the configuration -> the code of the refusal, and why growth is not exact then."""
    head_size_grows: bool = False
    silenced: Mapping[str, Fill] = field(default_factory=dict)
    """Gains behind a branch, and what silences them in a new block: a norm there blows up any small output of a branch."""
    follows: Mapping[str, str] = field(default_factory=dict)
    """Fields that must equal another one, both with the names of nested configurations: the width that a tower writes
    is that of the tower which reads it."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Fields that may be left empty, and what they are then."""
    idle: tuple[str, ...] = ()
    """Tensors that the class holds and never uses, so no batch reaches them: they grow by their kind."""
    reads: tuple[str, ...] = ()
    """The outputs that the loss of the type reads, where others change with the width: entries of a unit vector do."""
    inputs: Mapping[str, bool] = field(default_factory=dict)
    """Arguments besides the batch, with which outputs show tensors that they hide otherwise."""
    divides: tuple[str, ...] = ()
    """Fields that a small copy may divide by one number although blocks change, because `layouts` gives them all."""


WRITERS = (
    "*.o_proj.weight",
    "*.out_proj.weight",
    "*.down_proj.weight",
    "*.fc2.weight",
    "*.c_proj.weight",
    "*.w2.weight",
    "*attention.dense.weight",
    "*.dense_4h_to_h.weight",
    "*.output.dense.weight",
    "*.experts.down_proj",
    "*.shared_mlp.output_linear.weight",
)
"""The usual names of weights that write into the stream of a block."""
_BEHIND: Mapping[str, Fill] = dict.fromkeys(
    ("*.post_attention_layernorm.weight", "*.post_feedforward_layernorm.weight"), "zero"
)
_BEHIND_PLUS_ONE: Mapping[str, Fill] = dict.fromkeys(_BEHIND, "minus_one")  # gains that are used as (1 + w)
_RECOMPUTED = (
    "family.table_computed_from_width",
    "by nature: its sinusoidal table is computed from the width and not stored, so a stock reload would lose its copies",
)
_COPIES_DIFFER = (
    "family.fused_rows_copied_unequally",
    "by nature: query rows are copied more often than the one key and value head, and one tensor has one eps and one state",
)

_ONE_PROJECTION = {"text_config.projection_size": "vision_config.hidden_size"}
_PAIRS = ("logits_per_image", "logits_per_text")
_LAYER_INPUTS = {"*embed_tokens.weight": "k^-1/2", "*per_layer_model_projection.weight": "k^1/2"}
"""Code multiplies words by the root of the width, and divides what they give to each layer by it."""


def _mamba(mixer: str, heads: str, size: str, groups: str, state: str) -> dict[str, dict[int, str]]:
    """The layouts of a Mamba-2 mixer: a group of heads is copied as a whole, since it shares one B and one C."""
    block = f"{heads}//{groups}*{size}"
    channels, states = f"{heads}*{size}: {block}", f"2*{groups}*{state}: {state}"
    by_head = {0: f"{heads}//{groups}"}
    return {
        f"*{mixer}.in_proj.*": {0: f"{channels} | {channels} | {states} | {heads}: {heads}//{groups}"},
        f"*{mixer}.conv1d.*": {0: f"{channels} | {states}"},
        f"*{mixer}.norm.weight": {0: block},
        f"*{mixer}.out_proj.weight": {1: block},
        **{f"*{mixer}.{name}": by_head for name in ("dt_bias", "A_log", "D")},
    }


_IBM = ("mamba", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state")


def _hybrid(
    names: tuple[str, str, str, str, str],
    inner: str = "",
    stream: tuple[str, ...] = ("hidden_size",),
    config: Mapping[str, str] | None = None,
) -> Row:
    """A type with Mamba-2 mixers next to attention; groups grow with heads.

    `inner` is the width of a mixer where the configuration names it; otherwise it is a multiple of the `stream`, and the
    two shrink together.
    """
    mixer, heads, size, groups, state = names
    grows = {
        "hidden": stream,
        "heads": ("num_attention_heads", heads, groups, *((inner,) if inner else ())),
        "kv_heads": ("num_key_value_heads",),
        "ffn": (
            "intermediate_size",
            "shared_intermediate_size",
            "moe_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ),
    }
    together = ("num_attention_heads", heads, "num_key_value_heads", *((inner,) if inner else stream))
    return Row(
        grows, layouts=_mamba(mixer, heads, size, groups, state), config=config or {}, divides=together
    )


_PER_KEY = "linear_num_value_heads//linear_num_key_heads"
_CHANNELS = (
    "2*linear_num_key_heads*linear_key_head_dim: linear_key_head_dim"
    f" | linear_num_value_heads*linear_value_head_dim: {_PER_KEY}*linear_value_head_dim"
)
_DELTA: Mapping[str, Mapping[int, str]] = {
    "*linear_attn.conv1d.weight": {0: _CHANNELS},
    "*linear_attn.out_proj.weight": {1: f"{_PER_KEY}*linear_value_head_dim"},
    "*linear_attn.dt_bias": {0: _PER_KEY},
    "*linear_attn.A_log": {0: _PER_KEY},
}
"""Gated delta nets: a key head is copied with all its value heads."""

ROWS: Mapping[str, Row] = {
    "gpt2": Row({"hidden": ("n_embd",), "heads": ("n_head",), "ffn": ("n_inner",)}),
    "bloom": Row(
        {"hidden": ("hidden_size", "n_embed")},
        folds={"*query_key_value.*": "k^-1/4", "*self_attention.dense.weight": "k^1/4"},
        head_size_grows=True,
    ),
    "cohere": Row(config={"logit_scale": "1/k"}),
    "cohere2": Row(config={"logit_scale": "1/k"}),
    "exaone4": Row(silenced=_BEHIND),
    "gemma2": Row(silenced=_BEHIND_PLUS_ONE),
    "gemma3_text": Row(silenced=_BEHIND_PLUS_ONE),
    "gemma3n_text": Row(folds={**_LAYER_INPUTS, "*altup.modality_router.weight": "k"}),
    "gemma4_text": Row(
        layouts={
            "*self_attn.q_proj.weight": {0: "G*D"},
            "*self_attn.[kv]_proj.weight": {0: "D"},
            "*self_attn.o_proj.weight": {1: "G*D"},
        },
        folds={**_LAYER_INPUTS, "*router.proj.weight": "k^1/2"},
    ),
    "glm4": Row(
        silenced={"*.post_self_attn_layernorm.weight": "zero", "*.post_mlp_layernorm.weight": "zero"}
    ),
    "granite": Row(config={"logits_scaling": "k"}),
    "dinov2": Row({"hidden": ("hidden_size",), "heads": ("num_attention_heads",)}),
    "falcon": Row(refused={"multi_query and not new_decoder_architecture": _COPIES_DIFFER}),
    "gpt_bigcode": Row(
        {"hidden": ("n_embd",), "heads": ("n_head",), "ffn": ("n_inner",)},
        refused={"multi_query": _COPIES_DIFFER},
        defaults={"n_inner": "4*n_embd"},
    ),
    "mamba2": Row(
        {"hidden": ("hidden_size",), "heads": ("num_heads", "n_groups")},
        layouts=_mamba("mixer", "num_heads", "head_dim", "n_groups", "state_size"),
        divides=("hidden_size", "num_heads"),
    ),
    "bamba": _hybrid(_IBM),
    "falcon_h1": _hybrid(_IBM, "mamba_d_ssm"),
    "granitemoehybrid": _hybrid(_IBM, config={"logits_scaling": "k"}),
    "nemotron_h": _hybrid(("mixer", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")),
    "zamba2": _hybrid(
        ("mamba", "n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state"),
        stream=("hidden_size", "attention_hidden_size"),
    ),
    "lfm2": Row(follows={"block_ff_dim": "intermediate_size"}),
    "mpt": Row(
        {"hidden": ("d_model",)},
        folds={"*attn.Wqkv.*": "k^-1/4", "*attn.out_proj.weight": "k^1/4"},
        head_size_grows=True,
    ),
    "olmo2": Row(silenced=_BEHIND),
    "olmo3": Row(silenced=_BEHIND),
    "olmo": Row(
        refused={
            "tie_word_embeddings": (
                "family.last_norm_without_gain",
                "its last norm has no gain, so nothing absorbs the 1/k of a tied readout",
            )
        }
    ),
    "phimoe": Row(inputs={"output_router_logits": True}),
    "esm": Row(idle=("*contact_head.regression.weight",)),
    "paligemma": Row(
        {},
        follows=dict.fromkeys(
            ("hidden_size", "projection_dim", "vision_config.projection_dim"), "text_config.hidden_size"
        ),
    ),
    "qwen2_vl": Row(follows={"vision_config.hidden_size": "text_config.hidden_size"}),
    "qwen2_vl_vision": Row({"hidden": ("embed_dim",), "heads": ("num_heads",)}),
    "qwen3_next": Row(
        layouts={
            **_DELTA,
            "*linear_attn.in_proj_qkvz.weight": {
                0: f"2*linear_key_head_dim + 2*({_PER_KEY})*linear_value_head_dim"
            },
            "*linear_attn.in_proj_ba.weight": {0: f"2*({_PER_KEY})"},
        }
    ),
    "qwen3_5_text": Row(
        layouts={
            **_DELTA,
            "*linear_attn.in_proj_qkv.weight": {0: _CHANNELS},
            "*linear_attn.in_proj_z.weight": {0: f"{_PER_KEY}*linear_value_head_dim"},
            "*linear_attn.in_proj_[ab].weight": {0: _PER_KEY},
        }
    ),
    "siglip": Row(follows=_ONE_PROJECTION, reads=_PAIRS),
    "siglip2": Row(follows=_ONE_PROJECTION, reads=_PAIRS),
    "hgnet_v2": Row(
        {
            "hidden": (
                "embedding_size",
                "hidden_sizes",
                "stem_channels",
                "stage_in_channels",
                "stage_mid_channels",
                "stage_out_channels",
            )
        }
    ),
    "resnet": Row({"hidden": ("embedding_size", "hidden_sizes")}),
    "xglm": Row(refused={"True": _RECOMPUTED}),
    "m2m_100": Row(refused={"True": _RECOMPUTED}),
    "marian": Row(refused={"True": _RECOMPUTED}),
}


def row_for(model_type: str) -> Row:
    """The row of a model type; an empty one when everything is inferred.

    >>> row_for("llama") == Row(), row_for("granite").config
    (True, {'logits_scaling': 'k'})
    """
    return ROWS.get(model_type, Row())
