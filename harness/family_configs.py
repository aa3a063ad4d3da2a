"""Tiny configurations of stock model types: those that are known to grow exactly, and those known not to.

Data only; `benchmarks/families.py` measures them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    name: str
    model_type: str
    architecture: str
    fields: dict[str, Any]
    multipliers: str = "{k}"
    reason: str = ""
    """For a case that must be refused: the code of its refusal."""


_MARKS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_PLAIN = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97,
    "max_position_embeddings": 64, **_MARKS,
}  # fmt: skip
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_SIZED = {**_GROUPED, "head_dim": 16}
_TIED = {"tie_word_embeddings": True}
_GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 97,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OPT = {
    "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97,
    "max_position_embeddings": 64, "word_embed_proj_dim": 32, **_MARKS,
}  # fmt: skip
_T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": 97,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_IMAGE = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_STAGES = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [1, 2]}
_CONVNEXT = {"num_stages": 2, "hidden_sizes": [16, 24], "depths": [1, 2], "patch_size": 2, "image_size": 16}
_MAMBA2 = {
    "hidden_size": 32, "num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 6, "n_groups": 2, "num_hidden_layers": 2,
    "vocab_size": 97, "chunk_size": 8, "residual_in_fp32": False, **_MARKS,
}  # fmt: skip
_FALCON = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97, "alibi": False,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_BLOOM = {
    "hidden_size": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 97,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

EXACT: tuple[Case, ...] = (
    Case("GPT-2", "gpt2", "GPT2LMHeadModel", _GPT2),
    Case("GPT-2 untied", "gpt2", "GPT2LMHeadModel", {**_GPT2, "tie_word_embeddings": False}),
    Case("GPT-2 scaled by layer", "gpt2", "GPT2LMHeadModel", {**_GPT2, "scale_attn_by_inverse_layer_idx": True, "n_inner": 48}),
    Case("GPT-2 classifier", "gpt2", "GPT2ForSequenceClassification", {**_GPT2, "pad_token_id": 0}),
    Case("GPT-NeoX", "gpt_neox", "GPTNeoXForCausalLM", {**_PLAIN, "rotary_pct": 0.25}),
    Case("GPT-NeoX tied", "gpt_neox", "GPTNeoXForCausalLM", {**_PLAIN, "rotary_pct": 0.25, **_TIED}),
    Case("OPT", "opt", "OPTForCausalLM", _OPT),
    Case("OPT-350m", "opt", "OPTForCausalLM", {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    Case("Llama 3 grouped", "llama", "LlamaForCausalLM", {**_GROUPED, "rope_parameters": _LLAMA3}),
    Case("Llama tied", "llama", "LlamaForCausalLM", {**_GROUPED, **_TIED}),
    Case("Llama, key heads kept", "llama", "LlamaForCausalLM", {**_GROUPED, **_TIED}, "{k},kv_heads=1"),
    Case("Llama, three multipliers", "llama", "LlamaForCausalLM", {**_GROUPED, **_TIED}, "hidden={k},heads=4,kv_heads=4,ffn=5"),
    Case("Mistral, window", "mistral", "MistralForCausalLM", {**_GROUPED, "sliding_window": 5}),
    Case("Qwen2 tied", "qwen2", "Qwen2ForCausalLM", {**_GROUPED, **_TIED}),
    Case("Qwen3 tied", "qwen3", "Qwen3ForCausalLM", {**_SIZED, **_TIED}),
    Case("Gemma", "gemma", "GemmaForCausalLM", _SIZED),
    Case("Gemma 2", "gemma2", "Gemma2ForCausalLM", {**_SIZED, "sliding_window": 5, "query_pre_attn_scalar": 24}),
    Case("Gemma 3", "gemma3_text", "Gemma3ForCausalLM", {**_SIZED, "sliding_window": 5, "query_pre_attn_scalar": 24}),
    Case("Phi-3 grouped", "phi3", "Phi3ForCausalLM", {**_GROUPED, "original_max_position_embeddings": 64}),
    Case("OLMo 2 grouped", "olmo2", "Olmo2ForCausalLM", _GROUPED),
    Case("OLMo untied", "olmo", "OlmoForCausalLM", {**_GROUPED, "tie_word_embeddings": False}),
    Case("Granite tied", "granite", "GraniteForCausalLM", {
        **_GROUPED, **_TIED, "logits_scaling": 3.0, "embedding_multiplier": 5.0, "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
    }),
    Case("Cohere, QK-norm", "cohere", "CohereForCausalLM", {**_GROUPED, "use_qk_norm": True, "logit_scale": 0.3}),
    Case("Cohere 2", "cohere2", "Cohere2ForCausalLM", {**_GROUPED, "head_dim": 8, "sliding_window": 5, "logit_scale": 0.3}),
    Case("SmolLM3", "smollm3", "SmolLM3ForCausalLM", {**_GROUPED, "no_rope_layer_interval": 2}),
    Case("Mixtral", "mixtral", "MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Case("Qwen3-MoE", "qwen3_moe", "Qwen3MoeForCausalLM", {
        **_SIZED, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    }),
    Case("Qwen2-MoE", "qwen2_moe", "Qwen2MoeForCausalLM", {
        **_GROUPED, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 28, "num_experts": 4,
        "num_experts_per_tok": 2,
    }),
    Case("GPT-OSS", "gpt_oss", "GptOssForCausalLM", {
        **_SIZED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }),
    Case("Mamba 2", "mamba2", "Mamba2ForCausalLM", _MAMBA2),
    Case("Mamba 2 tied", "mamba2", "Mamba2ForCausalLM", {**_MAMBA2, **_TIED}),
    Case("DeepSeek-V3", "deepseek_v3", "DeepseekV3ForCausalLM", {
        **_PLAIN, "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 12,
        "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    }),
    Case("BERT", "bert", "BertForMaskedLM", _PLAIN),
    Case("BERT classifier", "bert", "BertForSequenceClassification", _PLAIN),
    Case("RoBERTa", "roberta", "RobertaForMaskedLM", _PLAIN),
    Case("ViT", "vit", "ViTForImageClassification", _IMAGE),
    Case("DINOv2", "dinov2", "Dinov2ForImageClassification", {**_IMAGE, "mlp_ratio": 2, "layerscale_value": 0.7}),
    Case("T5 tied", "t5", "T5ForConditionalGeneration", _T5),
    Case("T5 gated", "t5", "T5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    Case("Whisper", "whisper", "WhisperForConditionalGeneration", {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "num_mel_bins": 6, "max_source_positions": 10,
        "max_target_positions": 32, "vocab_size": 97, "decoder_start_token_id": 1, "begin_suppress_tokens": None, **_MARKS,
    }),
    Case("ResNet bottleneck", "resnet", "ResNetForImageClassification", {**_STAGES, "layer_type": "bottleneck", "hidden_sizes": [16, 32]}),
    Case("ResNet basic", "resnet", "ResNetForImageClassification", {**_STAGES, "layer_type": "basic"}),
    Case("ConvNeXt", "convnext", "ConvNextForImageClassification", {**_CONVNEXT, "layer_scale_init_value": 0.5}),
    Case("ConvNeXt V2", "convnextv2", "ConvNextV2ForImageClassification", _CONVNEXT),
    Case("Falcon grouped", "falcon", "FalconForCausalLM", {
        **_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 48,
    }),
    Case("BLOOM", "bloom", "BloomForCausalLM", _BLOOM),
)  # fmt: skip

INEXACT: tuple[Case, ...] = (
    Case("OLMo tied", "olmo", "OlmoForCausalLM", {**_GROUPED, **_TIED}, reason="family.last_norm_without_gain"),
    Case("XGLM, sinusoids", "xglm", "XGLMForCausalLM", {
        "d_model": 32, "ffn_dim": 40, "num_layers": 2, "attention_heads": 4, "vocab_size": 97, "max_position_embeddings": 64,
    }, reason="family.table_computed_from_width"),
    Case("M2M-100, sinusoids", "m2m_100", "M2M100ForConditionalGeneration", {
        "d_model": 32, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 97, "max_position_embeddings": 64,
    }, reason="family.table_computed_from_width"),
    Case("Falcon-7B, one key head", "falcon", "FalconForCausalLM", {
        **_FALCON, "multi_query": True, "new_decoder_architecture": False, "ffn_hidden_size": 48,
    }, reason="family.fused_rows_copied_unequally"),
    Case("BLOOM, heads", "bloom", "BloomForCausalLM", _BLOOM, "hidden={k},heads={k}", reason="goal.width_not_in_config"),
    Case("GPT-2, heads apart", "gpt2", "GPT2LMHeadModel", _GPT2, "hidden={k}", reason="goal.hidden_unlike_heads"),
)  # fmt: skip
