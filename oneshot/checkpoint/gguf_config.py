"""From the metadata of a GGUF file to the config.json of the model in it."""

import math
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from oneshot.checkpoint.compressed import again
from oneshot.checkpoint.gguf_architectures import ARCHITECTURES, KV_HEADS, Architecture
from oneshot.checkpoint.gguf_file import GgufTensor
from oneshot.checkpoint.gguf_rotary import (
    FACTORS,
    LONG_FACTORS,
    ROTARY_KEYS,
    SHORT_FACTORS,
    longrope_parameters,
    rotary_parameters,
)
from oneshot.checkpoint.pooling import KINDS
from oneshot.checkpoint.stock import with_head
from oneshot.errors import CheckpointError
from oneshot.families import FAMILIES

HEAD_SIZES = ("attention.key_length", "attention.value_length")
ROTARY_SIZE = "rope.dimension_count"
# keys of the architecture that change nothing if they have this value, and those that change nothing at all
NEUTRAL = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}
KIND, MODEL = "general.type", "model"  # others: adapters, projectors of images (mmproj), importance matrices
OWN_SIZES = "deci"  # the architecture of `--form gguf` if layers differ
POOLING = "pooling_type"  # of the last states, for embeddings of texts
SILENT = ("vocab_size", ROTARY_SIZE, *HEAD_SIZES)
TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}


def architecture_of(metadata: Mapping[str, Any], path: Path) -> Architecture:
    """Return the description of the architecture of a file with this metadata.

    Raises `CheckpointError` for one that is not known, and for a file that holds something else than a model.

    `path`: of the file, for the message.
    """
    name, kind = metadata.get("general.architecture"), metadata.get(KIND, MODEL)
    if kind != MODEL or name is None:
        reason = f"{KIND} is {kind}" if kind != MODEL else "it states no general.architecture"
        raise CheckpointError(
            f"The GGUF file {path} does not hold a language model ({reason}); give the file of the model itself."
        )
    if name == OWN_SIZES:
        raise CheckpointError(
            f"The layers of this GGUF file have sizes of their own (architecture {name}); to compress further, "
            f"{again(path.parent)}; to measure it, give oneshot evaluate the file in its folder with "
            f"config.json, or run llama-perplexity -m {shlex.quote(str(path))} -f YOUR_TEXT."
        )
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"The GGUF architecture {name} is not supported ({', '.join(ARCHITECTURES)} are); give the model it "
            "came from as safetensors."
        )
    return ARCHITECTURES[name]


def config_of(
    architecture: Architecture,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, GgufTensor],
    read: Callable[[str], np.ndarray],
) -> dict[str, Any]:
    """Return the config.json that states what a file's metadata and tensors say; its dtype is float32.

    Raises `CheckpointError` for a key that is not known: it could change what the model computes.

    `read`: returns the values of a tensor.
    """
    prefix = f"{metadata['general.architecture']}."
    stated = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    names = size_names(architecture)
    _refuse_unknown(stated, {*names, *architecture.keys})
    for key in names:  # writers also list a number for every layer
        value = stated.get(key)
        if isinstance(value, list) and len(value) == stated.get("block_count") and len(set(value)) == 1:
            stated[key] = value[0]
    sizes = {name: stated[key] for key, name in names.items() if key in stated}
    for key, name in names.items():
        if isinstance(sizes.get(name, 0), list) or (name not in sizes and key != KV_HEADS):
            raise CheckpointError(
                f"The GGUF file states {key} {sizes.get(name)}, not one number for all layers; give the model it came "
                "from."
            )
    if FAMILIES[architecture.model_type].stack.attention.one_group and stated.get(KV_HEADS, 1) != 1:
        raise CheckpointError(
            f"The GGUF file states {KV_HEADS} {stated[KV_HEADS]}, which is not supported for "
            f"{architecture.model_type}; give a model with one."
        )
    head_dim, rotary_size = _head_sizes(architecture, stated, sizes)
    keys = FAMILIES[architecture.model_type].sizes
    config = (
        sizes
        | _special_tokens(metadata)
        | {
            "dtype": "float32",
            "model_type": architecture.model_type,
            "tie_word_embeddings": "output.weight" not in tensors,
            "vocab_size": tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 0,
        }
        | dict(architecture.stated)
        | {name: tensor in tensors for name, tensor in architecture.biases.items()}
    )
    if keys.head_dim is not None:
        config[keys.head_dim] = head_dim
    if FAMILIES[architecture.model_type].stack.rotary:
        tables = [read(name) if name in tensors else None for name in (FACTORS, LONG_FACTORS, SHORT_FACTORS)]
        config |= _positions(tables, stated, rotary_size, config[architecture.context])
        if rotary_size != head_dim:
            config["rope_parameters"]["partial_rotary_factor"] = rotary_size / head_dim
    try:
        config |= architecture.further(stated, config)
    except ValueError as error:
        raise CheckpointError(
            f"The GGUF file states what no config.json does ({error}); give the model it came from."
        ) from error
    return config | {"architectures": [with_head(config)]}


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the ids of a file's special tokens by their names in a config, None for those that it does not state."""
    tokens = metadata.get("tokenizer.ggml.tokens")  # of an array of strings, their number
    count = tokens if isinstance(tokens, int | None) else len(tokens)
    found: dict[str, int | None] = {}
    for key, name in TOKENS.items():
        found[name] = number = metadata.get(f"tokenizer.ggml.{key}")
        if number is not None and count is not None and not 0 <= number < count:
            raise CheckpointError(
                f"The GGUF file states tokenizer.ggml.{key} {number}, but it has {count} tokens; give an "
                "undamaged file."
            )
    return found


