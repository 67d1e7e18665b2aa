"""What other engines open in these tests: random models by their options, and how each is compressed.

`docs/supported-models.md` has the list by engine and model type.
"""

from collections.abc import Callable, Iterable
from typing import Any

from rotary import LLAMA3_ROTARY

Sizes = dict[str, Any]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
QWEN3 = {"family": "qwen3_moe", "head_dim": 32, "num_experts": 8, "norm_topk_prob": True, **EXPERTS}
GLM4 = {"family": "glm4_moe", "head_dim": 32, "n_routed_experts": 8, "first_k_dense_replace": 1, **EXPERTS}
NEURONS = {"intermediate_size": 64}


def ranked(layer: Sizes) -> bool:
    """Return whether linears of a layer have low rank."""
    return bool(layer["output_rank"] and layer["query_key_rank"])


# every form with sizes by layer
BY_LAYER_CASES: dict[str, tuple[Sizes, Sizes]] = {
    "biases": ({"attention_bias": True, "mlp_bias": True}, {}),
    "untied, large heads": ({"head_dim": 64}, {}),
    "tied, a layer left out": ({"tied": True}, {"depth": "sensitivity", "sparsity": 0.45}),
    "qwen2": ({"family": "qwen2"}, {}),
    "sublayers left out": ({}, {"depth": "sublayers", "round_to": 4, "sparsity": 0.3}),
}
ALL, WINDOWED = "full_attention", "sliding_attention"
GEMMA: Sizes = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 12}
# families whose layers keep equal sizes in a GGUF file
EQUAL_LAYERS: dict[str, Sizes] = {
    "qwen2": {"family": "qwen2"},
    "qwen2, rotary of llama3": {"family": "qwen2", "rope_parameters": LLAMA3_ROTARY},
    "qwen3": {"family": "qwen3", "head_dim": 32},
    "gemma": {"family": "gemma", "head_dim": 32},
    "gemma2": {"family": "gemma2", **GEMMA},
    "gemma3": {"family": "gemma3_text", **GEMMA, "layers": 7},
    "gemma3, other windows": {"family": "gemma3_text", **GEMMA, "layer_types": [ALL, WINDOWED, WINDOWED, ALL]},
    "gemma3, no windows": {"family": "gemma3_text", **GEMMA, "layer_types": [ALL] * 4},
    "gemma3, capped": {"family": "gemma3_text", **GEMMA, "final_logit_softcapping": 2.0},
}
MIXTURES: dict[str, tuple[Sizes, Sizes]] = {
    "qwen3_moe, neurons": (QWEN3, NEURONS),
    "qwen3_moe, experts": (QWEN3, {"experts": "effects", "num_experts": 6, "ffn": "none"}),
    "qwen3_moe, a dense layer": (QWEN3 | {"mlp_only_layers": [1]}, NEURONS),
    "mixtral, neurons": ({"family": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}, NEURONS),
    "gpt_oss, both": (
        {"family": "gpt_oss", "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
        NEURONS | {"experts": "reap", "num_experts": 6},
    ),
    "glm4_moe, both": (GLM4, NEURONS | {"experts": "reap", "num_experts": 6}),
}
# also what is true of one of the result's layers
PLUGIN_CASES: dict[str, tuple[Sizes, Sizes, Callable[[Sizes], bool]]] = {
    "ranks, biases": ({"attention_bias": True, "mlp_bias": True}, {}, ranked),
    "no ranks, rotary of llama3": (
        {"rope_parameters": LLAMA3_ROTARY},
        {"ranks": "none"},
        lambda layer: layer["intermediate_size"] < 192 and not ranked(layer),
    ),
    "ranks of the embedding": (
        {"tied": True, "vocabulary": 4000},
        {"embedding": "auto", "sparsity": 0.3},
        ranked,
    ),
    "ranks of two tables": ({"vocabulary": 4000}, {"embedding": "auto", "sparsity": 0.5}, ranked),
    "one KV head, ranks": ({"groups": 1, "attention_bias": True}, {}, ranked),
    "qwen2": ({"family": "qwen2", "tied": True}, {}, ranked),
    "qwen3": ({"family": "qwen3", "head_dim": 32}, {}, ranked),
    "phi3": ({"family": "phi3"}, {}, ranked),
    "fewer heads": (
        {"heads": 8, "groups": 4, "head_dim": 32},
        {"heads": "id", "head_unit": "kv-group", "sparsity": 0.4},
        lambda layer: layer["num_attention_heads"] < 8,
    ),
    "sublayers left out": (
        {},
        {"depth": "sublayers", "round_to": 4, "sparsity": 0.3},
        lambda layer: layer["num_attention_heads"] == 0 and layer["intermediate_size"] > 0,
    ),
    "no attention first": (
        {},
        {"depth": "sublayers", "round_to": 4, "sparsity": 0.3},
        lambda layer: layer["num_attention_heads"] == 0 and layer["intermediate_size"] > 0,
    ),
    "sizes inside heads": (
        {},
        {"query_key_size": 20, "value_size": 12},
        lambda layer: layer["rotary_selected"] and layer["value_size"] == 12,
    ),
    "subspaces": (
        {"tied": True},
        {"recipe": "group-pca", "group_size": 1, "hidden_size": 96, "sparsity": None},
        lambda layer: layer["attention_shortcut"] and layer["ffn_shortcut"],
    ),
    "opt": ({"family": "opt", "groups": 4, "tied": True}, {}, lambda layer: not layer["gated"] and layer["mlp_bias"]),
}
# variants of families whose layers are not Llama's, and how each is compressed
NO_RANKS, FEWER_HEADS = "gemma3_text, no ranks", "granite, fewer heads"
RESIZED_CASES: dict[str, tuple[str, Sizes]] = {
    **{
        name: (name, {})
        for name in (
            *("gemma2", "gemma3_text", "olmo2", "exaone4", "glm4", "granite", "smollm3", "hunyuan_v1_dense"),
            *("mistral-window", "qwen2-windows", "cohere2", "phi", "gpt_neox", "stablelm", "nemotron"),
        )
    },
    "gemma3_text, ranks of the embedding": ("gemma3_text", {"embedding": "auto", "sparsity": 0.3}),
    "gemma3_text, ranks of two tables": ("gemma3_text", {"embedding": "auto", "sparsity": 0.5}),
    NO_RANKS: ("gemma3_text", {"ranks": "none"}),  # opened without the plugin
    FEWER_HEADS: ("granite", {"heads": "id", "sparsity": 0.3}),  # refused
}
# mixtures whose layers have their own sizes
MIXTURE_FAMILIES: dict[str, Sizes] = {
    "qwen3_moe": QWEN3,
    "mixtral": {"family": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"family": "olmoe", "num_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"family": "qwen2_moe", "num_experts": 8, "shared_expert_intermediate_size": 64, **EXPERTS},
    "granitemoe": {"family": "granitemoe", "num_local_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": GLM4,
    "gpt_oss": {"family": "gpt_oss", "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
}
SHARED_EXPERTS = "qwen2_moe, own numbers of experts, no ranks"  # also opened by two processes
OWN_NUMBERS: dict[str, tuple[Sizes, Sizes]] = {
    "qwen3_moe, own numbers of experts alone": (QWEN3, {"experts": "effects", "ffn": "none"}),
    SHARED_EXPERTS: (MIXTURE_FAMILIES["qwen2_moe"], {"experts": "effects", "ranks": "none"}),
    **{
        f"{name}, own numbers of experts": (options, {"experts": "effects", "sparsity": 0.3})
        for name, options in MIXTURE_FAMILIES.items()
    },
}
MIXTURES_BY_LAYER: dict[str, tuple[Sizes, Sizes]] = {
    **{name: (options, {}) for name, options in MIXTURE_FAMILIES.items()},
    "qwen3_moe, a dense layer, no ranks": (QWEN3 | {"mlp_only_layers": [1]}, {"ranks": "none"}),
    "qwen3_moe, fewer experts": (QWEN3, {"experts": "effects", "num_experts": 6, "sparsity": 0.3}),
    **OWN_NUMBERS,
}
LATENT: Sizes = {"kv_lora_rank": 512, "q_lora_rank": None, "v_head_dim": 128, "n_group": 1, "topk_group": 1}
LATENT |= {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "groups": 4, "n_shared_experts": 1}
# families whose layers for further tokens draft
FURTHER: dict[str, Sizes] = {
    "glm4_moe": GLM4,
    "deepseek_v3": {"family": "deepseek_v3", "n_routed_experts": 8, "first_k_dense_replace": 1, **EXPERTS, **LATENT},
}
SERVED = "llama"  # SmolLM2
# methods of a tool, and the forms of a Llama that it takes
QUANTISERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llm-compressor": (
        ("gptq", "awq", "gptq-w8a8", "smoothquant", "fp8"),
        ("stock", "nemotron-nas", "per-layer"),
    ),
    "torchao": (("torchao-int8", "torchao-int4"), ("stock", "nemotron-nas", "per-layer")),
    "bitsandbytes": (("bitsandbytes-int8", "bitsandbytes-nf4"), ("stock", "nemotron-nas", "per-layer")),
}


def opened() -> list[tuple[str, str, list[str]]]:
    """Return engines, the form that each opens, and the model types of the results that were compressed for it."""

    def families(cases: Iterable[tuple[Any, ...]], *further: str) -> list[str]:
        return sorted({options.get("family", "llama") for options, *_ in cases} | {*further})

    by_layer = BY_LAYER_CASES.values()
    resized = {variant.partition("-")[0] for variant, _ in RESIZED_CASES.values()}
    resized |= {options["family"] for options, _ in MIXTURES_BY_LAYER.values()}
    return [
        ("vLLM", "stock", families(MIXTURES.values(), SERVED)),
        ("vLLM", "nemotron-nas", families(by_layer, SERVED)),
        ("vLLM with the plugin", "per-layer", families(PLUGIN_CASES.values(), *resized)),
        ("vLLM's Transformers backend", "per-layer", families(by_layer, SERVED)),
        ("llama.cpp", "gguf", families([*by_layer, *((each,) for each in EQUAL_LAYERS.values())], SERVED)),
        *((tool, ", ".join(forms), ["llama"]) for tool, (_, forms) in QUANTISERS.items()),
    ]
