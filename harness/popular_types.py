"""The 115 model types of transformers that people use much, in small configurations, with their stock classes.

Data only; `benchmarks/families_popular.py` measures them. Those that read words alone are in `popular_words.py`.
"""

from __future__ import annotations

from .family_configs import Case
from .popular_words import (
    ANGLES,
    DECODERS,
    ENCODERS,
    GEMMA3,
    GROUPED,
    MARKS,
    RECURRENT,
    SEQ,
    SIZED,
    SIZES,
    Fields,
    typed,
)

_IMAGES = {**SIZES, "image_size": 32, "patch_size": 8}
_STAGES: Fields = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "image_size": 32}
_WAVES = {
    **SIZES, "vocab_size": 32, "conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
_CAPTIONS: Fields = {**SIZES, "vocab_size": 96, "max_position_embeddings": 32, **MARKS}
_PLACES: Fields = {"rope_parameters": {**ANGLES, "mrope_section": [2, 3, 3]}}
_QWEN_MARKS: Fields = {
    "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
}  # fmt: skip
_QWEN_EYE: Fields = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_heads": 4, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_LLAMA_TEXT: Fields = {**GROUPED, "model_type": "llama"}

SEEING: tuple[Case, ...] = (
    typed("vit", "ViTForImageClassification", _IMAGES),
    typed("deit", "DeiTForImageClassification", _IMAGES),
    typed("beit", "BeitForImageClassification", _IMAGES),
    typed("dinov2", "Dinov2Model", _IMAGES),
    typed("dinov3_vit", "DINOv3ViTModel", {**_IMAGES, "num_register_tokens": 2}),
    typed("swin", "SwinForImageClassification", {
        "image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4,
    }),
    typed("convnext", "ConvNextForImageClassification", _STAGES),
    typed("convnextv2", "ConvNextV2ForImageClassification", _STAGES),
    typed("resnet", "ResNetForImageClassification", {
        "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic",
    }),
    typed("segformer", "SegformerForSemanticSegmentation", {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3],
        "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "decoder_hidden_size": 32,
    }),
    typed("sam", "SamModel", {
        "vision_config": {
            "hidden_size": 64, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 64,
            "patch_size": 8, "window_size": 4, "global_attn_indexes": [1], "mlp_dim": 96, "num_pos_feats": 16,
        },
        "prompt_encoder_config": {"hidden_size": 32, "image_size": 64, "patch_size": 8, "mask_input_channels": 4},
        "mask_decoder_config": {
            "hidden_size": 32, "mlp_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "iou_head_hidden_dim": 32,
        },
    }),
    typed("clip", "CLIPModel", {
        "text_config": {**_CAPTIONS, "projection_dim": 32}, "vision_config": {**_IMAGES, "projection_dim": 32},
        "projection_dim": 32,
    }),
    typed("clip_vision_model", "CLIPVisionModel", {**_IMAGES, "projection_dim": 32}),
    typed("siglip", "SiglipModel", {"text_config": {**_CAPTIONS, "projection_size": 64}, "vision_config": _IMAGES}),
    typed("siglip2", "Siglip2Model", {
        "text_config": {**_CAPTIONS, "projection_size": 64}, "vision_config": {**SIZES, "patch_size": 8, "num_patches": 16},
    }),
    typed("qwen2_vl", "Qwen2VLForConditionalGeneration", {
        **_QWEN_MARKS, "text_config": {**GROUPED, **_PLACES}, "vision_config": {
            "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "mlp_ratio": 2,
        },
    }),
    typed("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", {
        **_QWEN_MARKS, "text_config": {**GROUPED, **_PLACES},
        "vision_config": {**_QWEN_EYE, "window_size": 16, "fullatt_block_indexes": [1]},
    }),
    typed("qwen3_vl", "Qwen3VLForConditionalGeneration", {
        **_QWEN_MARKS, "text_config": {**SIZED, **_PLACES},
        "vision_config": {**_QWEN_EYE, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    }),
    typed("llava", "LlavaForConditionalGeneration", {
        "text_config": _LLAMA_TEXT, "vision_config": {**_IMAGES, "projection_dim": 32, "model_type": "clip_vision_model"},
        "image_token_index": 90, "vision_feature_layer": -2,
    }),
    typed("paligemma", "PaliGemmaForConditionalGeneration", {
        "text_config": {**SIZED, "model_type": "gemma"}, "image_token_index": 90,
        "vision_config": {**_IMAGES, "vision_use_head": False, "model_type": "siglip_vision_model"}, "projection_dim": 64,
    }),
    typed("gemma3", "Gemma3ForConditionalGeneration", {
        "text_config": GEMMA3, "vision_config": {**_IMAGES, "vision_use_head": False}, "image_token_index": 90,
        "mm_tokens_per_image": 4, "boi_token_index": 91, "eoi_token_index": 92,
    }),
    typed("idefics3", "Idefics3ForConditionalGeneration", {
        "text_config": _LLAMA_TEXT, "vision_config": _IMAGES, "image_token_id": 90, "scale_factor": 2,
    }),
    typed("smolvlm", "SmolVLMForConditionalGeneration", {
        "text_config": _LLAMA_TEXT, "vision_config": _IMAGES, "image_token_id": 90, "scale_factor": 2,
    }),
)  # fmt: skip

HEARING: tuple[Case, ...] = (
    typed("whisper", "WhisperForConditionalGeneration", {
        **SEQ, **MARKS, "max_source_positions": 50, "max_target_positions": 32, "num_mel_bins": 16,
        "decoder_start_token_id": 1, "suppress_tokens": [], "begin_suppress_tokens": [],
    }),
    typed("wav2vec2", "Wav2Vec2ForCTC", _WAVES),
    typed("hubert", "HubertForCTC", _WAVES),
)  # fmt: skip

POPULAR = (*DECODERS, *RECURRENT, *ENCODERS, *SEEING, *HEARING)
