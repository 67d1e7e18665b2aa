"""Mixtures of experts that differ from another one in a few lines, in one table."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oneshot.architecture import Attention, Description, Experts
from oneshot.families.deepseek import DEEPSEEK_V3
from oneshot.families.deepseek import variant as deepseek_variant
from oneshot.families.glm4_moe import EXPERTS, GLM4_MOE, routed
from oneshot.families.llama import STACK
from oneshot.families.llamas import HEAD_NORMS
from oneshot.families.mixtures import MIXTRAL, SIZES, number_of_layers


def without_dense_layers(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the gates that a config states; its class has no dense layers."""
    return routed(family, config | {"first_k_dense_replace": 0})


SPARSE, DENSE = "sparse", "dense"


def with_stated_layers(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the queries and gates that a config states, and its dense layers: by default the first."""
    stated = config.get("mlp_layer_types")
    types = stated if isinstance(stated, list) else [DENSE]
    dense = (number for number, one in enumerate(types[: number_of_layers(config)]) if one != SPARSE)
    return replace(deepseek_variant(family, config), dense_layers=tuple(dense))


def named_layers(flags: Sequence[bool]) -> dict[str, Any]:
    """Return what a config states of layers that are dense where the flags say so."""
    return {"mlp_layer_types": [DENSE if is_dense else SPARSE for is_dense in flags]}


# experts with biases and a clamped activation, whose gates and ups are in turns in the stock class and whose matrices
# are (inputs, outputs); attention with a sink for every head; only dequantised weights are read
GPT_OSS = Description(
    "gpt_oss",
    STACK.with_attention(Attention(sinks="self_attn.sinks")).with_experts(
        Experts(router="mlp.router", router_bias="mlp.router.bias", alternating=True, stored_linears=None)
    ),
    sizes=SIZES,
)
# dots.llm1: DeepSeek-V3's experts with the attention of Qwen3
DOTS1 = replace(GLM4_MOE, model_type="dots1", stack=GLM4_MOE.stack.with_attention(HEAD_NORMS), variant=routed)
# Solar Open: GLM-4-MoE's experts in every layer, with Llama's attention
SOLAR_OPEN = replace(
    GLM4_MOE,
    model_type="solar_open",
    variant=without_dense_layers,
    sizes=replace(GLM4_MOE.sizes, dense_width=None),
    with_dense=lambda flags: {},
)
# MiniMax-M2: Mixtral's experts, sigmoid gates with a bias that chooses, and norms over all queries and all keys
_MIXTRAL_EXPERTS = MIXTRAL.stack.experts
assert _MIXTRAL_EXPERTS is not None
MINIMAX_M2 = replace(
    MIXTRAL,
    model_type="minimax_m2",
    stack=MIXTRAL.stack.with_attention(replace(HEAD_NORMS, norms_all_heads=True)).with_experts(
        replace(_MIXTRAL_EXPERTS, scores="sigmoid", chosen_by="mlp.e_score_correction_bias")
    ),
)
# Mistral 4: DeepSeek's attention, and experts whose gates are a softmax; it is inside models of images and text
MISTRAL4 = replace(
    DEEPSEEK_V3,
    model_type="mistral4",
    stack=DEEPSEEK_V3.stack.with_experts(replace(EXPERTS, scores="softmax", chosen_by=None)),
    further=None,
)
# GLM-4.7-Flash: GLM-4-MoE's experts with DeepSeek's attention; the config names the layers that have experts
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    variant=with_stated_layers,
    # vLLM reads the second; llama.cpp takes the gates of other numbers of layers for a softmax without the third
    with_dense=lambda flags: named_layers(flags) | {"first_k_dense_replace": sum(flags), "scoring_func": "sigmoid"},
)
