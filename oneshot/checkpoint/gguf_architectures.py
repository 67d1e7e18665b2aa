"""The architectures as llama.cpp's `convert_hf_to_gguf.py` writes them, and their entries of a config.json."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

KV_HEADS = "attention.head_count_kv"
LOCAL_THETA = 10000.0  # of layers with windows, llama.cpp's default

Further = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
Written = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """A family as GGUF files have it.

    Attributes:
        model_type: name of the family in transformers, whose class with an output head the config states.
        stated: what the config states of every model.
        biases: the config's names of biases, each with a tensor that shows them.
        context: the config's name of the longest context.
        keys: further keys of the file that may be there, below its architecture.
        further: `(keys of the file below its architecture, config so far) -> further entries of the config`.
        written: its inverse, `complete config -> further keys of the file`; None for a family that `--form gguf` does
            not write in its own architecture.
        rotary: `complete config -> rope_parameters` that the keys below `rope.` state.
        norm_offset: what the converter adds to the weights of norms.
        pairs: whether the rows of queries and keys that positions turn together lie side by side.
        partly_rotary: whether positions may turn a part of each head.
        tied: whether llama.cpp has no place for an output head of its own.
        windowed: whether llama.cpp opens a file only if some of its layers have windows.
    """

    model_type: str
    stated: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    context: str = "max_position_embeddings"
    keys: Collection[str] = ()
    further: Further = lambda keys, config: {}
    written: Written | None = None
    rotary: Written = lambda config: config["rope_parameters"]
    norm_offset: float = 0.0
    pairs: bool = False
    partly_rotary: bool = False
    tied: bool = False
    windowed: bool = False


def tensor_name_map(architecture: str, num_layers: int) -> Any:
    """Return gguf's map from stored names to the names in a file of an architecture of llama.cpp."""
    import gguf

    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(kind, num_layers)


def _layer_types(keys: Mapping[str, Any], config: Mapping[str, Any], period: int) -> list[str]:
    """Return which layers have windows: all but the last one of every `period`."""
    num_layers, stated = config["num_hidden_layers"], keys.get("attention.sliding_window_pattern", period)
    if isinstance(stated, list):
        slides = [bool(one) for one in stated[:num_layers]]
    else:
        slides = [stated == 0 or layer % stated < stated - 1 for layer in range(num_layers)]
    return ["sliding_attention" if one else "full_attention" for one in slides]


def _pattern(config: Mapping[str, Any], period: int) -> dict[str, Any]:
    """Return the inverse of `_layer_types`: no key if the layers have llama.cpp's own pattern."""
    kinds = config["layer_types"]
    if kinds == _layer_types({}, {"num_hidden_layers": len(kinds)}, period):
        return {}
    return {"attention.sliding_window_pattern": [one == "sliding_attention" for one in kinds]}


def _score_scale(config: Mapping[str, Any], layers_of_27b: int) -> dict[str, Any]:
    """Return the scale of scores, which llama.cpp derives from the number of layers."""
    of_27b = config["num_hidden_layers"] == layers_of_27b
    size = config["hidden_size"] // config["num_attention_heads"] if of_27b else config["head_dim"]
    return {"query_pre_attn_scalar": size}


def _gemma2(keys: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0),
        "sliding_window": keys.get("attention.sliding_window", 4096),
        "layer_types": _layer_types(keys, config, 2),
        **_score_scale(config, 46),
    }


def _gemma2_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inverse of `_gemma2`; a cap that is missing is read as the usual one."""
    caps = {name: float(config[name]) for name in CAPS if config[name] is not None}
    return caps | {"attention.sliding_window": config["sliding_window"]} | _pattern(config, 2)


def _gemma3(keys: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    window = keys.get("attention.sliding_window")
    local = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", LOCAL_THETA)}
    kinds = _layer_types(keys, config, 6) if window else ["full_attention"] * config["num_hidden_layers"]
    return {
        "final_logit_softcapping": keys.get("final_logit_softcapping") or None,
        "layer_types": kinds,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        **({"sliding_window": window} if window else {}),
        **_score_scale(config, 62),
    }


def _gemma3_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inverse of `_gemma3`."""
    cap, local = config["final_logit_softcapping"], config["rope_parameters"]["sliding_attention"]
    keys = {"rope.freq_base_swa": float(local["rope_theta"])} | ({CAPS[1]: float(cap)} if cap else {})
    if "sliding_attention" not in config["layer_types"]:
        return keys
    return keys | {"attention.sliding_window": config["sliding_window"]} | _pattern(config, 6)


