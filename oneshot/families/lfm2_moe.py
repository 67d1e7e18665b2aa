"""LFM2-MoE: LFM2's mixers before experts, whose gates are sigmoids; its first layers have one FFN."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oneshot.architecture.carried import carried_layers
from oneshot.architecture.description import Description, Sizes
from oneshot.architecture.experts import Experts
from oneshot.families.lfm2 import FFN, LFM2, STACK
from oneshot.families.mixtures import number_of_layers

EXPERTS = Experts(
    module="feed_forward",
    router="feed_forward.gate",
    experts="feed_forward.experts",
    scores="sigmoid",
    chosen_by="feed_forward.expert_bias",
    stored_linears=("w1", "w3", "w2"),
)
DENSE = "num_dense_layers"


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the convolutions, the gates and the dense layers that a config states."""
    experts = replace(
        EXPERTS,
        renormalises=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor") or 1.0),
        chosen_by=EXPERTS.chosen_by if config.get("use_expert_bias", True) else None,
    )
    dense = config.get(DENSE)
    return replace(
        family,
        stack=family.stack.with_experts(experts),
        carried_layers=carried_layers(config, family.mixers),
        dense_layers=tuple(range(min(dense, number_of_layers(config)) if isinstance(dense, int) else 0)),
    )


def dense_first(flags: Sequence[bool]) -> dict[str, Any]:
    """Return what a config states if the first layers are dense."""
    return {DENSE: sum(flags)}


LFM2_MOE = Description(
    "lfm2_moe",
    replace(STACK.with_experts(EXPERTS), dense_ffn=FFN),
    variant=variant,
    with_dense=dense_first,
    sizes=Sizes(
        intermediate_size="moe_intermediate_size",
        dense_width="intermediate_size",
        num_experts=("num_experts",),
        experts_per_token="num_experts_per_tok",
        norm_epsilon="norm_eps",
    ),
    mixers=LFM2.mixers,
)
