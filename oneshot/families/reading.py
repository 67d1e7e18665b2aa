"""From a config.json and the stored tensors to a family and its sizes."""

import math
from collections.abc import Mapping
from typing import Any

from oneshot.errors import CheckpointError
from oneshot.families.arcee import ARCEE
from oneshot.families.bert import BERT
from oneshot.families.cohere import COHERE, COHERE2
from oneshot.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from oneshot.families.description import Description, stated_class
from oneshot.families.distilbert import DISTILBERT
from oneshot.families.ernie4_5 import ERNIE4_5
from oneshot.families.exaone4 import EXAONE4
from oneshot.families.expert_sizes import ExpertSizes
from oneshot.families.falcon import FALCON
from oneshot.families.gemma import GEMMA
from oneshot.families.gemma2 import GEMMA2
from oneshot.families.gemma3 import GEMMA3
from oneshot.families.glm import GLM, GLM4
from oneshot.families.glm4_moe import GLM4_MOE
from oneshot.families.gpt2 import GPT2, GPT_BIGCODE
from oneshot.families.gpt_neox import GPT_NEOX
from oneshot.families.granite import GRANITE
from oneshot.families.helium import HELIUM
from oneshot.families.hunyuan import HUNYUAN
from oneshot.families.latent import LatentSizes
from oneshot.families.llama import LLAMA
from oneshot.families.ministral import CWM, MINISTRAL
from oneshot.families.ministral3 import MINISTRAL3
from oneshot.families.mistral import MISTRAL
from oneshot.families.mixtures import GRANITE_MOE, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from oneshot.families.nemotron import NEMOTRON
from oneshot.families.olmo2 import OLMO2, OLMO3
from oneshot.families.opt import OPT
from oneshot.families.phi import PHI
from oneshot.families.phi3 import PHI3
from oneshot.families.qwen2 import QWEN2
from oneshot.families.qwen3 import QWEN3
from oneshot.families.refusals import refuse_recurrent, unknown
from oneshot.families.roberta import CAMEMBERT, ELECTRA, ROBERTA, XLM_ROBERTA
from oneshot.families.seed_oss import SEED_OSS
from oneshot.families.shapes import ModelShape
from oneshot.families.smollm3 import SMOLLM3
from oneshot.families.stablelm import STABLELM
from oneshot.families.starcoder2 import STARCODER2
from oneshot.families.t5 import MT5, T5
from oneshot.families.wrappers import OTHER_NAMES, WRAPPERS, text_of, within_wrapper

DESCRIPTIONS = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    PHI3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    ARCEE,
    COHERE,
    COHERE2,
    CWM,
    ERNIE4_5,
    EXAONE4,
    FALCON,
    GLM,
    GLM4,
    GPT2,
    GPT_BIGCODE,
    GPT_NEOX,
    GRANITE,
    HELIUM,
    HUNYUAN,
    MINISTRAL,
    MINISTRAL3,
    NEMOTRON,
    OLMO2,
    OLMO3,
    SEED_OSS,
    SMOLLM3,
    STABLELM,
    STARCODER2,
    QWEN3_MOE,
    QWEN2_MOE,
    MIXTRAL,
    OLMOE,
    GRANITE_MOE,
    GLM4_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    PHI,
    OPT,
    BERT,
    DISTILBERT,
    ROBERTA,
    XLM_ROBERTA,
    CAMEMBERT,
    ELECTRA,
    T5,
    MT5,
)
FAMILIES = {family.model_type: family for family in (*DESCRIPTIONS, *WRAPPERS)}
COMPRESSED_MODEL_TYPE = "oneshot"  # of a checkpoint in the per-layer form
ENCODER_MODEL_TYPE = "oneshot-encoder"  # of an encoder in the per-layer form
NAS_MODEL_TYPE = "nemotron-nas"
LARGEST_SIZE = 2**31 - 1
DEFAULT_BUCKETS = 32  # of relative positions, transformers' default


