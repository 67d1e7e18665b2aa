"""Mixtures of experts with Llama's layer around them: Qwen3-MoE, Qwen2-MoE, Mixtral, OLMoE and Granite-MoE."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from oneshot.errors import CheckpointError
from oneshot.families.description import Description, Sizes
from oneshot.families.experts import Experts
from oneshot.families.granite import variant as granite_variant
from oneshot.families.llama import STACK
from oneshot.families.shapes import ModelShape
from oneshot.families.stack import Stack
from oneshot.families.sublayers import Attention

SIZES = Sizes(num_experts=("num_experts", "num_local_experts"), experts_per_token="num_experts_per_tok")


def resize(width: str) -> Callable[[dict[str, Any], ModelShape], dict[str, Any]]:
    """Return the `resize` of a family whose config states the width of an expert under this key."""

    def resized(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
        assert shape.experts is not None
        return (
            config
            | {
                width: shape.intermediate_size,
                "num_attention_heads": shape.num_attention_heads,
                "num_key_value_heads": shape.num_key_value_heads,
                "head_dim": shape.head_dim,
            }
            | {name: shape.experts.count for name in SIZES.num_experts if name in config}
        )

    return resized


def refuse_dense_layers(config: dict[str, Any]) -> None:
    """Raise `CheckpointError` for a model some of whose layers have one FFN instead of experts."""
    step = config.get("decoder_sparse_step", 1)
    if config.get("mlp_only_layers") or step != 1:
        stated = f"mlp_only_layers {config['mlp_only_layers']}" if step == 1 else f"decoder_sparse_step {step}"
        raise CheckpointError(
            f"config.json states {stated[:100]}, so some layers have no experts, which is not supported; give a model "
            "whose layers all have experts."
        )


def by_config(family: Description, config: dict[str, Any]) -> Description:
    """Return the family whose gates are renormalised if the config says so."""
    experts = family.stack.experts
    assert experts is not None
    renormalises = bool(config.get("norm_topk_prob", False))
    return replace(family, stack=family.stack.with_experts(replace(experts, renormalises=renormalises)))


def _stack(attention: Attention, experts: Experts) -> Stack:
    first, second = STACK.sublayers
    return replace(STACK, sublayers=(replace(first, mixer=attention), replace(second, mixer=experts)))


QWEN3_MOE = Description(
    "qwen3_moe",
    _stack(Attention(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"), Experts()),
    resize("moe_intermediate_size"),
    check=refuse_dense_layers,
    variant=by_config,
    sizes=replace(SIZES, intermediate_size="moe_intermediate_size"),
)
QWEN2_MOE = Description(
    "qwen2_moe",
    _stack(Attention(), Experts(shared_expert="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")),
    resize("moe_intermediate_size"),
    check=refuse_dense_layers,
    variant=by_config,
    sizes=replace(
        SIZES, intermediate_size="moe_intermediate_size", shared_expert_width="shared_expert_intermediate_size"
    ),
)
MIXTRAL = Description(
    "mixtral",
    _stack(Attention(), Experts(stored_linears=("w1", "w3", "w2"), stored_names={"mlp.": "block_sparse_moe."})),
    resize("intermediate_size"),
    sizes=SIZES,
)
OLMOE = Description(
    "olmoe",
    _stack(Attention(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", norms_all_heads=True), Experts()),
    resize("intermediate_size"),
    variant=by_config,
    sizes=SIZES,
)
GRANITE_MOE = Description(
    "granitemoe",
    _stack(
        Attention(),
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
        ),
    ),
    resize("intermediate_size"),
    variant=granite_variant,
    sizes=SIZES,
)
