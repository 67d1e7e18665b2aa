"""The sizes of a stock config, and sentences about what none can state."""

from typing import TYPE_CHECKING, Any

from oneshot.architecture.shapes import ModelShape

if TYPE_CHECKING:
    from oneshot.architecture.description import Sizes

NO_FFN_BIASES = (
    "--set correction=bias needs biases in the FFN, which a {} config cannot state; choose another correction."
)

ONLY_STOCK = "The per-layer form holds decoders with one FFN in a layer, which {} is not; use --form stock."

NO_HIDDEN_SIZE = "--set hidden= is not supported for {}, whose hidden size stays; use none."

FIXED_HEADS_ALONE = (
    "The layer of {} has heads as wide as its hidden size, and it has no other form, so none can be removed; use --set "
    "heads=none."
)

FIXED_HEADS = (
    "{}'s own layer has heads as wide as its hidden size, so none can be removed in this form; add --form per-layer, "
    "or --set heads=none."
)


def set_width(keys: "Sizes", config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return a copy of a Hugging Face config with the FFN width of `shape` and the number of its experts."""
    stated = {keys.intermediate_size: shape.intermediate_size}
    if shape.experts is not None:
        names = [name for name in keys.num_experts if name in config] or keys.num_experts[:1]
        stated |= dict.fromkeys(names, shape.experts.count)
    return config | stated


def set_widths(keys: "Sizes", config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the same as `set_width` with the heads."""
    stated = {
        keys.num_attention_heads: shape.num_attention_heads,
        keys.num_key_value_heads: shape.num_key_value_heads,
        keys.head_dim: shape.head_dim,
    }
    return set_width(keys, config, shape) | {key: size for key, size in stated.items() if key is not None}


def set_sizes(keys: "Sizes", config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the same as `set_widths` with the hidden size."""
    dense, epsilon = config[keys.hidden_size], str(keys.norm_epsilon)
    hidden = {keys.hidden_size: shape.hidden_size, epsilon: scaled_epsilon(config[epsilon], dense, shape.hidden_size)}
    return set_widths(keys, config, shape) | hidden


def scaled_epsilon(epsilon: float, dense_size: int, size: int) -> float:
    """Return the epsilon of norms that divide by a smaller hidden size as it was beside the dense one.

    It grows as the hidden size shrinks, because it is added to a mean over fewer squares (`fold_hidden`).
    """
    return epsilon * (dense_size / size)