def find_family(config: dict[str, Any]) -> Description:
    """Return the family that `config["model_type"]` names.

    Raises `CheckpointError`, with the reason, for recurrent states, other mixtures of experts, and unknown families.
    """
    model_type = config.get("model_type", "(none)")
    if not isinstance(model_type, str):
        raise CheckpointError(f"config.json states model_type {repr(model_type)[:100]}, which is not a name; mend it.")
    refuse_recurrent(model_type)
    known = FAMILIES.get(model_type)
    if _is_mixture(config, model_type) and (known is None or known.stack.experts is None):
        raise CheckpointError(
            f"The model ({model_type[:100]}) is a mixture of experts of a family that is not supported; give a dense "
            f"model, or one of {', '.join(name for name, one in FAMILIES.items() if one.stack.experts is not None)}."
        )
    if model_type in (COMPRESSED_MODEL_TYPE, ENCODER_MODEL_TYPE):
        raise CheckpointError("The checkpoint is a compressed one in the per-layer form; give the model it came from.")
    if model_type == NAS_MODEL_TYPE:
        raise CheckpointError(
            "The layers of the checkpoint have different sizes already (nemotron-nas); give the model it came from."
        )
    if model_type not in FAMILIES:
        raise unknown(model_type, FAMILIES)
    classes, stated = FAMILIES[model_type].classes, stated_class(config)
    if classes and stated is not None and stated not in classes:
        raise CheckpointError(
            f"config.json states the class {stated[:100]}; the supported ones of {model_type} are {', '.join(classes)}."
        )
    family = FAMILIES[model_type]
    if family.text_module is not None:
        return _wrapped(family, config)
    family.check(config)
    return family.variant(family, config)


def _wrapped(wrapper: Description, config: dict[str, Any]) -> Description:
    """Return the family of a model of images and text as its language model makes it."""
    config = text_of(wrapper, config)
    stated = str(config.get("model_type", wrapper.model_type))
    text = FAMILIES.get(OTHER_NAMES.get(stated, stated), wrapper if stated == wrapper.model_type else None)
    if text is None or (
        text is not wrapper and (text.classes or text.stack.experts or text.stack.layers != LLAMA.stack.layers)
    ):
        raise CheckpointError(
            f"The language model of this {wrapper.model_type} is of the type {stated[:100]}, which is not supported "
            "here; give a model with another one."
        )
    if text is wrapper:  # its config states no type, or is flat
        return wrapper
    text.check(config)
    return within_wrapper(text.variant(text, config), wrapper)


def _is_mixture(config: dict[str, Any], model_type: str) -> bool:
    """Return whether a config describes a mixture of experts."""
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    return "mixtral" in model_type or "moe" in model_type or any(config.get(name) for name in counts)


def read_shape(family: Description, config: dict[str, Any], stored: Mapping[str, tuple[int, ...]]) -> ModelShape:
    """Return the sizes that the config states; the stored tensors say which biases a layer has.

    Raises `CheckpointError` if a size is missing, is not a size, or contradicts the others.
    """
    stack, keys = family.stack, family.sizes
    hidden_size = _size(family, config, keys.hidden_size)
    num_heads, num_groups, head_dim = _head_sizes(family, config, hidden_size)
    _check_norm_epsilon(family, config)
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        _size(family, config, "sliding_window")
    first, attention = stack.layer_prefix(0), stack.attention
    num_layers = _num_layers(family, config, stored, keys.num_hidden_layers)
    num_decoder_layers = num_buckets = 0
    if keys.num_decoder_layers is not None:
        num_decoder_layers = _num_layers(family, config, stored, keys.num_decoder_layers, num_layers)
    if keys.num_buckets is not None:
        num_buckets = _size(family, config, keys.num_buckets, DEFAULT_BUCKETS)
    tied = _is_tied(family, config, stored)
    return ModelShape(
        num_hidden_layers=num_layers + num_decoder_layers,
        hidden_size=hidden_size,
        intermediate_size=_size(family, config, keys.intermediate_size, _default_width(family, hidden_size)),
        num_attention_heads=num_heads,
        num_key_value_heads=num_groups,
        head_dim=head_dim,
        attention_bias=f"{first}{stack.stored_linear(attention.k)}.bias" in stored,
        output_bias=f"{first}{attention.out}.bias" in stored,
        mlp_bias=f"{first}{stack.feed_forward.down}.bias" in stored,
        vocab_size=_size(family, config, keys.vocab_size),
        query_key_norms=attention.q_norm is not None,
        norms_all_heads=attention.norms_all_heads,
        layer_norms=stack.centres,
        norm_bias=len(stack.sublayers[0].norms[0].parts) > 1,
        norms_per_sublayer=len(stack.sublayers[0].norms),
        gated=stack.feed_forward.is_gated,
        shared_norm=stack.shares_norm,
        head_bias=family.head is not None and family.head.replace(".weight", ".bias") in stored,
        tied=tied,
        has_head=family.head is not None or tied,
        final_norm=stack.final_norm is not None,
        norms_after=stack.norms_after,
        causal=stack.causal,
        table_width=0 if stack.project_in is None else _size(family, config, str(keys.table_width)),
        num_token_types=stored.get(stack.token_types or "", (0,))[0],
        further_parameters=_further_parameters(family, stored),
        num_positions=_num_positions(family, stored),
        unused_positions=stack.position_offset,
        num_decoder_layers=num_decoder_layers,
        num_buckets=num_buckets,
        experts=_experts(family, config),
        latent=_latent(family, config) if attention.latent else None,
    )


