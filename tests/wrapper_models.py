"""Tiny random models of images and text."""

from typing import Any

import torch
from factories import randomise

VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_heads": 2}
CLIP = VISION | {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8}
SIGLIP = CLIP | {"model_type": "siglip_vision_model"}
MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 1, 2]}
QWEN3_5_VISION = {"vision_config": VISION | {"depth": 2, "out_hidden_size": 32, "num_position_embeddings": 16}}
QWEN3_5: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# of a language model with experts and a latent, for `mistral3`
MISTRAL4: dict[str, Any] = {
    "model_type": "mistral4",
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
# layers that read their tokens again, with borrowed keys and values in the last two of them, as in the E4B
GEMMA_TOKENS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "attention_k_eq_v": False,
}
# with bounds of what linears read, which are infinite
AUDIO: dict[str, Any] = {
    "model_type": "gemma4_audio",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [4, 2],
    "attention_chunk_size": 4,
    "attention_context_left": 5,
    "output_proj_dims": 16,
}
GEMMA_EXPERTS = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
# what is beside the language model's sizes: options of the wrapper, and of the language model
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma4": (
        {
            "audio_config": AUDIO,
            "vision_config": VISION | {"model_type": "gemma4_vision", "head_dim": 8, "position_embedding_size": 16},
        },
        {
            "model_type": "gemma4_text",
            **GEMMA_TOKENS,
            "num_hidden_layers": 5,
            "vocab_size_per_layer_input": 404,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 7,
            "use_bidirectional_attention": "vision",
        },
    ),
    "glm4v": (
        {"vision_config": VISION | {"depth": 2, "out_hidden_size": 32, "image_size": 16, "patch_size": 8}},
        {"rope_parameters": MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}},
    ),
    "internvl": ({"vision_config": VISION | {"image_size": [16, 16], "patch_size": [8, 8]}}, {"model_type": "qwen2"}),
    "lfm2_vl": (
        {
            "vision_config": SIGLIP | {"model_type": "siglip2_vision_model", "num_patches": 4},
            "projector_hidden_size": 16,
        },
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "gemma3": (
        {"vision_config": SIGLIP, "mm_tokens_per_image": 4},
        {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 20},
    ),
    "llava": ({"vision_config": CLIP}, {"model_type": "llama"}),
    "llava_next": ({"vision_config": CLIP}, {"model_type": "mistral", "sliding_window": 7}),
    "llava_onevision": ({"vision_config": SIGLIP}, {"model_type": "qwen2"}),
    "mistral3": (
        {"vision_config": VISION | {"model_type": "pixtral", "image_size": 16, "patch_size": 8, "head_dim": 8}},
        {"model_type": "mistral", "sliding_window": None},
    ),
    "qwen2_vl": (
        {"vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1}},
        {"rope_parameters": MROPE},
    ),
    "qwen2_5_vl": (
        {
            "vision_config": {
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 8,
                "num_heads": 2,
                "out_hidden_size": 32,
            }
        },
        {"rope_parameters": MROPE},
    ),
    "qwen3_vl": (
        {
            "vision_config": VISION
            | {"depth": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
        },
        {"rope_parameters": MROPE, "head_dim": 8},
    ),
    "qwen3_5": (QWEN3_5_VISION, {"model_type": "qwen3_5_text", **QWEN3_5}),
    "qwen3_5_moe": (
        QWEN3_5_VISION,
        {
            "model_type": "qwen3_5_moe_text",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 24,
            **QWEN3_5,
        },
    ),
    "smolvlm": ({"vision_config": VISION | {"image_size": 16, "patch_size": 8}}, {"model_type": "llama"}),
}


def build_wrapper(family: str, *, tied: bool = False, seed: int = 0, **further: Any) -> Any:
    """Return a random model of a wrapper's stock class."""
    import transformers
    from transformers import AutoConfig

    from oneshot.families import FAMILIES

    outer, inner = WRAPPERS[family]
    sizes = {
        "vocab_size": 404,  # the tokens of the tiny tokenizer, and the ones below
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "tie_word_embeddings": tied,
    }
    tokens = {"image_token_id": 400, "image_token_index": 400, "video_token_id": 401, "vision_start_token_id": 402}
    config = AutoConfig.for_model(
        family, text_config=sizes | inner | further, tie_word_embeddings=tied, **outer, **tokens
    )
    [name] = FAMILIES[family].classes
    return randomise(getattr(transformers, name)(config), seed).to(torch.float32).eval()
