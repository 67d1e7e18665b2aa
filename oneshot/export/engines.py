"""What other engines make of a stock result, where they ask the number of a layer or of heads instead of the config.

Read in the sources of llama.cpp (llama-cpp-python 0.3.36, `src/models/`), mlx-lm 0.32.2 (`mlx_lm/models/`), vLLM 0.32
(`vllm/model_executor/models/`) and SGLang 0.5.23 (`sglang/srt/models/`).
"""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from oneshot.checkpoint import complete_text_config, per_layer_lists
from oneshot.families import FAMILIES, find_family
from oneshot.serving import Engine

# families of which an engine has as many values in all heads as in the hidden state
HEADS_FILL_HIDDEN_SIZE: dict[str, tuple[str, ...]] = {
    "llama.cpp": (
        *("cohere", "cohere2", "exaone4", "glm", "granite", "granitemoe", "granitemoehybrid", "lfm2", "lfm2_moe"),
        *("nemotron", "olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe", "stablelm", "starcoder2"),
    ),
    "vLLM": ("granitemoe", "granitemoehybrid", "lfm2", "lfm2_moe", "qwen2", "qwen2_moe"),
    "SGLang": (
        *("cohere", "cohere2", "granitemoe", "granitemoehybrid", "lfm2_moe", "mixtral", "olmo2", "olmoe", "phi"),
        *("qwen2_moe", "stablelm", "starcoder2"),
    ),
    "mlx-lm": (
        *("cohere", "cohere2", "gpt_neox", "granite", "granitemoe", "granitemoehybrid", "helium", "lfm2", "lfm2_moe"),
        *("mixtral", "phi", "phi3", "qwen2", "qwen2_moe", "stablelm", "starcoder2"),
    ),
}
# who makes the kinds of layers (windows, rotary positions, mixers) of these families from the layers' numbers
KINDS_BY_NUMBER = {
    "cohere2": ("llama.cpp", "mlx-lm"),
    "exaone4": ("mlx-lm", "SGLang"),
    "gemma2": ("llama.cpp", "SGLang"),
    "gemma3_text": ("llama.cpp", "mlx-lm"),
    "gpt_oss": ("llama.cpp", "vLLM"),
    "modernbert": ("llama.cpp",),
    "qwen3_5_moe_text": ("llama.cpp", "mlx-lm", "SGLang"),
    "qwen3_5_text": ("llama.cpp", "mlx-lm", "SGLang"),
    "qwen3_next": ("llama.cpp", "mlx-lm", "SGLang"),
    "smollm3": ("llama.cpp",),
}
LETTERS = "sliding_window_pattern"  # a letter for each layer, such as LLLG; others state a number, or null
SCALED_BY_LAYERS = {"gemma2": 46, "gemma3_text": 62}  # where llama.cpp divides the hidden size by the heads
# families of which an engine has four times as many neurons as the hidden size, whatever the config says
NEURONS_OF_HIDDEN_SIZE: dict[str, tuple[str, ...]] = {
    "llama.cpp": ("falcon", "gpt2", "gpt_bigcode", "phi"),
    "vLLM": ("falcon",),
    "SGLang": ("phi",),
    "mlx-lm": ("gpt2", "gpt_neox"),
}
WINDOWED_BY_LAYERS = {"exaone4": 64}  # other numbers of layers have no windows in llama.cpp
# llama.cpp has one architecture for these families, and finds out by layers and tokens if their queries are one linear
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
LITE_LAYERS, LITE_TOKENS = (26, 27), (48, 128256)
NAMES: dict[str, Engine] = {"llama.cpp": "llama.cpp", "mlx-lm": "mlx", "vLLM": "vllm", "SGLang": "sglang"}


def notes_on_engines(config: dict[str, Any]) -> list[str]:
    """Return a sentence for every way in which an engine differs from transformers for a stock config.json."""
    return [note for _, note in engines_that_differ(config)]


def engines_that_differ(config: dict[str, Any]) -> list[tuple[tuple[Engine, ...], str]]:
    """Return the same sentences, each with the engines that it is about."""
    if config.get("model_type") not in FAMILIES:
        return []
    text = complete_text_config(find_family(config), config)
    heads, neurons = (_engines_in(families, text) for families in (HEADS_FILL_HIDDEN_SIZE, NEURONS_OF_HIDDEN_SIZE))
    others = [name for name in heads if name != "llama.cpp"]
    notes = [
        (KINDS_BY_NUMBER.get(text["model_type"], ()), _kinds(text)),
        (["llama.cpp"], _heads(text) if "llama.cpp" in heads else None),
        *((["llama.cpp"], note) for note in (_scale(text), _windows(text), _lite(text))),
        (["vLLM"], _unrotated(text)),
        (["SGLang"], _biases(text)),
        (neurons, _neurons(neurons, text)),
        (others, _heads_of_others(others, text)),
    ]
    return [(tuple(NAMES[name] for name in names), note) for names, note in notes if note is not None]


