"""MiniMax-M2: Mixtral's experts, sigmoid gates with a bias that chooses, and norms over all queries and all keys."""

from dataclasses import replace

from oneshot.families.mixtures import MIXTRAL
from oneshot.families.sublayers import Attention

_FIRST, *_OTHERS = MIXTRAL.stack.sublayers
_ATTENTION = Attention(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", norms_all_heads=True)
_EXPERTS = MIXTRAL.stack.experts
assert _EXPERTS is not None

MINIMAX_M2 = replace(
    MIXTRAL,
    model_type="minimax_m2",
    stack=replace(MIXTRAL.stack, sublayers=(replace(_FIRST, mixer=_ATTENTION), *_OTHERS)).with_experts(
        replace(_EXPERTS, scores="sigmoid", chosen_by="mlp.e_score_correction_bias")
    ),
)
