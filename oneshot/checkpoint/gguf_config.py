"""From the metadata of a GGUF file to the config.json of the model in it."""

from typing import Any

from oneshot.checkpoint.gguf_file import GgufFile
from oneshot.checkpoint.gguf_rotary import FACTORS, rotary_parameters
from oneshot.errors import CheckpointError

MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # llama.cpp's architecture -> `model_type`
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
# keys of the architecture that change nothing if they have this value, and those that change nothing at all
NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}
SILENT = ("vocab_size", "rope.scaling.finetuned")
TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the config.json that states what a file's metadata and tensors say; its dtype is float32.

    Raises `CheckpointError` for an architecture or a key that is not known: it could change what the model computes.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in MODEL_TYPES:
        raise CheckpointError(
            f"The GGUF architecture {architecture} is not supported ({', '.join(MODEL_TYPES)} are); give the model it "
            "came from as safetensors."
        )
    stated = {
        key.removeprefix(f"{architecture}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{architecture}.")
    }
    _refuse_unknown(stated)
    sizes = {name: stated[key] for key, name in SIZES.items() if key in stated}
    for key, name in SIZES.items():
        if isinstance(sizes.get(name, 0), list) or (name not in sizes and key != "attention.head_count_kv"):
            raise CheckpointError(
                f"The GGUF file states {key} {sizes.get(name)}, not one number for all layers; give the model it came "
                "from."
            )
    head_dim = _head_dim(stated, sizes)
    rotary = {key.removeprefix("rope."): value for key, value in stated.items() if key.startswith("rope.")}
    factors = file.read(FACTORS) if FACTORS in file.tensors else None
    try:
        positions = rotary_parameters(
            rotary, factors, head_dim=head_dim, context_length=sizes["max_position_embeddings"]
        )
    except ValueError as error:
        raise CheckpointError(
            f"The GGUF file has rotary positions that no config.json states ({error}); give the model it came from."
        ) from error
    tokens = {name: file.metadata.get(f"tokenizer.ggml.{key}") for key, name in TOKENS.items()}
    model_type = MODEL_TYPES[architecture]
    config = (
        sizes
        | tokens
        | {
            "architectures": [CLASSES[model_type]],
            "dtype": "float32",
            "head_dim": head_dim,
            "hidden_act": "silu",
            "model_type": model_type,
            "rope_parameters": positions,
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "vocab_size": file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0,
        }
    )
    if model_type != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    return config


def _refuse_unknown(stated: dict[str, Any]) -> None:
    known = {*SIZES, *HEAD_SIZES, *SILENT}
    for key, value in stated.items():
        if key in known or key.startswith("rope.") or (key in NEUTRAL and value == NEUTRAL[key]):
            continue
        raise CheckpointError(
            f"The GGUF file states {key} {value}, which oneshot does not know; give the model it came from as "
            "safetensors."
        )


def _head_dim(stated: dict[str, Any], sizes: dict[str, Any]) -> int:
    """Return the size of heads; positions must turn all of it."""
    found = {stated[key] for key in HEAD_SIZES if key in stated}
    if len(found) > 1:
        raise CheckpointError(
            f"The GGUF file states heads of different sizes {sorted(found)} for keys, values and positions, which "
            "is not supported; give another model."
        )
    return int(found.pop()) if found else sizes["hidden_size"] // sizes["num_attention_heads"]
