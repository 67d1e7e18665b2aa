"""StableLM: the Llama layer with LayerNorms; heads are as wide as the hidden size."""

from dataclasses import replace
from typing import Any

from oneshot.errors import CheckpointError
from oneshot.families.description import Description, Sizes
from oneshot.families.llama import STACK
from oneshot.families.resizing import FIXED_HEADS_ALONE, set_ffn_width
from oneshot.families.sublayers import Norm


def check(config: dict[str, Any]) -> None:
    """Refuse sublayers beside each other, and norms of every head with weights of its own."""
    if config.get("use_parallel_residual") or config.get("qk_layernorm"):
        raise CheckpointError(
            "This StableLM has attention beside the FFN or norms of queries and keys, which is not supported; give "
            "one without them."
        )


STABLELM = Description(
    "stablelm",
    replace(
        STACK,
        sublayers=tuple(replace(each, before=Norm(each.norm.name, "layer")) for each in STACK.sublayers),
        final_norm=Norm("model.norm", "layer"),
    ),
    set_ffn_width("intermediate_size"),
    check,
    sizes=Sizes(head_dim=None, norm_epsilon="layer_norm_eps"),
    unsupported={"heads": FIXED_HEADS_ALONE.format("stablelm")},
)
