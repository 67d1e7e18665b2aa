"""Seed-OSS: the Llama layer, with biases on q, k and v, and one on attention's output if the config has it."""

from oneshot.families.description import Description
from oneshot.families.llama import STACK
from oneshot.families.resizing import NO_FFN_BIASES, NO_HIDDEN_SIZE, set_sizes

SEED_OSS = Description(
    "seed_oss",
    STACK,
    set_sizes,
    like_llama=True,
    unsupported={"ffn biases": NO_FFN_BIASES.format("seed_oss"), "hidden size": NO_HIDDEN_SIZE.format("seed_oss")},
)
