"""DeepSeek-V2 and V3: GLM-4-MoE's experts, and attention with a latent, which stays as it is."""

from dataclasses import replace
from typing import Any

from oneshot.architecture import BEHIND, Attention, Description, Stack, set_width
from oneshot.errors import CheckpointError
from oneshot.families.glm4_moe import EXPERTS, SIZES, dense_first, routed
from oneshot.families.llama import STACK

CHOICES = ("greedy", "group_limited_greedy")  # of experts in V2
DEEPSEEK_SIZES = replace(SIZES, head_dim="v_head_dim")


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the gates, groups, dense layers and queries that a config states."""
    known = routed(family, config)
    return replace(known, stack=_with_attention(known.stack, "q_a_proj" if config.get("q_lora_rank") else "q_proj"))


def variant_of_v2(family: Description, config: dict[str, Any]) -> Description:
    """Return V2, whose gates are a softmax over all experts as it is, and whose groups count only if it says so."""
    method = config.get("topk_method", CHOICES[0])
    if method not in CHOICES:
        raise CheckpointError(
            f"config.json states topk_method {repr(method)[:100]}, which transformers does not have for deepseek_v2; "
            f"give a model with one of {', '.join(CHOICES)}."
        )
    groups = {} if method == "group_limited_greedy" else {"n_group": 1}
    return variant(family, config | groups | {"norm_topk_prob": False})


def _with_attention(stack: Stack, queries: str) -> Stack:
    latent = "self_attn.kv_a_proj_with_mqa"
    return stack.with_attention(Attention(q=f"self_attn.{queries}", k=latent, v=latent, latent=True))


DEEPSEEK_V3 = Description(
    "deepseek_v3",
    _with_attention(STACK.with_experts(EXPERTS), "q_a_proj"),
    set_width,  # its attention stays
    variant=variant,
    sizes=DEEPSEEK_SIZES,
    with_dense=dense_first,
    further=BEHIND,
)
DEEPSEEK_V2 = Description(
    "deepseek_v2",
    _with_attention(STACK.with_experts(replace(EXPERTS, scores="softmax", chosen_by=None)), "q_a_proj"),
    set_width,  # its attention stays
    variant=variant_of_v2,
    sizes=DEEPSEEK_SIZES,
    with_dense=dense_first,
)