def size_names(architecture: Architecture) -> dict[str, str]:
    """Return the config's name of every number that a file must state, by the file's key."""
    family = FAMILIES[architecture.model_type]
    kind = "layer_norm" if family.stack.centres else "layer_norm_rms"
    sizes = family.sizes
    listed = {
        "context_length": architecture.context,
        "embedding_length": sizes.hidden_size,
        "block_count": sizes.num_hidden_layers,
        "feed_forward_length": sizes.intermediate_size,
        "attention.head_count": sizes.num_attention_heads,
        KV_HEADS: sizes.num_key_value_heads or "",
        f"attention.{kind}_epsilon": sizes.norm_epsilon or "",
    }
    return {key: name for key, name in listed.items() if name}


def _positions(
    tables: list[np.ndarray | None], stated: dict[str, Any], rotary_size: int, context_length: int
) -> dict[str, Any]:
    """Return the entries of a config that state a file's rotary positions."""
    rotary = {key.removeprefix("rope."): value for key, value in stated.items() if key.startswith("rope.")}
    factors, long, short = tables
    try:
        if long is not None and short is not None:
            found = longrope_parameters(rotary, long, short, context_length=context_length)
            original = {"original_max_position_embeddings": found["original_max_position_embeddings"]}
            return {"rope_parameters": found} | original
        return {
            "rope_parameters": rotary_parameters(rotary, factors, head_dim=rotary_size, context_length=context_length)
        }
    except ValueError as error:
        raise CheckpointError(
            f"The GGUF file has rotary positions that no config.json states ({error}); give the model it came from."
        ) from error


def _refuse_unknown(stated: dict[str, Any], read: set[str]) -> None:
    known = {*read, *SILENT, *(f"rope.{key}" for key in ROTARY_KEYS)}
    for key, value in stated.items():
        listed = value if isinstance(value, list) else [value]
        if any(isinstance(one, float) and not math.isfinite(one) for one in listed):
            raise CheckpointError(f"The GGUF file states {key} {value}, which is not a number; give an undamaged file.")
        if key in known or (key in NEUTRAL and value == NEUTRAL[key]) or (key == POOLING and value in (0, *KINDS)):
            continue
        raise CheckpointError(
            f"The GGUF file states {key} {value}, which oneshot does not know; give the model it came from as "
            "safetensors."
        )


def _head_sizes(architecture: Architecture, stated: dict[str, Any], sizes: dict[str, Any]) -> tuple[int, int]:
    """Return the size of heads, and how much of them positions turn."""
    keys = FAMILIES[architecture.model_type].sizes
    found = {stated[key] for key in HEAD_SIZES if key in stated}
    default = sizes[keys.hidden_size] // sizes[keys.num_attention_heads]
    if ROTARY_SIZE in stated and not architecture.partly_rotary:
        found.add(stated[ROTARY_SIZE])
    if len(found) > 1:
        raise CheckpointError(
            f"The GGUF file states heads of different sizes {sorted(found)} for keys, values and positions, which "
            "is not supported; give another model."
        )
    head_dim = int(found.pop()) if found else default
    return head_dim, int(stated.get(ROTARY_SIZE, head_dim))
