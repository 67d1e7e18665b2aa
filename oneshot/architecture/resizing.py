"""The sizes of a stock config, and sentences about what none can state."""

from collections.abc import Callable
from typing import Any

from oneshot.architecture.shapes import ModelShape

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


def set_ffn_width(key: str) -> Callable[[dict[str, Any], ModelShape], dict[str, Any]]:
    """Return the `resize` of a family whose config can only state another FFN width, under this key."""
    return lambda config, shape: config | {key: shape.intermediate_size}


def set_widths(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return a copy of a Hugging Face config with the FFN width and the heads of `shape`, under Llama's keys."""
    return config | {
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
    }


def set_sizes(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return the same as `set_widths` with the hidden size."""
    return set_widths(config, shape) | {
        "hidden_size": shape.hidden_size,
        "rms_norm_eps": scaled_epsilon(config["rms_norm_eps"], config["hidden_size"], shape.hidden_size),
    }


def scaled_epsilon(epsilon: float, dense_size: int, size: int) -> float:
    """Return the epsilon of norms that divide by a smaller hidden size as it was beside the dense one.

    It grows as the hidden size shrinks, because it is added to a mean over fewer squares (`fold_hidden`).
    """
    return epsilon * (dense_size / size)
