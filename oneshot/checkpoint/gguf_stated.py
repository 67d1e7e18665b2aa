"""From a config.json to the metadata of the GGUF file of its model: the inverse of `gguf_config`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from oneshot.checkpoint.gguf_architectures import ARCHITECTURES
from oneshot.checkpoint.gguf_config import HEAD_SIZES, TOKENS, config_of, size_names
from oneshot.checkpoint.gguf_file import GgufTensor
from oneshot.checkpoint.gguf_rotary import reason_against_rotary, rotary_metadata
from oneshot.checkpoint.stock import complete_config, entries_of_all_classes
from oneshot.families import FAMILIES

# entries of a config.json that change nothing that a model computes
SILENT = ("architectures", "dtype", "initializer_range", "use_cache", "attention_dropout", *TOKENS.values())


def own_architecture(model_type: str) -> str | None:
    """Return the architecture that a family's models are written in as the stock class has them; None for others."""
    found = (name for name, one in ARCHITECTURES.items() if one.model_type == model_type and one.written is not None)
    return next(found, None)


def stated_keys(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file states below its architecture of the model of a complete config."""
    architecture = ARCHITECTURES[name]
    assert architecture.written is not None
    head_dim = config[FAMILIES[architecture.model_type].sizes.head_dim or "head_dim"]
    rotary = rotary_metadata(architecture.rotary(config))
    return (
        {key: config[own] for key, own in size_names(architecture).items()}
        | dict.fromkeys(HEAD_SIZES, head_dim)
        | {f"rope.{key}": value for key, value in rotary.items()}
        | architecture.written(config)
    )


def reason_against_stating(name: str, config: Mapping[str, Any]) -> str | None:
    """Return which entry of a config.json no file of an architecture states, as its reader finds it; None if all are.

    What is stated is read again as any file is, so both tables are compared.
    """
    wanted, architecture = complete_config(dict(config)), ARCHITECTURES[name]
    if (reason := reason_against_rotary(architecture.rotary(wanted))) is not None:
        return f"rope_parameters: {reason}"
    if architecture.tied and not wanted["tie_word_embeddings"]:
        return "tie_word_embeddings: False"
    if architecture.windowed and "sliding_attention" not in wanted["layer_types"]:
        return "layer_types: no layer has a sliding window"
    keys = {f"{name}.{key}": value for key, value in stated_keys(name, wanted).items()}
    metadata = {"general.architecture": name, **keys}
    tensors = {"token_embd.weight": GgufTensor((wanted["vocab_size"], wanted["hidden_size"]), "F32", 0, 0)}
    if not wanted["tie_word_embeddings"]:
        tensors["output.weight"] = tensors["token_embd.weight"]
    no_tables: dict[str, np.ndarray] = {}  # of factors
    read = complete_config(config_of(architecture, metadata, tensors, no_tables.__getitem__))
    silent = {*SILENT, *entries_of_all_classes()}
    if "sliding_attention" not in wanted.get("layer_types", ()):
        silent.add("sliding_window")
    for entry in sorted((wanted.keys() & read.keys()) - silent):
        if read[entry] != wanted[entry]:
            return _stated_differently(entry, wanted[entry], read[entry])
    return None


def _stated_differently(entry: str, wanted: Any, read: Any) -> str:
    """Return an entry with its value, or of records the first part that differs; the type of positions comes first."""
    if isinstance(wanted, dict) and isinstance(read, dict):
        for name in sorted(wanted, key=lambda name: name != "rope_type"):
            if name not in read or read[name] != wanted[name]:
                return _stated_differently(f"{entry}.{name}", wanted[name], read.get(name))
    return f"{entry}: {wanted}"
