"""The widths that can be multiplied, and the fields of a configuration that usually hold them."""

from __future__ import annotations

from collections.abc import Mapping

Width = str

USUAL: Mapping[Width, tuple[str, ...]] = {
    "hidden": (
        "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_sizes", "embed_dims", "embedding_size",
        "word_embed_proj_dim", "encoder_hidden_size", "decoder_hidden_size", "neck_hidden_sizes", "emb_dim",
        "embedding_dim", "model_dim", "hidden_dims", "encoder_embed_dim", "decoder_embed_dim", "channels",
        "stem_channels", "encoder_width", "d_embed", "width", "attention_hidden_size",
    ),
    "heads": (
        "num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "attention_heads",
        "decoder_attention_heads", "decoder_num_attention_heads", "encoder_num_attention_heads", "num_encoder_attention_heads",
        "num_decoder_attention_heads", "encoder_n_heads", "decoder_n_heads", "mamba_n_heads", "mamba_num_heads",
        "linear_num_value_heads", "linear_num_key_heads",
    ),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "encoder_num_key_value_heads", "decoder_num_key_value_heads"),
    "ffn": (
        "intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size",
        "moe_intermediate_size", "shared_expert_intermediate_size", "d_inner", "hidden_dim", "inner_dim",
        "encoder_intermediate_size", "decoder_intermediate_size", "mlp_dim", "feed_forward_size", "expert_ffn_hidden_size",
        "shared_intermediate_size", "moe_shared_expert_intermediate_size", "tdnn_dim", "linear_units", "expert_dim",
        "intermediate_size_mlp", "intermediate_sizes", "hidden_ff", "ffn_intermediate_size", "mlp_hidden_size",
        "encoder_ffn_embed_dim", "decoder_ffn_embed_dim", "mamba_d_ssm",
    ),
}  # fmt: skip
