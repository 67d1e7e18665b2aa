"""Falcon-H1: attention and a state-space model beside each other in every layer, which are carried, before an FFN."""

from dataclasses import replace
from typing import Any

from oneshot.architecture import Carried, Description, FeedForward, Norm, Stack, Sublayer, set_width

FFN = FeedForward(
    "feed_forward.up_proj", "feed_forward.down_proj", "feed_forward.gate_proj", activation="feed_forward.act_fn"
)
# of every head: inputs and outputs of the state, and scores of the tokens of a chunk
SCAN = (("mamba_n_heads", "mamba_d_state"), ("mamba_n_heads", "mamba_chunk_size"))
MIXERS = Carried(
    "attention beside a state-space model",
    "mamba.out_proj",
    attends=True,
    state=("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    scan=SCAN,
)


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the factors of a config; the mixers' are in the stock class alone."""
    factors = config.get("mlp_multipliers")
    of_gate, of_output = factors if isinstance(factors, list) and len(factors) == 2 else (1.0, 1.0)
    stack = replace(
        family.stack.with_ffn(replace(FFN, gate_scale=float(of_gate))),
        embedding_scale=float(config.get("embedding_multiplier") or 1.0),
        residual_scale=float(of_output),
    )
    return replace(family, stack=stack, head_scale=float(config.get("lm_head_multiplier") or 1.0))


FALCON_H1 = Description(
    "falcon_h1",
    Stack((Sublayer(MIXERS), Sublayer(FFN, Norm("pre_ff_layernorm"))), final_norm=Norm("model.final_layernorm")),
    set_width,
    variant=variant,
)
