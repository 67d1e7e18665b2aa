"""Mixtures of experts with Llama's layer around them: Qwen3-MoE, Qwen2-MoE, Mixtral, OLMoE and Granite-MoE."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oneshot.architecture import Description, Experts, Sizes
from oneshot.errors import CheckpointError
from oneshot.families.llama import STACK
from oneshot.families.llamas import HEAD_NORMS, granite_factors

MOST_LAYERS = 10_000
SIZES = Sizes(num_experts=("num_experts", "num_local_experts"), experts_per_token="num_experts_per_tok")


def by_config(family: Description, config: dict[str, Any]) -> Description:
    """Return the family whose gates are renormalised if the config says so."""
    experts = family.stack.experts
    assert experts is not None
    renormalises = bool(config.get("norm_topk_prob", False))
    return replace(family, stack=family.stack.with_experts(replace(experts, renormalises=renormalises)))


def with_stated_layers(family: Description, config: dict[str, Any]) -> Description:
    """Return the family as Qwen's configs describe it: experts in every n-th layer, but for those that are named."""
    step, without = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(step, int) or isinstance(step, bool) or step < 1 or not isinstance(without, list):
        raise CheckpointError(
            f"config.json states decoder_sparse_step {repr(step)[:100]} and mlp_only_layers {repr(without)[:100]}, "
            "which do not say what layers have experts; give a complete checkpoint."
        )
    numbers = range(number_of_layers(config))
    dense = tuple(number for number in numbers if number in without or (number + 1) % step)
    return replace(by_config(family, config), dense_layers=dense)


def number_of_layers(config: dict[str, Any]) -> int:
    """Return the layers that a config states, and 0 if that is not a number, which is refused elsewhere."""
    layers = config.get("num_hidden_layers")
    return layers if isinstance(layers, int) and 0 < layers < MOST_LAYERS else 0


def named_layers(flags: Sequence[bool]) -> dict[str, Any]:
    """Return what a config of Qwen states of layers that are dense where the flags say so."""
    return {"decoder_sparse_step": 1, "mlp_only_layers": [number for number, is_dense in enumerate(flags) if is_dense]}


QWEN3_MOE = Description(
    "qwen3_moe",
    STACK.with_attention(HEAD_NORMS).with_experts(Experts()),
    variant=with_stated_layers,
    with_dense=named_layers,
    sizes=replace(SIZES, intermediate_size="moe_intermediate_size", dense_width="intermediate_size"),
)
QWEN2_MOE = Description(
    "qwen2_moe",
    STACK.with_experts(Experts(shared_expert="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")),
    variant=with_stated_layers,
    with_dense=named_layers,
    sizes=replace(
        SIZES,
        intermediate_size="moe_intermediate_size",
        dense_width="intermediate_size",
        shared_expert_width="shared_expert_intermediate_size",
    ),
)
MIXTRAL = Description(
    "mixtral",
    STACK.with_experts(Experts(stored_linears=("w1", "w3", "w2"), stored_names={"mlp.": "block_sparse_moe."})),
    sizes=SIZES,
)
OLMOE = Description(
    "olmoe",
    STACK.with_attention(replace(HEAD_NORMS, norms_all_heads=True)).with_experts(Experts()),
    variant=by_config,
    sizes=SIZES,
)
GRANITE_MOE = Description(
    "granitemoe",
    STACK.with_experts(
        Experts(
            module="block_sparse_moe",
            router="block_sparse_moe.router",
            experts="block_sparse_moe.experts",
            stored_linears=None,
            stored_names={
                "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
                "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
                "block_sparse_moe.router.": "block_sparse_moe.router.layer.",
            },
        )
    ),
    variant=granite_factors,
    sizes=SIZES,
)
