"""Gemma 4 for text: attention whose heads differ by layer, which is carried, a norm inside the FFN's branch, and a
number that multiplies the stream after every layer.

The mixture has experts beside the FFN, which stays as it is. The small models (E2B, E4B) read a row of a table for the
token in every layer. Their last layers have no keys and values: they read the keys and values of the last layer
before them whose attention is of their type, and in the E2B their FFNs are twice as wide as the others.
"""

from dataclasses import replace
from typing import Any

from oneshot.architecture.carried import Carried
from oneshot.architecture.description import Description, Sizes
from oneshot.architecture.experts import Branches, Experts
from oneshot.architecture.resizing import set_width
from oneshot.architecture.shapes import ModelShape
from oneshot.architecture.stack import Stack
from oneshot.architecture.sublayers import FeedForward, Norm, Sublayer
from oneshot.architecture.token_inputs import TokenInputs
from oneshot.errors import CheckpointError
from oneshot.families.llamas import scaled_embedding

WINDOWS = Carried(
    "attention within windows", "self_attn.o_proj", attends=True, head_norm="self_attn.q_norm", keys="self_attn.k_proj"
)
ATTENTION = replace(WINDOWS, title="attention")
LENDING = ", whose keys and values later layers read"
BORROWING = ", with keys and values of an earlier layer"
TOKEN_WIDTH, BORROWERS = "hidden_size_per_layer_input", "num_kv_shared_layers"
STOCK_TOKEN_WIDTH = 256  # of the stock class where a config does not state it
EXPERTS = Experts(
    module="experts",
    router="router.proj",
    experts="experts",
    shared_expert="mlp",
    expert_scale="router.per_expert_scale",
    branches=Branches(
        "router",
        "router.scale",
        experts_before="pre_feedforward_layernorm_2",
        after="post_feedforward_layernorm_2",
        shared_after="post_feedforward_layernorm_1",
    ),
    stored_linears=None,
)
SIZES = Sizes(
    intermediate_size="moe_intermediate_size",
    num_experts=("num_experts",),
    experts_per_token="top_k_experts",
    shared_expert_width="intermediate_size",
)


def check(config: dict[str, Any]) -> None:
    """Refuse models that see later tokens, and what no Gemma 4 has."""
    if config.get("use_bidirectional_attention") == "all":
        raise CheckpointError("This Gemma 4 attends in both directions, which is not supported; give one that writes.")
    if config.get(BORROWERS) and not _token_width(config):
        raise CheckpointError(
            f"This Gemma 4 has layers that share keys and values ({BORROWERS}) and no embedding of the token in every "
            "layer, which the class of transformers cannot run; give another one."
        )
    if config.get("enable_moe_block") and _token_width(config):
        raise CheckpointError(
            "This Gemma 4 has experts and an embedding of the token in every layer, which is not supported; give "
            "another one, such as the 26B-A4B."
        )
    rows = config.get("vocab_size_per_layer_input")
    if _token_width(config) and isinstance(rows, int) and rows < (config.get("vocab_size") or 0):
        raise CheckpointError(
            f"This Gemma 4 has an embedding of the token in every layer for {rows} tokens of "
            f"{config['vocab_size']} alone, which is not supported; give another one."
        )


def _token_width(config: dict[str, Any]) -> int:
    """Return how many numbers of its token every layer reads; 0 for none."""
    width = config.get(TOKEN_WIDTH, STOCK_TOKEN_WIDTH)
    return width if isinstance(width, int) and width > 0 else 0


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with its factor of the embedding, bound of logits, types of layers, and experts."""
    known = replace(scaled_embedding(family, config), head_cap=config.get("final_logit_softcapping"))
    known = replace(known, carried_layers=_carried(config, family))
    if width := _token_width(config):
        known = replace(known, stack=replace(known.stack, token_inputs=TokenInputs(width)))
    unused = tuple(
        f"{known.layer_prefix(layer)}self_attn.{name}"
        for layer in known.carried_layers
        if known.borrows(layer)
        for name in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    )
    known = replace(known, unused_prefixes=unused)
    if unused and config.get("use_double_wide_mlp"):
        narrow = tuple(layer for layer in range(len(config["layer_types"])) if not known.borrows(layer))
        known = replace(known, narrow_layers=narrow, stated_width=_double_width, resize=_with_half_width)
    if not config.get("enable_moe_block"):
        return known
    return replace(known, stack=known.stack.with_experts(EXPERTS), sizes=SIZES)


def _carried(config: dict[str, Any], family: Description) -> dict[int, Carried]:
    """Return the carried mixers of layers whose attention is not the stack's own (`kv_sharing_modes` of the class)."""
    carried, types, borrowers = dict(family.carried_layers), config.get("layer_types"), config.get(BORROWERS)
    if not isinstance(types, list) or not isinstance(borrowers, int) or not 0 < borrowers < len(types):
        return carried
    first = len(types) - borrowers
    last = {one: number for number, one in enumerate(types[:first])}  # of each type
    for number, one in enumerate(types):
        own = carried.get(number, ATTENTION)
        if number == last.get(one):
            carried[number] = replace(own, title=own.title + LENDING, lends=True)
        if number >= first:
            carried[number] = replace(own, title=own.title + BORROWING, borrows=True)
    return carried


def _double_width(config: dict[str, Any]) -> int | None:
    """Return the width of the wide FFNs: the config states the others' width."""
    width = config.get("intermediate_size")
    return 2 * width if isinstance(width, int) and not isinstance(width, bool) else None


def _with_half_width(keys: Sizes, config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the stock config of a resized model whose last FFNs are twice as wide as it states."""
    return set_width(keys, config, replace(shape, intermediate_size=shape.intermediate_size // 2))


GEMMA4 = Description(
    "gemma4_text",
    Stack(
        (
            Sublayer(ATTENTION),
            Sublayer(FeedForward(), Norm("pre_feedforward_layernorm"), inside=Norm("post_feedforward_layernorm")),
        ),
        layer_scale="layer_scalar",
    ),
    set_width,
    check,
    variant=variant,
    mixers={"sliding_attention": WINDOWS, "full_attention": None},
    last_differs=True,
    with_borrowed=lambda flags: {BORROWERS: sum(flags)},
    alone={TOKEN_WIDTH: 0, BORROWERS: 0},
)
