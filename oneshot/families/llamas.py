"""Families whose layer is Llama's, but for what an entry states: those that need a few lines, in one table."""

from dataclasses import replace
from functools import partial
from typing import Any

from oneshot.architecture import Attention, Description, FeedForward, Norm, Stack, Sublayer
from oneshot.architecture.resizing import FIXED_HEADS_ALONE, NO_FFN_BIASES, NO_HIDDEN_SIZE, set_sizes, set_width
from oneshot.families.llama import STACK

MISTRAL_WINDOW = 4096  # transformers' default
HEAD_NORMS = Attention(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")  # of each head, shared by all heads
FUSED_FFN = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
GLM_FFN = FeedForward(activation="mlp.activation_fn")
# norms inside the branches only, and norms over all heads of queries and of keys
OLMO_STACK = Stack(
    (
        Sublayer(replace(HEAD_NORMS, norms_all_heads=True), inside=Norm("post_attention_layernorm")),
        Sublayer(FeedForward(), inside=Norm("post_feedforward_layernorm")),
    )
)


def mistral_window(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the window of a config."""
    return replace(family, windowed=bool(config.get("sliding_window", MISTRAL_WINDOW)))


def qwen_windows(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the windows that a config asks for."""
    return replace(family, windowed=bool(config.get("use_sliding_window")))


def phi3_forms(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the forms that hold the window and the rotary positions of a config."""
    family = replace(family, windowed=bool(config.get("sliding_window")))
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = config.get("partial_rotary_factor") or rotary.get("partial_rotary_factor") or 1.0
    if rotary.get("rope_type", rotary.get("type", "default")) == "default" and share == 1.0:
        return family
    refused = dict(family.unsupported)
    if "long_factor" in rotary:
        refused["heads"] = (
            "Heads of this phi3 stay, because its config has a factor for each rotary position of hidden size ÷ heads; "
            "use --set heads=none."
        )
    return replace(family, like_llama=False, unsupported=refused)


def scaled_embedding(family: Description, config: dict[str, Any]) -> Description:
    """Return the family whose embedding is scaled by the square root of the hidden size."""
    scale = float(config.get("hidden_size") or 0) ** 0.5
    return replace(family, stack=replace(family.stack, embedding_scale=scale))


def granite_factors(family: Description, config: dict[str, Any]) -> Description:
    """Return the family with the factors of a config; the factor of attention scores is in the stock class alone."""
    stack = replace(
        family.stack,
        embedding_scale=float(config.get("embedding_multiplier", 1.0)),
        residual_scale=float(config.get("residual_multiplier", 1.0)),
    )
    return replace(family, stack=stack, head_scale=1 / float(config.get("logits_scaling", 1.0)))


def _no_ffn_biases(model_type: str) -> dict[Any, str]:
    return {"ffn biases": NO_FFN_BIASES.format(model_type)}


_like = partial(Description, stack=STACK, resize=set_sizes)

MISTRAL = _like("mistral", variant=mistral_window, like_llama=True, unsupported=_no_ffn_biases("mistral"))
# biases on q, k and v
QWEN2 = _like("qwen2", variant=qwen_windows, like_llama=True, unsupported=_no_ffn_biases("qwen2"))
QWEN3 = _like(
    "qwen3",
    stack=STACK.with_attention(HEAD_NORMS),
    variant=qwen_windows,
    like_llama=True,
    unsupported=_no_ffn_biases("qwen3"),
)
# Phi-3, Phi-3.5 and Phi-4: queries, keys and values are one linear, and so are gate and up
PHI3 = _like(
    "phi3",
    stack=replace(
        STACK.with_ffn(GLM_FFN),
        fused={"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), **FUSED_FFN},
    ),
    variant=phi3_forms,
    like_llama=True,
    unsupported=_no_ffn_biases("phi3") | {"hidden size": NO_HIDDEN_SIZE.format("phi3")},
)
# biases on q, k and v, and one on attention's output if the config has it
SEED_OSS = _like(
    "seed_oss",
    like_llama=True,
    unsupported=_no_ffn_biases("seed_oss") | {"hidden size": NO_HIDDEN_SIZE.format("seed_oss")},
)
# norms that multiply by one plus their weights, and a scaled embedding
GEMMA = _like(
    "gemma",
    stack=replace(
        STACK,
        sublayers=tuple(replace(each, before=replace(each.norm, offset=1.0)) for each in STACK.sublayers),
        final_norm=Norm("model.norm", offset=1.0),
    ),
    variant=scaled_embedding,
)
# an FFN without a gate
ARCEE = _like("arcee", stack=STACK.with_ffn(FeedForward(gate=None)))
# rotary positions turn neighbouring values; biases if the config has them
ERNIE4_5 = _like("ernie4_5")
# GLM-4 of 2024 (`glm`) and of 2025 (`glm4`): gate and up are one linear; the later has norms inside the branches
GLM = _like("glm", stack=replace(STACK.with_ffn(GLM_FFN), fused=FUSED_FFN))
GLM4 = _like(
    "glm4",
    stack=replace(
        STACK,
        sublayers=(
            Sublayer(Attention(), Norm("input_layernorm"), inside=Norm("post_self_attn_layernorm")),
            Sublayer(GLM_FFN, Norm("post_attention_layernorm"), inside=Norm("post_mlp_layernorm")),
        ),
        fused=FUSED_FFN,
    ),
)
# Granite 3: factors for the embedding, attention scores, what sublayers add, and the logits
GRANITE = _like("granite", variant=granite_factors)
# rotary positions turn neighbouring values; heads are as wide as the hidden size
HELIUM = _like("helium", resize=set_width, unsupported={"heads": FIXED_HEADS_ALONE.format("helium")})
# norms of queries and keys after the rotation
HUNYUAN = _like(
    "hunyuan_v1_dense",
    stack=STACK.with_attention(Attention(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")),
)
# a sliding window in some layers
MINISTRAL, CWM = _like("ministral"), _like("cwm")
# queries are scaled by their position
MINISTRAL3 = _like("ministral3")
# no rotary positions in every fourth layer
SMOLLM3 = _like("smollm3")
OLMO2, OLMO3 = _like("olmo2", stack=OLMO_STACK), _like("olmo3", stack=OLMO_STACK)
# norms inside the branches only, norms of queries and keys, and windows in some layers
EXAONE4 = _like("exaone4", stack=OLMO_STACK.with_attention(HEAD_NORMS))
