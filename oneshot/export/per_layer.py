"""Tier B, `per-layer`: a checkpoint with sizes of every layer's own, and the modelling file that reads it."""

import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from oneshot.arch.base import PER_LAYER_MODEL_TYPE
from oneshot.errors import PlanError
from oneshot.records import LayerShape, ModelShape, StackShape, TableShape

KEPT_KEYS = (
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "hidden_act",
    "initializer_range",
    "max_position_embeddings",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "use_cache",
)
LAYER_NORM_EPSILON = 1e-5  # PyTorch's default, which no config states
MODELLING_FILE = Path(__file__).parent.parent / "modeling_oneshot.py"


def per_layer_config(config: dict[str, Any], shape: ModelShape, stack: StackShape) -> dict[str, Any]:
    """The config.json of a per-layer checkpoint, from that of the model that was compressed and the new sizes.

    Raises `PlanError` for a model with a sliding attention window, which the per-layer form does not have.
    """
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise PlanError(
            f"The model attends within a window of {config['sliding_window']} tokens, which the per-layer form cannot "
            "hold; use a recipe with --tier stock."
        )
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # what the config leaves to its family's defaults, and older spellings of it, must not become Llama's defaults
    complete = CONFIG_MAPPING[config["model_type"]].from_dict(config).to_dict()
    kept = {name: complete[name] for name in KEPT_KEYS if complete.get(name) is not None}
    if shape.norm_bias:
        kept |= {"hidden_act": complete["activation_function"], "rms_norm_eps": LAYER_NORM_EPSILON}
    return kept | {
        "model_type": PER_LAYER_MODEL_TYPE,
        "architectures": ["OneshotForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{MODELLING_FILE.stem}.OneshotConfig",
            "AutoModel": f"{MODELLING_FILE.stem}.OneshotModel",
            "AutoModelForCausalLM": f"{MODELLING_FILE.stem}.OneshotForCausalLM",
        },
        "vocab_size": stack.vocab_size,
        "hidden_size": stack.embedding_size,
        "intermediate_size": stack.layers[0].intermediate_size,
        "num_hidden_layers": len(stack.layers),
        "num_attention_heads": stack.layers[0].num_attention_heads,
        "num_key_value_heads": stack.layers[0].num_key_value_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": stack.head != "own" and not stack.embedding,
        "embedding": [asdict(table) for table in stack.embedding] or None,
        "head_map": stack.head == "mapped",
        "head_bias": stack.head_bias,
        "num_positions": stack.num_positions,
        "norm_width": shape.hidden_size,
        "layers": [asdict(layer) for layer in stack.layers],
    }


def per_layer_shape(config: dict[str, Any]) -> StackShape:
    """The sizes that the config.json of a per-layer checkpoint states."""
    names = {field.name for field in fields(LayerShape)}
    embedding = tuple(TableShape(**table) for table in config.get("embedding") or ())
    return StackShape(
        tuple(LayerShape(**{name: layer[name] for name in names}) for layer in config["layers"]),
        config["vocab_size"],
        "mapped" if config["head_map"] else "tied" if config["tie_word_embeddings"] or embedding else "own",
        head_bias=config["head_bias"],
        num_positions=config["num_positions"],
        embedding=embedding,
    )


def model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """The config and the model class for a config.json; for the per-layer form our own, so that no file is run."""
    if config.get("model_type") == PER_LAYER_MODEL_TYPE:
        from oneshot.modeling_oneshot import OneshotConfig, OneshotForCausalLM

        return OneshotConfig, OneshotForCausalLM
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[config["model_type"]]
    return config_class, MODEL_FOR_CAUSAL_LM_MAPPING[config_class]


def write_modelling_file(folder: Path) -> None:
    """Copy the modelling file that `auto_map` names beside the weights."""
    shutil.copyfile(MODELLING_FILE, folder / MODELLING_FILE.name)
