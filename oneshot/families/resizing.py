"""The sizes of a stock config."""

from typing import Any

from oneshot.families.shapes import ModelShape

NO_FFN_BIASES = (
    "--set correction=bias needs biases in the FFN, which a {} config cannot state; choose another correction."
)


def set_sizes(config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return a copy of a Hugging Face config with the sizes of `shape`, under Llama's keys.

    `rms_norm_eps` grows as the hidden size shrinks, because it is added to a mean over fewer squares (`fold_hidden`).
    """
    return config | {
        "hidden_size": shape.hidden_size,
        "rms_norm_eps": config["rms_norm_eps"] * (config["hidden_size"] / shape.hidden_size),
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
    }
