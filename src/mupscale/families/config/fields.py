"""What the fields of configurations mean: the one table, which everything that knows a field by its name reads.

Transformers has some hundred names for a dozen things. A meaning has up to three lists of them, since code that changes a
field must know more about it than code that reads one:

    every    all fields that mean it: what a small copy makes smaller
    main     fields that hold the number of the whole model, the commonest first: the first one that is there counts
    grows    fields that a goal can set

A configuration of GPT-2, read by the table:

>>> gpt2 = {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
>>> {meaning: found for meaning in FIELDS for found in [first(gpt2, meaning)] if found}
{'hidden': 768, 'heads': 12, 'words': 50257, 'positions': 1024}
>>> [key for key in gpt2 if FIELDS["layers"].has(key)]
['n_layer']

A name that is missing here is not known: a width does not grow, a small copy stays larger, and where that would not be
exact the model is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Width = str
"""A meaning that is a width: one of `WIDTHS`."""


@dataclass(frozen=True)
class Meaning:
    """The fields that mean one thing; `every` is a regular expression, or the names themselves."""

    every: str | tuple[str, ...]
    main: tuple[str, ...] = ()
    grows: tuple[str, ...] = ()

    def has(self, key: str) -> bool:
        """Whether a field means it.

        >>> FIELDS["words"].has("decoder_vocab_size"), FIELDS["words"].has("vocab")
        (True, False)
        """
        if isinstance(self.every, tuple):
            return key in self.every
        return re.search(self.every, key) is not None


FIELDS: Mapping[str, Meaning] = {
    "hidden": Meaning(
        (
            "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_sizes", "embed_dims", "embedding_size",
            "word_embed_proj_dim", "encoder_hidden_size", "decoder_hidden_size", "neck_hidden_sizes", "emb_dim",
            "embedding_dim", "model_dim", "hidden_dims", "encoder_embed_dim", "decoder_embed_dim", "channels",
            "stem_channels", "encoder_width", "d_embed", "width", "attention_hidden_size", "embed_dim_per_stage",
        ),
        main=("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_dim", "model_dim"),
    ),
    "heads": Meaning(
        (
            "num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "attention_heads",
            "decoder_attention_heads", "decoder_num_attention_heads", "encoder_num_attention_heads",
            "num_encoder_attention_heads", "num_decoder_attention_heads", "encoder_n_heads", "decoder_n_heads",
            "mamba_n_heads", "mamba_num_heads", "linear_num_value_heads", "linear_num_key_heads",
            "num_attention_heads_per_stage",
        ),
        main=("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "attention_heads"),
    ),
    "kv_heads": Meaning(
        ("num_key_value_heads", "num_kv_heads", "n_head_kv", "encoder_num_key_value_heads", "decoder_num_key_value_heads"),
        main=("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    ),
    "ffn": Meaning(
        (
            "intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size",
            "moe_intermediate_size", "shared_expert_intermediate_size", "d_inner", "hidden_dim", "inner_dim",
            "encoder_intermediate_size", "decoder_intermediate_size", "mlp_dim", "feed_forward_size", "expert_ffn_hidden_size",
            "shared_intermediate_size", "moe_shared_expert_intermediate_size", "tdnn_dim", "linear_units", "expert_dim",
            "intermediate_size_mlp", "intermediate_sizes", "hidden_ff", "ffn_intermediate_size", "mlp_hidden_size",
            "encoder_ffn_embed_dim", "decoder_ffn_embed_dim", "mamba_d_ssm",
        )
    ),
    "head_dim": Meaning(("head_dim", "d_kv", "kv_channels"), main=("head_dim", "d_kv", "kv_channels")),
    # The width of the text, repeated in the configuration of a part that writes into it.
    "into_text": Meaning(("out_hidden_size", "text_hidden_size", "output_dim", "mm_embed_dim", "language_hidden_size")),
    "layers": Meaning(
        r"^(n_layers?|num_(hidden_|encoder_|decoder_)?layers|encoder_(num_)?(hidden_)?layers|decoder_(num_)?(hidden_)?layers|"
        r"n_(encoder|decoder)_layers|layers|num_blocks|num_hidden_groups|num_conv_layers|num_encoder_blocks)$"
    ),
    # Numbers of layers that no goal sets; a list has one for each stage.
    "stages": Meaning(
        r"^((encoder_|decoder_|pred_)?(depth|depths)|(num_)?(layers|blocks)_per_stage|(num_)?(pooler|predictor|pred|pred_hidden|"
        r"bottleneck|text|vision|audio|conformer|transformer|residual|qformer|fpn|mixer|refiner|prenet|postnet)_(layers|blocks)|"
        r"(text|vision|audio|pred)_num_hidden_layers|stage_num_blocks|stage_numb_of_layers|n_blocks)$"
    ),
    "words": Meaning(
        r"^(vocab_size|.*_vocab_size|vocab_size_.*|n_vocab|n_words)$",
        main=("vocab_size", "n_vocab", "decoder_vocab_size"),
        grows=("vocab_size",),
    ),
    "positions": Meaning(
        r"^(max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions|max_sequence_length|max_length|seq_length)$",
        main=("max_position_embeddings", "n_positions"),
        grows=("max_position_embeddings", "n_positions"),
    ),
    "experts": Meaning(
        r"^(num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_local_experts)$",
        main=("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    ),
    # How many experts a token goes to.
    "top_k": Meaning(r"(per_tok|top_?k$|moe_k)", main=("num_experts_per_tok", "moe_k", "moe_topk", "top_k")),
    # Experts stand in groups, of which some are chosen first.
    "groups": Meaning(("n_group", "num_expert_group"), main=("n_group", "num_expert_group")),
    "top_groups": Meaning(("topk_group", "topk_groups"), main=("topk_group", "topk_groups")),
    # What the loss adds per expert for tokens that are spread unevenly.
    "balance": Meaning(("router_aux_loss_coef", "aux_loss_alpha"), main=("router_aux_loss_coef", "aux_loss_alpha")),
    # Ids of special tokens.
    "token": Meaning(r"(token_ids?|token_index|_idx)$"),
    # Fields that may mean layers by their number; of some, 1 means every layer.
    "by_layer": Meaning(r"layer|interval|freq|pattern|first_k_dense|sparse_step|depth"),
    "every_nth": Meaning(r"interval|freq|step|pattern"),
    # Lists that may be as long as there are layers and say nothing about them.
    "other_list": Meaning(r"^architectures$|token_ids?$"),
}  # fmt: skip
"""Meaning -> its fields."""

WIDTHS: tuple[Width, ...] = ("hidden", "heads", "kv_heads", "ffn")
"""The widths that can be multiplied."""
USUAL: Mapping[Width, tuple[str, ...]] = {
    width: tuple(every) for width in WIDTHS for every in [FIELDS[width].every] if isinstance(every, tuple)
}
"""Width -> the fields that usually hold it."""
EXPERTS: Width = "experts"
"""The width that is multiplied only where it is named: experts, and with them the experts that each token goes to."""
LISTED: Mapping[str, str] = {
    "max_window_layers": "layer_types",
    "sliding_window_pattern": "layer_types",
    "_sliding_window_pattern": "layer_types",
    "full_attention_interval": "layer_types",
    "no_rope_layer_interval": "no_rope_layers",
}
"""Fields that say by a number which layers are of which kind, and the list that says it layer by layer."""
DECODERS = (
    "vocab_size", "num_hidden_layers", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    "rope_parameters", "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range", "attention_dropout", "dtype",
)  # fmt: skip
"""Fields that all Llama-like classes have in common, and that say nothing about widths."""


def first(data: Mapping[str, Any], meaning: str) -> int | None:
    """The number of the whole model that means this: the first main field that holds one above 0.

    >>> first({"d_model": 64, "n_embd": None}, "hidden"), first({"head_dim": 0}, "head_dim")
    (64, None)
    """
    return first_of(data, FIELDS[meaning].main)


def first_of(data: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of these fields that holds a number above 0."""
    return next((data[n] for n in names if type(data.get(n)) is int and data[n] > 0), None)
