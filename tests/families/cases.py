"""The table of families for all tests: how a tiny model of each is built, in which variants, and what it cannot have.

A new family is one description in `oneshot/families` and one entry here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from factories import build_model
from rotary import LLAMA3_ROTARY
from t5_models import build_t5
from wrapper_models import GEMMA_EXPERTS, GEMMA_TOKENS, WRAPPERS, build_wrapper

from oneshot.architecture import Feature

WINDOWS_ABOVE = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}  # in all layers but one
GEMMA3_KINDS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "default", "rope_theta": 900.0},
    },
    "query_pre_attn_scalar": 20,
}
GRANITE_FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}


@dataclass(frozen=True)
class Case:
    """A family: `build(**options)` makes a tiny random model of its stock class.

    Attributes:
        options: of every variant. variants: further options of each, by name; the family itself is the one without a
            name. refused: features that `reason_against` refuses. packed: whether text is packed for it, as for every
            decoder.
    """

    options: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: frozenset[Feature] = frozenset()
    packed: bool = True
    build: Callable[..., Any] = build_model


ENCODER_REFUSALS: frozenset[Feature] = frozenset({"heads", "up_proj", "embedding ranks", "self text"})
STOCK_ENCODERS: frozenset[Feature] = ENCODER_REFUSALS | {"ffn biases", "hidden size", "per-layer form"}
T5_REFUSALS: frozenset[Feature] = frozenset(
    {"ffn biases", "embedding ranks", "self text", "profile", "latency", "per-layer form"}
)
OWN_CLASS: frozenset[Feature] = frozenset({"ffn biases", "hidden size"})
STOCK_ONLY: frozenset[Feature] = OWN_CLASS | {"per-layer form"}
NORMS_INSIDE: frozenset[Feature] = OWN_CLASS | {"up_proj"}
LAYER_NORMS: frozenset[Feature] = OWN_CLASS | {"embedding ranks"}
MIXTURES: frozenset[Feature] = OWN_CLASS | {
    "up_proj",
    "latency",
    "sketch",
    "moments",
    "neuron scores",
    "held-out damping",
}
EXPERTS = {"num_experts_per_tok": 2, "width": 32}
GLM_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "groups": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 2,
}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
STATE_SPACES = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "mlp_multipliers": [0.7, 0.4],
    "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
    "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 0.6,
    "key_multiplier": 0.5,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.7,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.3,
}
PARALLEL: frozenset[Feature] = LAYER_NORMS | {"up_proj"}
CASES: dict[str, Case] = {
    "llama": Case(
        variants={
            "biases": {"attention_bias": True, "mlp_bias": True},
            "mha": {"groups": 4},
            "one-kv-head": {"groups": 1, "tied": True},
            "wide-heads": {"head_dim": 16},
            "llama3-rope": {"rope_parameters": LLAMA3_ROTARY},
        }
    ),
    "mistral": Case(
        {"family": "mistral"},
        {"window": {"sliding_window": 7}, "window-longer-than-the-text": {"sliding_window": 100}},
        frozenset({"ffn biases"}),
    ),
    "qwen2": Case({"family": "qwen2"}, {"long": {"layers": 3}, "windows": WINDOWS_ABOVE}, frozenset({"ffn biases"})),
    "qwen3": Case(
        {"family": "qwen3", "head_dim": 8},
        {"wide-heads": {"head_dim": 16}},
        frozenset({"ffn biases", "queries and keys"}),
    ),
    "phi3": Case({"family": "phi3"}, {"window": {"sliding_window": 7}}, frozenset({"ffn biases", "hidden size"})),
    "gemma": Case({"family": "gemma", "head_dim": 8, "tied": True}, {"untied": {"tied": False}}, OWN_CLASS),
    "gemma2": Case(
        {"family": "gemma2", "head_dim": 8, "tied": True, "sliding_window": 7, "query_pre_attn_scalar": 20},
        refused=NORMS_INSIDE,
    ),
    "gemma3_text": Case(
        {"family": "gemma3_text", "head_dim": 8, "tied": True, "sliding_window": 7, "layers": 3, **GEMMA3_KINDS},
        {"untied": {"tied": False}},
        NORMS_INSIDE | {"queries and keys"},
    ),
    "arcee": Case({"family": "arcee"}, refused=OWN_CLASS | {"up_proj"}),
    "cwm": Case({"family": "cwm", "layers": 5, "sliding_window": 7, "head_dim": 8}, refused=OWN_CLASS),
    "ernie4_5": Case({"family": "ernie4_5", "head_dim": 8}, {"biases": {"use_bias": True}}, OWN_CLASS),
    "exaone4": Case(
        {"family": "exaone4", "layers": 5, "sliding_window": 7}, refused=NORMS_INSIDE | {"queries and keys"}
    ),
    "glm": Case({"family": "glm", "head_dim": 8, "attention_bias": True}, refused=OWN_CLASS),
    "glm4": Case({"family": "glm4", "head_dim": 8, "attention_bias": True}, refused=NORMS_INSIDE),
    "granite": Case(
        {"family": "granite", **GRANITE_FACTORS}, {"biases": {"attention_bias": True, "mlp_bias": True}}, OWN_CLASS
    ),
    "helium": Case({"family": "helium", "head_dim": 8}, refused=OWN_CLASS | {"heads"}),
    "hunyuan_v1_dense": Case({"family": "hunyuan_v1_dense", "head_dim": 8}, refused=OWN_CLASS | {"queries and keys"}),
    "lfm2": Case(
        {"family": "lfm2", "layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
        {
            "first-attends": {"layer_types": ["full_attention", "conv", "conv"], "conv_bias": True},
            "whole-width": {"block_auto_adjust_ff_dim": False, "tied": True, "conv_L_cache": 4},
        },
        OWN_CLASS | {"queries and keys"},
    ),
    "falcon_h1": Case(
        {"family": "falcon_h1", **STATE_SPACES},
        {"plain": {"mlp_multipliers": None, "mamba_rms_norm": True, "tied": True, "mamba_conv_bias": False}},
        OWN_CLASS | {"heads", "queries and keys"},
    ),
    "granitemoehybrid": Case(
        {
            "family": "granitemoehybrid",
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 64,
            "layer_types": ["mamba", "attention", "mamba"],
            "layers": 3,
            "mamba_n_heads": 4,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
            **GRANITE_FACTORS,
        },
        {
            "rotary": {"position_embedding_type": "rope", "layer_types": ["full_attention"] * 3, "tied": True},
            "experts": {"num_local_experts": 4, "shared_intermediate_size": 40, **EXPERTS},
        },
        OWN_CLASS,
    ),
    "lfm2_moe": Case(
        {
            "family": "lfm2_moe",
            "layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_dense_layers": 2,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 2,
            "width": 40,
        },
        {"plain": {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5, "tied": True}},
        MIXTURES | {"queries and keys"},
    ),
    "qwen3_5_moe_text": Case(
        {
            "family": "qwen3_5_moe_text",
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 24,
            "num_experts_per_tok": 2,
            **LINEAR_ATTENTION,
        },
        refused=MIXTURES | {"heads", "queries and keys"},
    ),
    "qwen3_5_text": Case(
        {"family": "qwen3_5_text", **LINEAR_ATTENTION}, refused=OWN_CLASS | {"heads", "queries and keys"}
    ),
    "qwen3_next": Case(
        {
            "family": "qwen3_next",
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 24,
            **LINEAR_ATTENTION,
            **EXPERTS,
        },
        {
            "mixed": {
                "layers": 3,
                "mlp_only_layers": [1],
                "width": 40,
                "layer_types": None,
                "full_attention_interval": 3,
            }
        },
        MIXTURES | {"heads", "queries and keys"},
    ),
    "gemma4_text": Case(
        {"family": "gemma4_text", "tied": True, "layers": 3, "head_dim": 8, "global_head_dim": 16, "sliding_window": 7}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "hidden_size_per_layer_input": 0}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 30.0},
        {
            "experts": GEMMA_EXPERTS,
            "tokens": GEMMA_TOKENS | {"layers": 5, "vocab_size_per_layer_input": 400, "use_double_wide_mlp": True},
        },
        NORMS_INSIDE | {"heads", "queries and keys", "depth"},
    ),
    "ministral": Case(
        {"family": "ministral", "sliding_window": 7, "head_dim": 8},
        {"mixed": {"layer_types": ["sliding_attention", "full_attention"]}},
        OWN_CLASS,
    ),
    "ministral3": Case({"family": "ministral3", "head_dim": 8}, refused=OWN_CLASS),
    "nemotron": Case(
        {"family": "nemotron"}, {"biases": {"attention_bias": True, "mlp_bias": True}}, LAYER_NORMS | {"up_proj"}
    ),
    "olmo2": Case({"family": "olmo2"}, refused=NORMS_INSIDE | {"heads", "queries and keys"}),
    "olmo3": Case(
        {"family": "olmo3", "layers": 5, "sliding_window": 7}, refused=NORMS_INSIDE | {"heads", "queries and keys"}
    ),
    "seed_oss": Case(
        {"family": "seed_oss", "head_dim": 8},
        {"biases": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}},
        frozenset({"ffn biases", "hidden size"}),
    ),
    "smollm3": Case(
        {"family": "smollm3", "layers": 4}, {"early": {"layers": 3, "no_rope_layers": [1, 0, 1]}}, OWN_CLASS
    ),
    "stablelm": Case({"family": "stablelm"}, {"biases": {"use_qkv_bias": True}}, LAYER_NORMS | {"heads"}),
    "starcoder2": Case({"family": "starcoder2"}, {"window": {"sliding_window": 7}}, LAYER_NORMS | {"up_proj"}),
    "qwen3_moe": Case(
        {"family": "qwen3_moe", "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 32, **EXPERTS},
        {
            "normalised": {"norm_topk_prob": True, "num_experts": 6},
            "mixed": {"layers": 3, "mlp_only_layers": [1], "width": 40},
        },
        MIXTURES | {"queries and keys"},
    ),
    "qwen2_moe": Case(
        {
            "family": "qwen2_moe",
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 24,
            **EXPERTS,
        },
        {"every-second": {"layers": 4, "decoder_sparse_step": 2, "width": 40}},
        refused=MIXTURES,
    ),
    "mixtral": Case(
        {"family": "mixtral", "num_local_experts": 4, **EXPERTS}, {"window": {"sliding_window": 7}}, MIXTURES
    ),
    "olmoe": Case({"family": "olmoe", "num_experts": 4, **EXPERTS}, refused=MIXTURES | {"heads", "queries and keys"}),
    "granitemoe": Case(
        {"family": "granitemoe", "num_local_experts": 4, **EXPERTS, **GRANITE_FACTORS}, refused=MIXTURES
    ),
    "glm4_moe": Case(
        {"family": "glm4_moe", "head_dim": 8, "layers": 3, "first_k_dense_replace": 1, "width": 40, **GLM_EXPERTS},
        {
            "groups": {"n_group": 2, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
            "norms": {"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 0, "n_shared_experts": 2},
        },
        MIXTURES,
    ),
    "deepseek_v2": Case(
        {"family": "deepseek_v2", "layers": 3, "first_k_dense_replace": 1, "width": 40, **GLM_EXPERTS, **LATENT},
        {
            "groups": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "q_lora_rank": 12},
        },
        MIXTURES | {"heads", "queries and keys"},
    ),
    "deepseek_v3": Case(
        {"family": "deepseek_v3", "layers": 3, "first_k_dense_replace": 1, "width": 40, **GLM_EXPERTS, **LATENT},
        {
            "one-group": {"n_group": 1, "topk_group": 1, "q_lora_rank": 12, "attention_bias": True},
        },
        MIXTURES | {"heads", "queries and keys"},
    ),
    "glm4_moe_lite": Case(
        {"family": "glm4_moe_lite", "layers": 3, "width": 40, **GLM_EXPERTS, **LATENT, "q_lora_rank": 12, "n_group": 1},
        {"mixed": {"mlp_layer_types": ["sparse", "dense", "sparse"], "routed_scaling_factor": 1.8}},
        MIXTURES | {"heads", "queries and keys"},
    ),
    "minimax_m2": Case(
        {"family": "minimax_m2", "head_dim": 8, "num_local_experts": 4, "rotary_dim": 4, **EXPERTS},
        refused=MIXTURES | {"heads", "queries and keys"},
    ),
    "dots1": Case(
        {"family": "dots1", "head_dim": 8, "layers": 3, "first_k_dense_replace": 1, "width": 40, **GLM_EXPERTS}
        | {"n_shared_experts": 1, "sliding_window": 7, "max_window_layers": 1},
        refused=MIXTURES | {"queries and keys"},
    ),
    "solar_open": Case({"family": "solar_open", "head_dim": 8, **GLM_EXPERTS}, refused=MIXTURES),
    "gpt_oss": Case(
        {"family": "gpt_oss", "head_dim": 8, "num_local_experts": 4, "sliding_window": 7, **EXPERTS},
        refused=MIXTURES | {"heads"},
    ),
    "cohere": Case(
        {"family": "cohere", "tied": True, "logit_scale": 0.5}, {"biases": {"attention_bias": True}}, PARALLEL
    ),
    "cohere2": Case({"family": "cohere2", "tied": True, "layers": 4, "sliding_window": 7}, refused=PARALLEL),
    "phi": Case({"family": "phi"}, refused=PARALLEL),
    "gpt_neox": Case({"family": "gpt_neox"}, {"after": {"use_parallel_residual": False}}, PARALLEL | {"heads"}),
    "falcon": Case({"family": "falcon", "tied": True}, {"biases": {"bias": True}}, PARALLEL | {"heads"}),
    "gpt2": Case({"family": "gpt2", "tied": True}, {"untied": {"tied": False}}, LAYER_NORMS | {"up_proj", "heads"}),
    "gpt_bigcode": Case(
        {"family": "gpt_bigcode", "tied": True}, refused=LAYER_NORMS | {"up_proj", "heads", "queries and keys"}
    ),
    "opt": Case(
        {"family": "opt", "groups": 4},
        {"tied": {"tied": True}, "long": {"layers": 3}},
        frozenset({"heads", "up_proj", "embedding ranks"}),
    ),
    "bert": Case({"family": "bert", "groups": 4, "model_class": "BertModel"}, refused=ENCODER_REFUSALS, packed=False),
    "distilbert": Case(
        {"family": "distilbert", "groups": 4, "model_class": "DistilBertModel"}, refused=ENCODER_REFUSALS, packed=False
    ),
    "roberta": Case(
        {"family": "roberta", "groups": 4, "model_class": "RobertaModel"}, refused=STOCK_ENCODERS, packed=False
    ),
    "xlm-roberta": Case(
        {"family": "xlm-roberta", "groups": 4, "model_class": "XLMRobertaModel"}, refused=STOCK_ENCODERS, packed=False
    ),
    "camembert": Case(
        {"family": "camembert", "groups": 4, "model_class": "CamembertModel"}, refused=STOCK_ENCODERS, packed=False
    ),
    "electra": Case(
        {"family": "electra", "groups": 4, "model_class": "ElectraModel"}, refused=STOCK_ENCODERS, packed=False
    ),
    "modernbert": Case(
        {"family": "modernbert", "groups": 4, "model_class": "ModernBertModel", "layers": 4, "local_attention": 6},
        refused=(STOCK_ENCODERS | {"profile", "latency", "queries and keys"}) - {"up_proj"},
        packed=False,
    ),
    "t5": Case({"gated": False, "tied": True}, refused=T5_REFUSALS, packed=False, build=build_t5),
}
WRAPPER_REFUSALS: dict[str, frozenset[Feature]] = {
    "gemma3": frozenset({"up_proj", "queries and keys"}),
    "gemma4": frozenset({"up_proj", "heads", "queries and keys"}),
    "glm4v": frozenset({"up_proj", "heads"}),
    "lfm2_vl": frozenset({"queries and keys"}),
    "qwen2_vl": frozenset({"heads"}),
    "qwen2_5_vl": frozenset({"heads"}),
    "qwen3_vl": frozenset({"queries and keys"}),
    "qwen3_5": frozenset({"heads", "queries and keys"}),
    "qwen3_5_moe": MIXTURES | {"heads", "queries and keys"},
}
CASES |= {
    name: Case(
        {"family": name},
        refused=STOCK_ONLY | {"depth"} | WRAPPER_REFUSALS.get(name, set()),
        packed=False,
        build=build_wrapper,
    )
    for name in WRAPPERS
}

# Classes of decoders without a head, or with another one than for the next token.
OTHER_CLASSES: dict[str, dict[str, Any]] = {
    "llama-headless": {"model_class": "AutoModel"},
    "qwen3_moe-headless": {**CASES["qwen3_moe"].options, "model_class": "AutoModel"},
    "gemma3_text-headless": {**CASES["gemma3_text"].options, "model_class": "AutoModel"},
    "qwen3-classifier": {
        "family": "qwen3",
        "head_dim": 8,
        "model_class": "AutoModelForSequenceClassification",
        "num_labels": 1,
    },
    "qwen2-tokens": {"family": "qwen2", "model_class": "AutoModelForTokenClassification", "num_labels": 3},
}


def decoders() -> Iterator[str]:
    """Yield the families whose text is packed."""
    return (name for name, case in CASES.items() if case.packed)


def variants() -> dict[str, dict[str, Any]]:
    """Return the options of `build_model` for every variant of every decoder, by names such as `llama-biases`."""
    listed = {}
    for name in decoders():
        case = CASES[name]
        listed[name] = case.options
        listed |= {f"{name}-{variant}": case.options | further for variant, further in case.variants.items()}
    return listed