def _latent(family: Description, config: dict[str, Any]) -> LatentSizes:
    """Return what queries, keys and values come from in attention with a latent."""
    queries = _size(family, config, "q_lora_rank") if config.get("q_lora_rank") is not None else 0
    keys = (_size(family, config, name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"))
    return LatentSizes(queries, *keys)


def _experts(family: Description, config: dict[str, Any]) -> ExpertSizes | None:
    """Return the sizes of the family's mixture of experts; None for a dense family."""
    keys, experts = family.sizes, family.stack.experts
    if experts is None:
        return None
    assert keys.experts_per_token is not None
    names = [name for name in keys.num_experts if config.get(name) is not None] or keys.num_experts
    counts = {_size(family, config, name) for name in names}
    count, per_token = max(counts), _size(family, config, keys.experts_per_token)
    if len(counts) > 1 or per_token > count:
        raise CheckpointError(
            f"config.json states {' and '.join(map(str, sorted(counts)))} experts, of which a token passes "
            f"{per_token}; give a complete {family.model_type} checkpoint."
        )
    if len(family.dense_layers) == config.get(keys.num_hidden_layers):
        raise CheckpointError(
            f"config.json of this {family.model_type} states no layer with experts, so there are none to make smaller; "
            "give another model."
        )
    return ExpertSizes(
        count,
        per_token,
        shared_width=0 if keys.shared_expert_width is None else _size(family, config, keys.shared_expert_width),
        shared_count=0 if keys.shared_experts is None else _size(family, config, keys.shared_experts),
        shared_gate=experts.shared_gate is not None,
        router_bias=experts.chosen_by is not None,
        dense_layers=family.dense_layers,
        dense_width=_size(family, config, str(keys.dense_width)) if family.dense_layers else 0,
    )


def check_layers(family: Description, shape: ModelShape, stored: Mapping[str, tuple[int, ...]]) -> None:
    """Check the layers' tensors, `name -> shape`, against the config's sizes before any work is done.

    `family`: numbered for the shape.

    Raises `CheckpointError` with the first tensor that is missing, unexpected, or of another size.
    """
    expected = {
        family.layer_prefix(layer) + name: size
        for layer in range(shape.num_hidden_layers)
        for name, size in family.stored_tensors(shape, layer).items()
    }
    in_layers = {name for name in stored if family.is_in_layers(name) and "rotary_emb" not in name}
    for name in sorted(expected.keys() | in_layers):
        if stored.get(name) != expected.get(name):
            raise CheckpointError(
                f"{name} has shape {stored.get(name)} where config.json of a {family.model_type} model asks for "
                f"{expected.get(name)}; give a complete, unmodified checkpoint."
            )


def _head_sizes(family: Description, config: dict[str, Any], hidden_size: int) -> tuple[int, int, int]:
    """Return the numbers of attention heads and of KV heads, and the size of a head."""
    keys, complete = family.sizes, f"give a complete {family.model_type} checkpoint"
    num_heads = _size(family, config, keys.num_attention_heads)
    head_dim = hidden_size // num_heads
    if keys.head_dim is not None:
        head_dim = _size(family, config, keys.head_dim, head_dim)
    num_groups = num_heads
    if keys.num_key_value_heads is not None:
        num_groups = _size(family, config, keys.num_key_value_heads, num_heads)
    if family.stack.attention.one_group:
        num_groups = 1
    if (keys.head_dim is None or config.get(keys.head_dim) is None) and hidden_size % num_heads:
        raise CheckpointError(
            f"config.json states {num_heads} attention heads, which do not divide the hidden size {hidden_size}; "
            f"{complete}."
        )
    if num_heads % num_groups:
        raise CheckpointError(
            f"config.json states {num_groups} key-value heads, which do not divide {num_heads} attention heads; "
            f"{complete}."
        )
    if family.stack.rotary and head_dim % 2:
        raise CheckpointError(
            f"config.json states heads of size {head_dim}, which rotary positions cannot turn; {complete}."
        )
    return num_heads, num_groups, head_dim


def _check_norm_epsilon(family: Description, config: dict[str, Any]) -> None:
    key = family.sizes.norm_epsilon
    if key is None:
        return
    epsilon = config.get(key)
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or epsilon < 0:
        raise CheckpointError(
            f"config.json states {key} {repr(epsilon)[:100]}, which is not a small number; give a complete "
            f"{family.model_type} checkpoint."
        )


def _is_tied(family: Description, config: dict[str, Any], stored: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether the output head is the embedding."""
    if (stated_class(config) or "").endswith("ForMaskedLM"):
        return family.masked_head not in stored  # one of its own is kept as it is
    return family.head is not None and family.head not in stored


def _num_positions(family: Description, stored: Mapping[str, tuple[int, ...]]) -> int:
    """Return the positions that the stored table has, without those that no token takes; 0 without a table."""
    name = family.stack.positions
    if name is None:
        return 0
    if name not in stored:
        raise CheckpointError(f"The checkpoint lacks the tensor {name}; give a complete one.")
    rows = stored[name][0] if stored[name] else 0
    return max(0, rows - family.stack.position_offset)


def _further_parameters(family: Description, stored: Mapping[str, tuple[int, ...]]) -> int:
    """Return the parameters of what is kept as it is: a classifier, a vision tower, a norm of the embeddings."""
    if family.head is not None and family.text_module is None:
        return 0
    stack = family.stack
    counted = {stack.embedding, stack.positions, stack.token_types, family.head}
    if stack.final_norm is not None:
        counted |= set(stack.final_norm.parts)
    outside = (name for name in stored if name not in counted and not name.startswith(f"{stack.layers}."))
    return sum(math.prod(stored[name]) for name in outside)


def _size(family: Description, config: dict[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer of the config; `default` if the config does not state it."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json does not state {key!r}; give a complete {family.model_type} checkpoint.")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_SIZE:
        raise CheckpointError(
            f"config.json states {key} {repr(value)[:100]}, which is not a positive integer; "
            f"give a complete {family.model_type} checkpoint."
        )
    return value


def _default_width(family: Description, hidden_size: int) -> int | None:
    factor = family.sizes.width_factor
    return None if factor is None else factor * hidden_size


def _num_layers(
    family: Description,
    config: dict[str, Any],
    stored: Mapping[str, tuple[int, ...]],
    key: str,
    default: int | None = None,
) -> int:
    """Return the number of layers; refuse one above the number of tensors, which would take memory for nothing."""
    num_layers = _size(family, config, key, default)
    if num_layers > len(stored):
        raise CheckpointError(
            f"config.json states {num_layers} layers where there are {len(stored)} tensors; give a complete checkpoint."
        )
    return num_layers
