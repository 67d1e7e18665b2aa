"""GLM-4.5 and later: mixtures with dense first layers, sigmoid gates, a shared expert, and a bias that chooses.

`e_score_correction_bias` is added to the scores by which a token's experts are chosen, and not to their gates. If the
experts are in groups, a token's come from the best groups.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oneshot.architecture import BEHIND, Description, Experts, Feature, Sizes
from oneshot.families.llama import STACK
from oneshot.families.llamas import HEAD_NORMS
from oneshot.families.mixtures import number_of_layers

IN_GROUPS = (
    "The experts of this {} are in {} groups, of which none can be removed alone; leave out --set experts=, so that "
    "neurons go."
)
SIZES = Sizes(
    intermediate_size="moe_intermediate_size",
    dense_width="intermediate_size",
    num_experts=("n_routed_experts", "num_local_experts", "num_experts"),  # some classes read the others as the first
    experts_per_token="num_experts_per_tok",
    shared_experts="n_shared_experts",
)
EXPERTS = Experts(shared_expert="mlp.shared_experts", scores="sigmoid", chosen_by="mlp.gate.e_score_correction_bias")


def routed(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the gates, the groups and the dense layers that a config states."""
    experts = family.stack.experts
    assert experts is not None
    experts = replace(
        experts,
        renormalises=bool(config.get("norm_topk_prob", False)),
        scale=float(config.get("routed_scaling_factor") or 1.0),
    )
    groups, dense = config.get("n_group") or 1, config.get("first_k_dense_replace") or 0
    refused: dict[Feature, str] = {} if groups == 1 else {"experts": IN_GROUPS.format(family.model_type, groups)}
    return replace(
        family,
        stack=family.stack.with_experts(experts),
        dense_layers=tuple(range(min(dense, number_of_layers(config)))),
        unsupported={**family.unsupported, **refused},
    )


def dense_first(flags: Sequence[bool]) -> dict[str, Any]:
    """Return what a config states if the first layers are dense."""
    return {"first_k_dense_replace": sum(flags)}


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the norms of queries and keys that a config states."""
    known = routed(family, config)
    if not config.get("use_qk_norm"):
        return known
    return replace(known, stack=known.stack.with_attention(HEAD_NORMS))


GLM4_MOE = Description(
    "glm4_moe", STACK.with_experts(EXPERTS), variant=variant, sizes=SIZES, with_dense=dense_first, further=BEHIND
)