def _engines_in(families: dict[str, tuple[str, ...]], text: dict[str, Any]) -> list[str]:
    """Return the engines that list the family of a config."""
    return [name for name, listed in families.items() if text["model_type"] in listed]


def _heads(text: dict[str, Any]) -> str | None:
    sizes = _unequal(text)
    if sizes is None:
        return None
    return (
        f"llama.cpp does not open it, because its architecture of {text['model_type']} wants heads that fill the "
        f"hidden size ({sizes}); other tools that take the head size for hidden size ÷ heads fail also or answer "
        "wrongly."
    )


def _heads_of_others(engines: Sequence[str], text: dict[str, Any]) -> str | None:
    sizes = _unequal(text)
    if not engines or sizes is None:
        return None
    return (
        f"In {_together(engines)} it does not open or is another model, because the class of {text['model_type']} "
        f"there takes the head size for hidden size ÷ heads ({sizes})."
    )


def _neurons(engines: Sequence[str], text: dict[str, Any]) -> str | None:
    if not engines:
        return None
    sizes = FAMILIES[text["model_type"]].sizes
    hidden = text[sizes.hidden_size]
    neurons = text.get(sizes.intermediate_size) or 4 * hidden
    if neurons == 4 * hidden:
        return None
    return (
        f"In {_together(engines)} it does not open, because the class of {text['model_type']} there has four times as "
        f"many neurons as the hidden size ({neurons} is not 4 × {hidden})."
    )


def _biases(text: dict[str, Any]) -> str | None:
    if text["model_type"] != "llama" or not text.get("mlp_bias"):
        return None
    return "SGLang would compute another model: its class of llama leaves out the biases of FFNs."


def _unrotated(text: dict[str, Any]) -> str | None:
    has_windows = "sliding_attention" in (text.get("layer_types") or ())
    if text["model_type"] != "exaone4" or not text.get("sliding_window") or has_windows:
        return None
    return (
        "vLLM would compute another model: without a layer with a window it rotates the queries and keys of all layers."
    )


def _together(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _unequal(text: dict[str, Any]) -> str | None:
    """Return how the size of all heads together differs from the hidden size; None if it does not, or is not stated."""
    heads, size, hidden = text.get("num_attention_heads"), text.get("head_dim"), text.get("hidden_size")
    return None if not heads or not size or heads * size == hidden else f"{heads} × {size} is not {hidden}"


def _kinds(text: dict[str, Any]) -> str | None:
    engines = KINDS_BY_NUMBER.get(text["model_type"])
    if engines is None:
        return None
    stated = per_layer_lists(text)
    derived = _of_numbers(text, stated)
    differ = [name for name, values in stated.items() if derived.get(name) != values]
    if not differ:
        return None
    return (
        f"{_together(engines)} would compute another model: removed layers have moved the others, and there the "
        f"number of a layer decides what config.json states in {' and '.join(differ)}."
    )


def _of_numbers(text: dict[str, Any], stated: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return what engines make of the layers' numbers in the place of the stated lists, as the class does without them.

    The class of EXAONE 4.0 does not read the letters of its pattern, of which mlx-lm makes the kinds, nor its absence.
    """
    pattern = text.get(LETTERS)
    if text["model_type"] == "exaone4" and (isinstance(pattern, str) or not pattern):
        letters = islice(cycle(pattern or "G"), text["num_hidden_layers"])
        return {"layer_types": ["sliding_attention" if one == "L" else "full_attention" for one in letters]}
    return per_layer_lists({name: value for name, value in text.items() if name not in stated and value is not None})


def _scale(text: dict[str, Any]) -> str | None:
    layers = SCALED_BY_LAYERS.get(text["model_type"])
    if layers is None:
        return None
    by_heads = text["hidden_size"] / text["num_attention_heads"]
    scale = by_heads if text["num_hidden_layers"] == layers else text["head_dim"]
    if scale == text["query_pre_attn_scalar"]:
        return None
    return (
        f"llama.cpp would compute another model: with {text['num_hidden_layers']} layers it scales scores by "
        f"1/√{scale:g} instead of 1/√{text['query_pre_attn_scalar']:g}."
    )


def _windows(text: dict[str, Any]) -> str | None:
    layers = WINDOWED_BY_LAYERS.get(text["model_type"])
    if (
        layers is None
        or layers == text["num_hidden_layers"]
        or "sliding_attention" not in (text.get("layer_types") or ())
    ):
        return None
    return f"llama.cpp would compute another model: it has the attention windows with {layers} layers only."


def _lite(text: dict[str, Any]) -> str | None:
    if text["model_type"] not in LATENT:
        return None
    layers = text["num_hidden_layers"]
    is_lite = layers in LITE_LAYERS or (layers, text["vocab_size"]) == LITE_TOKENS
    if is_lite != bool(text.get("q_lora_rank")):
        return None
    expected = "without" if is_lite else "with"
    return f"llama.cpp does not open it: with {layers} layers it expects queries {expected} q_lora_rank."