def _granite(keys: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return {
        "attention_multiplier": keys.get("attention.scale", head_dim**-0.5),
        "embedding_multiplier": keys.get("embedding_scale", 1.0),
        "residual_multiplier": keys.get("residual_scale", 1.0),
        "logits_scaling": keys.get("logit_scale", 1.0),
    }


def _olmo2(keys: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return OLMo 2, or OLMo 3, which has windows in most layers, and scales positions only in the others."""
    window, rotary = keys.get("attention.sliding_window"), config["rope_parameters"]
    if not window:
        return {}
    theta = rotary["rope_theta"]
    if keys.get("rope.freq_base_swa", theta) != theta:
        raise ValueError("rope.freq_base_swa unlike rope.freq_base")
    local = {"rope_type": "default", "rope_theta": theta}
    return {
        "model_type": "olmo3",
        "rope_parameters": {"full_attention": rotary, "sliding_attention": local},
        "sliding_window": window,
        "layer_types": _layer_types(keys, config, 4),
    }


def _exaone4(keys: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    window = keys.get("attention.sliding_window") or None
    kinds = _layer_types(keys, config, 4) if window else ["full_attention"] * config["num_hidden_layers"]
    return {"sliding_window": window, "layer_types": kinds}


GELU = {"hidden_activation": "gelu_pytorch_tanh"}
WINDOWS = ("attention.sliding_window", "attention.sliding_window_pattern")
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
LLAMA_BIASES = ATTENTION_BIAS | {"mlp_bias": "blk.0.ffn_down.bias"}
SILU = {"hidden_act": "silu"}
ARCHITECTURES = {
    "llama": Architecture("llama", SILU, LLAMA_BIASES, pairs=True),
    "qwen2": Architecture("qwen2", SILU),
    "qwen3": Architecture("qwen3", SILU, ATTENTION_BIAS),
    "gemma": Architecture(
        "gemma", {"hidden_act": "gelu_pytorch_tanh"}, written=lambda config: {}, norm_offset=1.0, tied=True
    ),
    "gemma2": Architecture(
        "gemma2",
        GELU,
        keys=(*WINDOWS, *CAPS),
        further=_gemma2,
        written=_gemma2_keys,
        norm_offset=1.0,
        tied=True,
        windowed=True,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        GELU,
        keys=(*WINDOWS, *CAPS[1:], "rope.freq_base_swa"),
        further=_gemma3,
        written=_gemma3_keys,
        rotary=lambda config: config["rope_parameters"]["full_attention"],
        norm_offset=1.0,
    ),
    "phi3": Architecture(
        "phi3",
        SILU,
        keys=WINDOWS[:1],
        further=lambda keys, config: {"sliding_window": keys.get(WINDOWS[0]) or None},  # a file states 0 for none
        partly_rotary=True,
    ),
    "nemotron": Architecture(
        "nemotron",
        {"hidden_act": "relu2"},
        LLAMA_BIASES,
        keys=("attention.layer_norm_rms_epsilon",),
        norm_offset=1.0,
        partly_rotary=True,
    ),
    "starcoder2": Architecture("starcoder2", {"hidden_act": "gelu_pytorch_tanh"}, {"use_bias": "blk.0.attn_q.bias"}),
    "stablelm": Architecture(
        "stablelm",
        SILU,
        {"use_qkv_bias": "blk.0.attn_q.bias"},
        keys=("use_parallel_residual",),
        further=lambda keys, config: {"use_parallel_residual": bool(keys.get("use_parallel_residual", True))},
        partly_rotary=True,
    ),
    "falcon": Architecture(
        "falcon",
        {"activation": "gelu", "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False},
        keys=("tensor_data_layout", KV_HEADS),
    ),
    "gpt2": Architecture("gpt2", {"activation_function": "gelu_new"}, context="n_positions"),
    "granite": Architecture(
        "granite",
        SILU,
        LLAMA_BIASES,
        keys=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
        further=_granite,
        pairs=True,
    ),
    "olmo2": Architecture("olmo2", SILU, ATTENTION_BIAS, keys=(*WINDOWS, "rope.freq_base_swa"), further=_olmo2),
    "exaone4": Architecture("exaone4", SILU, keys=WINDOWS, further=_exaone4),
    "smollm3": Architecture("smollm3", SILU, LLAMA_BIASES, pairs=True),
    "arcee": Architecture("arcee", {"hidden_act": "relu2"}, LLAMA_BIASES, pairs=True),
    "command-r": Architecture(
        "cohere",
        SILU,
        ATTENTION_BIAS,
        keys=("logit_scale",),
        further=lambda keys, config: {"logit_scale": keys.get("logit_scale", 0.0625)},
    ),
    "seed_oss": Architecture("seed_oss", SILU, LLAMA_BIASES | {"attention_out_bias": "blk.0.attn_output.bias"}),
    "ernie4_5": Architecture("ernie4_5", SILU, {"use_bias": "blk.0.attn_q.bias"}),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", SILU, ATTENTION_BIAS),
    "glm4": Architecture("glm4", SILU, ATTENTION_BIAS, partly_rotary=True),
    "phi2": Architecture("phi", {"hidden_act": "gelu_new"}, partly_rotary=True),
}
