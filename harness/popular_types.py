"""Small configurations of 115 model types of transformers that people use much, and their stock classes.

Data only; `benchmarks/families.py --popular` measures them. The inside of each configuration is that of the published
models of its type: grouped key heads, routed experts, kinds of layers, towers for images. Sizes are small.
"""

from __future__ import annotations

from typing import Any

from .family_configs import Case

Fields = dict[str, Any]

_MARKS: Fields = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WORDS: Fields = {"vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0}
_SIZES: Fields = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_ENCODER = {**_SIZES, **_WORDS}
_DECODER = {**_ENCODER, **_MARKS}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_SIZED = {**_GROUPED, "head_dim": 16}
_IMAGES = {**_SIZES, "image_size": 32, "patch_size": 8}
_OLD: Fields = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_SEQ: Fields = {
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
_STAGES: Fields = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "image_size": 32}
_WAVES = {
    **_SIZES, "vocab_size": 32, "conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
_CAPTIONS: Fields = {**_SIZES, "vocab_size": 96, "max_position_embeddings": 32, **_MARKS}
_ANGLES: Fields = {"rope_type": "default", "rope_theta": 1e4}
_PLACES: Fields = {"rope_parameters": {**_ANGLES, "mrope_section": [2, 3, 3]}}
_QWEN_MARKS: Fields = {
    "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
}  # fmt: skip
_QWEN_EYE: Fields = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 4, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_LLAMA_TEXT: Fields = {**_GROUPED, "model_type": "llama"}
_GEMMA3: Fields = {**_SIZED, **_ALTERNATING, "query_pre_attn_scalar": 16}


def _type(model_type: str, architecture: str, fields: Fields, name: str = "") -> Case:
    return Case(name or model_type, model_type, architecture, fields)


DECODERS: tuple[Case, ...] = (
    _type("llama", "LlamaForCausalLM", _SIZED),
    _type("qwen2", "Qwen2ForCausalLM", _GROUPED),
    _type("qwen3", "Qwen3ForCausalLM", _SIZED),
    _type("qwen3_moe", "Qwen3MoeForCausalLM", {**_SIZED, **_EXPERTS, "moe_intermediate_size": 32}),
    _type("qwen3_next", "Qwen3NextForCausalLM", {
        **_SIZED, **_EXPERTS, **_LINEAR, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    }),
    _type("qwen3_5_text", "Qwen3_5ForCausalLM", {**_SIZED, **_LINEAR}),
    _type("mistral", "MistralForCausalLM", _SIZED),
    _type("ministral", "MinistralForCausalLM", _SIZED),
    _type("ministral3", "Ministral3ForCausalLM", _SIZED),
    _type("mixtral", "MixtralForCausalLM", {**_SIZED, **_LOCAL_EXPERTS}),
    _type("gemma", "GemmaForCausalLM", _SIZED),
    _type("gemma2", "Gemma2ForCausalLM", {**_SIZED, "query_pre_attn_scalar": 16, "sliding_window": 16}),
    _type("gemma3_text", "Gemma3ForCausalLM", _GEMMA3),
    _type("gemma3n_text", "Gemma3nForCausalLM", {
        **_SIZED, **_ALTERNATING, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
        "altup_num_inputs": 2, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0],
    }),
    _type("gemma4_text", "Gemma4ForCausalLM", {
        **_SIZED, **_ALTERNATING, "global_head_dim": 32, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 16,
    }),
    _type("phi", "PhiForCausalLM", _DECODER),
    _type("phi3", "Phi3ForCausalLM", _GROUPED),
    _type("phimoe", "PhimoeForCausalLM", {**_GROUPED, **_LOCAL_EXPERTS}),
    _type("gpt2", "GPT2LMHeadModel", _OLD),
    _type("gpt_neo", "GPTNeoForCausalLM", {
        "vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64, "window_size": 16,
        "attention_types": [[["global", "local"], 1]], "bos_token_id": 1, "eos_token_id": 2,
    }),
    _type("gptj", "GPTJForCausalLM", {**_OLD, "rotary_dim": 8}),
    _type("gpt_neox", "GPTNeoXForCausalLM", _DECODER),
    _type("gpt_bigcode", "GPTBigCodeForCausalLM", _OLD),
    _type("opt", "OPTForCausalLM", {
        "vocab_size": 96, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2,
    }),
    _type("bloom", "BloomForCausalLM", {"vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4, **_MARKS}),
    _type("mpt", "MptForCausalLM", {"vocab_size": 96, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    _type("falcon", "FalconForCausalLM", {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}),
    _type("falcon", "FalconForCausalLM", {**_FALCON, "multi_query": True, "new_decoder_architecture": False}, "falcon 7B"),
    _type("olmo", "OlmoForCausalLM", _GROUPED),
    _type("olmo2", "Olmo2ForCausalLM", _GROUPED),
    _type("olmo3", "Olmo3ForCausalLM", {**_GROUPED, **_ALTERNATING}),
    _type("olmoe", "OlmoeForCausalLM", {**_GROUPED, **_EXPERTS}),
    _type("flex_olmo", "FlexOlmoForCausalLM", {**_GROUPED, **_EXPERTS}),
    _type("granite", "GraniteForCausalLM", _GROUPED),
    _type("granitemoe", "GraniteMoeForCausalLM", {**_GROUPED, **_LOCAL_EXPERTS}),
    _type("deepseek_v2", "DeepseekV2ForCausalLM", {
        **_LATENT, "first_k_dense_replace": 1, "topk_method": "greedy", "norm_topk_prob": True,
    }),
    _type("deepseek_v3", "DeepseekV3ForCausalLM", {**_LATENT, "first_k_dense_replace": 1}),
    _type("gpt_oss", "GptOssForCausalLM", {**_SIZED, **_LOCAL_EXPERTS, **_ALTERNATING, "rope_parameters": _ANGLES}),
    _type("glm", "GlmForCausalLM", _SIZED),
    _type("glm4", "Glm4ForCausalLM", _SIZED),
    _type("glm4_moe", "Glm4MoeForCausalLM", {**_SIZED, **_SHARED, "first_k_dense_replace": 1}),
    _type("glm4_moe_lite", "Glm4MoeLiteForCausalLM", _LATENT),
    _type("smollm3", "SmolLM3ForCausalLM", _GROUPED),
    _type("stablelm", "StableLmForCausalLM", _GROUPED),
    _type("starcoder2", "Starcoder2ForCausalLM", _GROUPED),
    _type("cohere", "CohereForCausalLM", _GROUPED),
    _type("cohere2", "Cohere2ForCausalLM", {**_SIZED, **_ALTERNATING}),
    _type("nemotron", "NemotronForCausalLM", _SIZED),
    _type("minimax", "MiniMaxForCausalLM", {
        **_SIZED, **_LOCAL_EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 16,
    }),
    _type("minimax_m2", "MiniMaxM2ForCausalLM", {**_SIZED, **_LOCAL_EXPERTS, "rotary_dim": 8}),
    _type("ernie4_5", "Ernie4_5ForCausalLM", _SIZED),
    _type("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", {
        **_GROUPED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    }),
    _type("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", _SIZED),
    _type("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", {**_SIZED, "num_experts": 4, "moe_topk": 2}),
    _type("exaone4", "Exaone4ForCausalLM", {**_GROUPED, **_ALTERNATING}),
    _type("arcee", "ArceeForCausalLM", _SIZED),
    _type("apertus", "ApertusForCausalLM", _GROUPED),
    _type("seed_oss", "SeedOssForCausalLM", _SIZED),
    _type("dots1", "Dots1ForCausalLM", {**_SIZED, **_SHARED, "first_k_dense_replace": 1, "sliding_window": 16}),
    _type("llama4_text", "Llama4ForCausalLM", {
        **_SIZED, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2,
    }),
    _type("qwen2_moe", "Qwen2MoeForCausalLM", {
        **_GROUPED, **_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1,
    }),
)  # fmt: skip

RECURRENT: tuple[Case, ...] = (
    _type("mamba", "MambaForCausalLM", {"vocab_size": 96, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, **_MARKS}),
    _type("mamba2", "Mamba2ForCausalLM", {
        "vocab_size": 96, "hidden_size": 64, "state_size": 16, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16,
        "n_groups": 1, "chunk_size": 16, **_MARKS,
    }),
    _type("rwkv", "RwkvForCausalLM", {
        "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "attention_hidden_size": 64, "intermediate_size": 96,
        "context_length": 64,
    }),
    _type("jamba", "JambaForCausalLM", {
        **_GROUPED, **_EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False,
    }),
    _type("bamba", "BambaForCausalLM", {**_GROUPED, **_MAMBA, "attn_layer_indices": [1]}),
    _type("falcon_h1", "FalconH1ForCausalLM", {**_SIZED, **_MAMBA, "mamba_d_ssm": 128}),
    _type("granitemoehybrid", "GraniteMoeHybridForCausalLM", {
        **_GROUPED, **_LOCAL_EXPERTS, **_MAMBA, "shared_intermediate_size": 96, "layer_types": ["mamba", "attention"],
        "mamba_expand": 2,
    }),
    _type("nemotron_h", "NemotronHForCausalLM", {
        **_SIZED, "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
        "ssm_state_size": 16, "chunk_size": 16, "conv_kernel": 4,
    }),
    _type("zamba2", "Zamba2ForCausalLM", {
        **_GROUPED, "mamba_d_state": 16, "n_mamba_heads": 8, "mamba_ngroups": 1, "mamba_headdim": 16, "chunk_size": 16,
        "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "use_mem_rope": True, "hybrid_layer_ids": [1],
    }),
    _type("lfm2", "Lfm2ForCausalLM", {
        **_GROUPED, "layer_types": ["conv", "full_attention"], "block_ff_dim": 96, "block_auto_adjust_ff_dim": False,
    }),
    _type("lfm2_moe", "Lfm2MoeForCausalLM", {
        **_GROUPED, **_EXPERTS, "layer_types": ["conv", "full_attention"], "moe_intermediate_size": 32, "num_dense_layers": 1,
    }),
)  # fmt: skip

ENCODERS: tuple[Case, ...] = (
    _type("bert", "BertForMaskedLM", _ENCODER),
    _type("modernbert", "ModernBertForMaskedLM", {
        **_DECODER, "global_attn_every_n_layers": 2, "local_attention": 16, "cls_token_id": 1, "sep_token_id": 2,
    }),
    _type("roberta", "RobertaForMaskedLM", _ENCODER),
    _type("xlm-roberta", "XLMRobertaForMaskedLM", _ENCODER),
    _type("deberta", "DebertaForMaskedLM", {**_ENCODER, **_RELATIVE}),
    _type("deberta-v2", "DebertaV2ForMaskedLM", {
        **_ENCODER, **_RELATIVE, "position_buckets": 16, "share_att_key": True, "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    }),
    _type("electra", "ElectraForPreTraining", {**_ENCODER, "embedding_size": 64}),
    _type("distilbert", "DistilBertForMaskedLM", {
        "vocab_size": 96, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64,
    }),
    _type("albert", "AlbertForMaskedLM", {**_ENCODER, "embedding_size": 32}),
    _type("mpnet", "MPNetForMaskedLM", _ENCODER),
    _type("nomic_bert", "NomicBertForMaskedLM", _ENCODER),
    _type("eurobert", "EuroBertForMaskedLM", _GROUPED),
    _type("esm", "EsmForMaskedLM", {
        **_ENCODER, "mask_token_id": 3, "position_embedding_type": "rotary", "token_dropout": True,
    }),
    _type("t5", "T5ForConditionalGeneration", _T5),
    _type("mt5", "MT5ForConditionalGeneration", _T5),
    _type("bart", "BartForConditionalGeneration", {
        **_SEQ, "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
        "decoder_start_token_id": 2, "forced_eos_token_id": 2,
    }),
    _type("marian", "MarianMTModel", {
        **_SEQ, "max_position_embeddings": 64, "pad_token_id": 95, "decoder_start_token_id": 95, "eos_token_id": 0,
        "forced_eos_token_id": 0,
    }),
)  # fmt: skip

SEEING: tuple[Case, ...] = (
    _type("vit", "ViTForImageClassification", _IMAGES),
    _type("deit", "DeiTForImageClassification", _IMAGES),
    _type("beit", "BeitForImageClassification", _IMAGES),
    _type("dinov2", "Dinov2Model", _IMAGES),
    _type("dinov3_vit", "DINOv3ViTModel", {**_IMAGES, "num_register_tokens": 2}),
    _type("swin", "SwinForImageClassification", {
        "image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4,
    }),
    _type("convnext", "ConvNextForImageClassification", _STAGES),
    _type("convnextv2", "ConvNextV2ForImageClassification", _STAGES),
    _type("resnet", "ResNetForImageClassification", {
        "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic",
    }),
    _type("segformer", "SegformerForSemanticSegmentation", {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3],
        "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "decoder_hidden_size": 32,
    }),
    _type("sam", "SamModel", {
        "vision_config": {
            "hidden_size": 64, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64,
            "patch_size": 8, "window_size": 4, "global_attn_indexes": [1], "mlp_dim": 96, "num_pos_feats": 16,
        },
        "prompt_encoder_config": {"hidden_size": 32, "image_size": 64, "patch_size": 8, "mask_input_channels": 4},
        "mask_decoder_config": {
            "hidden_size": 32, "mlp_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "iou_head_hidden_dim": 32,
        },
    }),
    _type("clip", "CLIPModel", {
        "text_config": {**_CAPTIONS, "projection_dim": 32}, "vision_config": {**_IMAGES, "projection_dim": 32},
        "projection_dim": 32,
    }),
    _type("clip_vision_model", "CLIPVisionModel", {**_IMAGES, "projection_dim": 32}),
    _type("siglip", "SiglipModel", {"text_config": {**_CAPTIONS, "projection_size": 64}, "vision_config": _IMAGES}),
    _type("siglip2", "Siglip2Model", {
        "text_config": {**_CAPTIONS, "projection_size": 64}, "vision_config": {**_SIZES, "patch_size": 8, "num_patches": 16},
    }),
    _type("qwen2_vl", "Qwen2VLForConditionalGeneration", {
        **_QWEN_MARKS, "text_config": {**_GROUPED, **_PLACES}, "vision_config": {
            "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "mlp_ratio": 2,
        },
    }),
    _type("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", {
        **_QWEN_MARKS, "text_config": {**_GROUPED, **_PLACES},
        "vision_config": {**_QWEN_EYE, "window_size": 16, "fullatt_block_indexes": [1]},
    }),
    _type("qwen3_vl", "Qwen3VLForConditionalGeneration", {
        **_QWEN_MARKS, "text_config": {**_SIZED, **_PLACES},
        "vision_config": {**_QWEN_EYE, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    }),
    _type("llava", "LlavaForConditionalGeneration", {
        "text_config": _LLAMA_TEXT, "vision_config": {**_IMAGES, "projection_dim": 32, "model_type": "clip_vision_model"},
        "image_token_index": 90, "vision_feature_layer": -2,
    }),
    _type("paligemma", "PaliGemmaForConditionalGeneration", {
        "text_config": {**_SIZED, "model_type": "gemma"}, "image_token_index": 90,
        "vision_config": {**_IMAGES, "vision_use_head": False, "model_type": "siglip_vision_model"}, "projection_dim": 64,
    }),
    _type("gemma3", "Gemma3ForConditionalGeneration", {
        "text_config": _GEMMA3, "vision_config": {**_IMAGES, "vision_use_head": False}, "image_token_index": 90,
        "mm_tokens_per_image": 4, "boi_token_index": 91, "eoi_token_index": 92,
    }),
    _type("idefics3", "Idefics3ForConditionalGeneration", {
        "text_config": _LLAMA_TEXT, "vision_config": _IMAGES, "image_token_id": 90, "scale_factor": 2,
    }),
    _type("smolvlm", "SmolVLMForConditionalGeneration", {
        "text_config": _LLAMA_TEXT, "vision_config": _IMAGES, "image_token_id": 90, "scale_factor": 2,
    }),
)  # fmt: skip

HEARING: tuple[Case, ...] = (
    _type("whisper", "WhisperForConditionalGeneration", {
        **_SEQ, **_MARKS, "max_source_positions": 50, "max_target_positions": 32, "num_mel_bins": 16,
        "decoder_start_token_id": 1, "suppress_tokens": [], "begin_suppress_tokens": [],
    }),
    _type("wav2vec2", "Wav2Vec2ForCTC", _WAVES),
    _type("hubert", "HubertForCTC", _WAVES),
)  # fmt: skip

POPULAR = (*DECODERS, *RECURRENT, *ENCODERS, *SEEING, *HEARING)
