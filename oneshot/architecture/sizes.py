"""The sizes of a model, from its config.json and its stored tensors, and the check of one against the other."""

import math
from collections.abc import Mapping
from typing import Any

from oneshot.architecture.carried import Carried, CarriedSizes
from oneshot.architecture.description import Description, stated_class
from oneshot.architecture.expert_sizes import ExpertSizes
from oneshot.architecture.latent import LatentSizes
from oneshot.architecture.shapes import ModelShape
from oneshot.errors import CheckpointError

Shape = tuple[int, ...]

LARGEST_SIZE = 2**31 - 1
DEFAULT_BUCKETS = 32  # of relative positions, transformers' default


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
    num_layers = _num_layers(family, config, stored, keys.num_hidden_layers)
    attending = next((layer for layer in range(num_layers) if layer not in family.carried_layers), 0)
    prefix, attention = stack.layer_prefix(attending), next(iter(stack.attentions), None)
    reads, writes = ("", "") if attention is None else (stack.stored_linear(attention.k), attention.out)
    num_decoder_layers = num_buckets = 0
    if keys.num_decoder_layers is not None:
        num_decoder_layers = _num_layers(family, config, stored, keys.num_decoder_layers, num_layers)
    if keys.num_buckets is not None:
        num_buckets = _size(family, config, keys.num_buckets, DEFAULT_BUCKETS)
    tied, position_rows = _is_tied(family, config, stored), (stored.get(stack.positions or "") or (0,))[0]
    return ModelShape(
        num_hidden_layers=num_layers + num_decoder_layers,
        hidden_size=hidden_size,
        intermediate_size=_width(family, config, hidden_size),
        num_attention_heads=num_heads,
        num_key_value_heads=num_groups,
        head_dim=head_dim,
        attention_bias=f"{prefix}{reads}.bias" in stored,
        output_bias=f"{prefix}{writes}.bias" in stored,
        mlp_bias=f"{prefix}{stack.feed_forward.down}.bias" in stored,
        vocab_size=_size(family, config, keys.vocab_size),
        query_key_norms=attention is not None and attention.q_norm is not None,
        norms_all_heads=attention is not None and attention.norms_all_heads,
        layer_norms=stack.centres,
        norm_bias=len(stack.ffn_sublayer.norms[0].parts) > 1,
        norms_per_sublayer=len(stack.ffn_sublayer.norms),
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
        num_positions=max(0, position_rows - stack.position_offset),
        unused_positions=stack.position_offset,
        num_decoder_layers=num_decoder_layers,
        num_buckets=num_buckets,
        experts=_experts(family, config),
        latent=_latent(family, config) if attention is not None and attention.latent else None,
        sinks=attention is not None and attention.sinks is not None,
        carried=_carried(family, config, num_layers, stored),
        narrow_layers=family.narrow_layers,
    )


def _carried(
    family: Description, config: dict[str, Any], num_layers: int, stored: Mapping[str, tuple[int, ...]]
) -> tuple[CarriedSizes, ...]:
    """Return the carried mixers with the tensors that the first layer of each stores, without its FFN."""
    layers: dict[Carried, list[int]] = {}
    for number in range(num_layers):
        mixer = family.stack_of(number).token_mixer
        if isinstance(mixer, Carried):
            layers.setdefault(mixer, []).append(number)
    sizes = []
    for mixer, numbers in layers.items():
        prefix, own = family.layer_prefix(numbers[0]), family.stack_of(numbers[0]).ffn_prefixes
        of_layer = {name.removeprefix(prefix): size for name, size in stored.items() if name.startswith(prefix)}
        tensors = {name: size for name, size in of_layer.items() if not name.startswith(own)}
        state = math.prod(_size(family, config, name, 1) for name in mixer.state) if mixer.state else 0
        scan = 0
        for factors in mixer.scan:
            scan += math.prod(_size(family, config, one, 1) if isinstance(one, str) else one for one in factors)
        head_dim = tensors.get(f"{mixer.head_norm}.weight", (0,))[0]
        groups = tensors.get(f"{mixer.keys}.weight", (0,))[0] // max(1, head_dim)
        stated, flags = tuple(sorted(tensors.items())), (mixer.lends, mixer.borrows)
        sizes.append(CarriedSizes(tuple(numbers), stated, mixer.attends, state, scan, head_dim, groups, *flags))
    return tuple(sizes)


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
        router_bias=bool(experts.of_router),
        biases=experts.alternating,
        vectors=0 if experts.branches is None else len(experts.branches.vectors),
        dense_layers=family.dense_layers,
        dense_width=_size(family, config, str(keys.dense_width)) if family.dense_layers else 0,
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
    if family.stack.attentions and family.stack.attention.one_group:
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
    if key is None or key not in config:  # the class has a default
        return
    epsilon = config[key]
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


def _further_parameters(family: Description, stored: Mapping[str, tuple[int, ...]]) -> int:
    """Return the parameters of what is kept as it is: a classifier, a vision tower, a norm of the embeddings.

    A table of what every layer reads of its tokens is also kept.
    """
    if family.head is not None and family.text_module is None and family.stack.token_inputs is None:
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


def _width(family: Description, config: dict[str, Any], hidden_size: int) -> int:
    """Return the width of an FFN, or of one expert."""
    key, width, factor = family.sizes.intermediate_size, family.stated_width(config), family.sizes.width_factor
    stated = config if width is None else config | {key: width}
    return _size(family, stated, key, None if factor is None else factor * hidden_size)


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
            raise wrong_tensor(name, stored.get(name), expected.get(name), family)


def wrong_tensor(name: str, stored: Shape | None, expected: Shape | None, family: Description) -> CheckpointError:
    """Return the error of a tensor that is missing, unexpected, or of another size."""
    asks, remedy = f"config.json of a {family.model_type} model", "give a complete, unmodified checkpoint"
    if stored is None:
        if name == family.head:
            remedy += ", or set tie_word_embeddings to true in config.json if the head is the embedding"
        return CheckpointError(f"The checkpoint lacks {name} {expected}, which {asks} asks for; {remedy}.")
    if expected is None:
        if name.endswith(".bias"):
            remedy = "state such biases in config.json if the model has them, or remove them: transformers ignores them"
        return CheckpointError(f"The checkpoint has {name} {stored}, which {asks} does not ask for; {remedy}.")
    return CheckpointError(f"{name} has shape {stored} where {asks} asks for {expected}; {remedy}.")
