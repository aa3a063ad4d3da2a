"""Small configurations of much-used model types of transformers that read words, and their stock classes.

Data only; `popular_types.py` has the whole list. The inside of each configuration is that of the published
models of its type: grouped key heads, routed experts, kinds of layers, towers for images. Sizes are small.
"""

from __future__ import annotations

from typing import Any

from .family_configs import Case

Fields = dict[str, Any]

MARKS: Fields = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WORDS: Fields = {"vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0}
SIZES: Fields = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_ENCODER = {**SIZES, **_WORDS}
_DECODER = {**_ENCODER, **MARKS}
GROUPED = {**_DECODER, "num_key_value_heads": 2}
SIZED = {**GROUPED, "head_dim": 16}
_OLD: Fields = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
SEQ: Fields = {
    "vocab_size": 96, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
}  # fmt: skip
_T5: Fields = {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
_FALCON: Fields = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_ALTERNATING: Fields = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS: Fields = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS: Fields = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED: Fields = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
_LATENT = {
    **_DECODER, **_SHARED, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
_MAMBA: Fields = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16,
}  # fmt: skip
_LINEAR: Fields = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_RELATIVE: Fields = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
ANGLES: Fields = {"rope_type": "default", "rope_theta": 1e4}
GEMMA3: Fields = {**SIZED, **_ALTERNATING, "query_pre_attn_scalar": 16}


def typed(model_type: str, architecture: str, fields: Fields, name: str = "") -> Case:
    return Case(name or model_type, model_type, architecture, fields)


DECODERS: tuple[Case, ...] = (
    typed("llama", "LlamaForCausalLM", SIZED),
    typed("qwen2", "Qwen2ForCausalLM", GROUPED),
    typed("qwen3", "Qwen3ForCausalLM", SIZED),
    typed("qwen3_moe", "Qwen3MoeForCausalLM", {**SIZED, **_EXPERTS, "moe_intermediate_size": 32}),
    typed("qwen3_next", "Qwen3NextForCausalLM", {
        **SIZED, **_EXPERTS, **_LINEAR, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    }),
    typed("qwen3_5_text", "Qwen3_5ForCausalLM", {**SIZED, **_LINEAR}),
    typed("mistral", "MistralForCausalLM", SIZED),
    typed("ministral", "MinistralForCausalLM", SIZED),
    typed("ministral3", "Ministral3ForCausalLM", SIZED),
    typed("mixtral", "MixtralForCausalLM", {**SIZED, **_LOCAL_EXPERTS}),
    typed("gemma", "GemmaForCausalLM", SIZED),
    typed("gemma2", "Gemma2ForCausalLM", {**SIZED, "query_pre_attn_scalar": 16, "sliding_window": 16}),
    typed("gemma3_text", "Gemma3ForCausalLM", GEMMA3),
    typed("gemma3n_text", "Gemma3nForCausalLM", {
        **SIZED, **_ALTERNATING, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
        "altup_num_inputs": 2, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0],
    }),
    typed("gemma4_text", "Gemma4ForCausalLM", {
        **SIZED, **_ALTERNATING, "global_head_dim": 32, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 16,
    }),
    typed("phi", "PhiForCausalLM", _DECODER),
    typed("phi3", "Phi3ForCausalLM", GROUPED),
    typed("phimoe", "PhimoeForCausalLM", {**GROUPED, **_LOCAL_EXPERTS}),
    typed("gpt2", "GPT2LMHeadModel", _OLD),
    typed("gpt_neo", "GPTNeoForCausalLM", {
        "vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64, "window_size": 16,
        "attention_types": [[["global", "local"], 1]], "bos_token_id": 1, "eos_token_id": 2,
    }),
    typed("gptj", "GPTJForCausalLM", {**_OLD, "rotary_dim": 8}),
    typed("gpt_neox", "GPTNeoXForCausalLM", _DECODER),
    typed("gpt_bigcode", "GPTBigCodeForCausalLM", _OLD),
    typed("opt", "OPTForCausalLM", {
        "vocab_size": 96, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2,
    }),
    typed("bloom", "BloomForCausalLM", {"vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4, **MARKS}),
    typed("mpt", "MptForCausalLM", {"vocab_size": 96, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    typed("falcon", "FalconForCausalLM", {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}),
    typed("falcon", "FalconForCausalLM", {**_FALCON, "multi_query": True, "new_decoder_architecture": False}, "falcon 7B"),
    typed("olmo", "OlmoForCausalLM", GROUPED),
    typed("olmo2", "Olmo2ForCausalLM", GROUPED),
    typed("olmo3", "Olmo3ForCausalLM", {**GROUPED, **_ALTERNATING}),
    typed("olmoe", "OlmoeForCausalLM", {**GROUPED, **_EXPERTS}),
    typed("flex_olmo", "FlexOlmoForCausalLM", {**GROUPED, **_EXPERTS}),
    typed("granite", "GraniteForCausalLM", GROUPED),
    typed("granitemoe", "GraniteMoeForCausalLM", {**GROUPED, **_LOCAL_EXPERTS}),
    typed("deepseek_v2", "DeepseekV2ForCausalLM", {
        **_LATENT, "first_k_dense_replace": 1, "topk_method": "greedy", "norm_topk_prob": True,
    }),
    typed("deepseek_v3", "DeepseekV3ForCausalLM", {**_LATENT, "first_k_dense_replace": 1}),
    typed("gpt_oss", "GptOssForCausalLM", {**SIZED, **_LOCAL_EXPERTS, **_ALTERNATING, "rope_parameters": ANGLES}),
    typed("glm", "GlmForCausalLM", SIZED),
    typed("glm4", "Glm4ForCausalLM", SIZED),
    typed("glm4_moe", "Glm4MoeForCausalLM", {**SIZED, **_SHARED, "first_k_dense_replace": 1}),
    typed("glm4_moe_lite", "Glm4MoeLiteForCausalLM", _LATENT),
    typed("smollm3", "SmolLM3ForCausalLM", GROUPED),
    typed("stablelm", "StableLmForCausalLM", GROUPED),
    typed("starcoder2", "Starcoder2ForCausalLM", GROUPED),
    typed("cohere", "CohereForCausalLM", GROUPED),
    typed("cohere2", "Cohere2ForCausalLM", {**SIZED, **_ALTERNATING}),
    typed("nemotron", "NemotronForCausalLM", SIZED),
    typed("minimax", "MiniMaxForCausalLM", {
        **SIZED, **_LOCAL_EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 16,
    }),
    typed("minimax_m2", "MiniMaxM2ForCausalLM", {**SIZED, **_LOCAL_EXPERTS, "rotary_dim": 8}),
    typed("ernie4_5", "Ernie4_5ForCausalLM", SIZED),
    typed("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", {
        **GROUPED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    }),
    typed("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", SIZED),
    typed("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", {**SIZED, "num_experts": 4, "moe_topk": 2}),
    typed("exaone4", "Exaone4ForCausalLM", {**GROUPED, **_ALTERNATING}),
    typed("arcee", "ArceeForCausalLM", SIZED),
    typed("apertus", "ApertusForCausalLM", GROUPED),
    typed("seed_oss", "SeedOssForCausalLM", SIZED),
    typed("dots1", "Dots1ForCausalLM", {**SIZED, **_SHARED, "first_k_dense_replace": 1, "sliding_window": 16}),
    typed("llama4_text", "Llama4ForCausalLM", {
        **SIZED, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2,
    }),
    typed("qwen2_moe", "Qwen2MoeForCausalLM", {
        **GROUPED, **_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1,
    }),
)  # fmt: skip

RECURRENT: tuple[Case, ...] = (
    typed("mamba", "MambaForCausalLM", {"vocab_size": 96, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, **MARKS}),
    typed("mamba2", "Mamba2ForCausalLM", {
        "vocab_size": 96, "hidden_size": 64, "state_size": 16, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16,
        "n_groups": 1, "chunk_size": 16, **MARKS,
    }),
    typed("rwkv", "RwkvForCausalLM", {
        "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "attention_hidden_size": 64, "intermediate_size": 96,
        "context_length": 64,
    }),
    typed("jamba", "JambaForCausalLM", {
        **GROUPED, **_EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False,
    }),
    typed("bamba", "BambaForCausalLM", {**GROUPED, **_MAMBA, "attn_layer_indices": [1]}),
    typed("falcon_h1", "FalconH1ForCausalLM", {**SIZED, **_MAMBA, "mamba_d_ssm": 128}),
    typed("granitemoehybrid", "GraniteMoeHybridForCausalLM", {
        **GROUPED, **_LOCAL_EXPERTS, **_MAMBA, "shared_intermediate_size": 96, "layer_types": ["mamba", "attention"],
        "mamba_expand": 2,
    }),
    typed("nemotron_h", "NemotronHForCausalLM", {
        **SIZED, "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
        "ssm_state_size": 16, "chunk_size": 16, "conv_kernel": 4,
    }),
    typed("zamba2", "Zamba2ForCausalLM", {
        **GROUPED, "mamba_d_state": 16, "n_mamba_heads": 8, "mamba_ngroups": 1, "mamba_headdim": 16, "chunk_size": 16,
        "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "use_mem_rope": True, "hybrid_layer_ids": [1],
    }),
    typed("lfm2", "Lfm2ForCausalLM", {
        **GROUPED, "layer_types": ["conv", "full_attention"], "block_ff_dim": 96, "block_auto_adjust_ff_dim": False,
    }),
    typed("lfm2_moe", "Lfm2MoeForCausalLM", {
        **GROUPED, **_EXPERTS, "layer_types": ["conv", "full_attention"], "moe_intermediate_size": 32, "num_dense_layers": 1,
    }),
)  # fmt: skip

ENCODERS: tuple[Case, ...] = (
    typed("bert", "BertForMaskedLM", _ENCODER),
    typed("modernbert", "ModernBertForMaskedLM", {
        **_DECODER, "global_attn_every_n_layers": 2, "local_attention": 16, "cls_token_id": 1, "sep_token_id": 2,
    }),
    typed("roberta", "RobertaForMaskedLM", _ENCODER),
    typed("xlm-roberta", "XLMRobertaForMaskedLM", _ENCODER),
    typed("deberta", "DebertaForMaskedLM", {**_ENCODER, **_RELATIVE}),
    typed("deberta-v2", "DebertaV2ForMaskedLM", {
        **_ENCODER, **_RELATIVE, "position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    }),
    typed("electra", "ElectraForPreTraining", {**_ENCODER, "embedding_size": 64}),
    typed("distilbert", "DistilBertForMaskedLM", {
        "vocab_size": 96, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64,
    }),
    typed("albert", "AlbertForMaskedLM", {**_ENCODER, "embedding_size": 32}),
    typed("mpnet", "MPNetForMaskedLM", _ENCODER),
    typed("nomic_bert", "NomicBertForMaskedLM", _ENCODER),
    typed("eurobert", "EuroBertForMaskedLM", GROUPED),
    typed("esm", "EsmForMaskedLM", {
        **_ENCODER, "mask_token_id": 3, "position_embedding_type": "rotary", "token_dropout": True,
    }),
    typed("t5", "T5ForConditionalGeneration", _T5),
    typed("mt5", "MT5ForConditionalGeneration", _T5),
    typed("bart", "BartForConditionalGeneration", {
        **SEQ, "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
        "decoder_start_token_id": 2, "forced_eos_token_id": 2,
    }),
    typed("marian", "MarianMTModel", {
        **SEQ, "max_position_embeddings": 64, "pad_token_id": 95, "decoder_start_token_id": 95, "eos_token_id": 0,
        "forced_eos_token_id": 0,
    }),
)  # fmt: skip
