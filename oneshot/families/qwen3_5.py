"""Qwen3.5 for text: the mixers of Qwen3-Next, which are carried, before one FFN or experts."""

from oneshot.architecture.description import Description
from oneshot.architecture.further import APART, PREFIX
from oneshot.architecture.resizing import set_width
from oneshot.architecture.sublayers import FeedForward
from oneshot.families.qwen3_next import MIXERS, QWEN3_NEXT, stack, with_linear_attention

QWEN3_5 = Description(
    "qwen3_5_text",
    stack(FeedForward()),
    set_width,
    variant=with_linear_attention,
    unused_prefixes=(PREFIX,),
    further=APART,
    mixers=MIXERS,
)
QWEN3_5_MOE = Description(
    "qwen3_5_moe_text",
    QWEN3_NEXT.stack,
    variant=with_linear_attention,
    sizes=QWEN3_NEXT.sizes,
    unused_prefixes=(PREFIX,),
    further=APART,
    mixers=MIXERS,
)
