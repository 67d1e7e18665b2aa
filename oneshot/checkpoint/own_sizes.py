"""Results of ours whose layers have sizes of their own, as inputs: read as checkpoints of their family's own class."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from oneshot.architecture import (
    FURTHER_PREFIX,
    TABLES,
    Description,
    StackShape,
    TableShape,
    read_by,
    read_shape,
    scaled_epsilon,
)
from oneshot.architecture.stated_shapes import nemotron_nas_shape, per_layer_shape, resized_shape
from oneshot.checkpoint.compressed import again
from oneshot.checkpoint.low_rank import LowRank, multiplied
from oneshot.checkpoint.reader import Checkpoint
from oneshot.checkpoint.stock import complete_config, model_type_of, resized_config, settings_of_generation
from oneshot.errors import CheckpointError, cause
from oneshot.families import COMPRESSED, COMPRESSED_MODEL_TYPE, LLAMA, NAS_MODEL_TYPE, RESIZED_MODEL_TYPE, find_family

# what configs of the per-layer form under Llama's names have of the input's config
KEPT_KEYS = (
    *("attention_dropout", "dtype", "hidden_act", "initializer_range", "max_position_embeddings"),
    *("pad_token_id", "rms_norm_eps", "rope_parameters", "use_cache"),
)
# what a config may state of a model's use, which no class computes with
USE_KEYS = ("id2label", "label2id", "prefix", "problem_type", "sep_token_id", "task_specific_params", "tokenizer_class")
ENDS = ("bos_token_id", "eos_token_id")  # which null leaves without a value, and Llama's class gives one
# what families whose layers those classes hold call the dropout of a sublayer's output
RESIDUAL_DROPOUT = {"opt": "dropout", "phi3": "resid_pdrop"}
OF_RANGES = tuple(f"{table}_ranges" for table in TABLES)
OF_RESIZED = ("resized", "sizes", "layers_name", *OF_RANGES, "auto_map")  # what only the form's config has
PREFIX = "Oneshot"  # of the names of classes in the form's modelling file
WITHIN = "linear"  # the plain linear in a module of low rank
FLAGS = ("attention_bias", "output_bias", "mlp_bias", "query_key_norms", "gated", "norm_weights", "norm_bias")
Stated = tuple[dict[str, Any], StackShape]  # a config of the family's own class, and the result's sizes


def kept_of_input(config: dict[str, Any], complete: dict[str, Any]) -> dict[str, Any]:
    """Return what a config under Llama's names has of the input's, such as settings of generation.

    Args:
        config: as the input's file has it. transformers reads settings of generation there if no other file has them.
        complete: with the defaults of the input's class.
    """
    default = complete_config({"model_type": LLAMA.model_type})
    ends = {name: complete[name] for name in ENDS if name in complete and name not in config}
    kept = {name: complete[name] for name in KEPT_KEYS if complete.get(name) is not None}
    kept |= {name: config[name] for name in USE_KEYS if name in config}
    kept |= settings_of_generation(config) | {name: end for name, end in ends.items() if end != default[name]}
    dropout = complete.get(RESIDUAL_DROPOUT.get(complete["model_type"], "residual_dropout"))
    return kept | ({"residual_dropout": dropout} if dropout else {})


class _UnsupportedError(Exception):
    """A result is as oneshot writes it, but cannot be an input; the words say why."""


def as_stock(checkpoint: Checkpoint) -> Checkpoint:
    """Return a result of ours as a checkpoint of its family's own class; another checkpoint as it is.

    Its config states the largest sizes, and `stated` every layer's own.

    Raises `CheckpointError` for a result that cannot be an input, with what can be done instead, and for a config that
    oneshot did not write.
    """
    model_type, folder = checkpoint.config.get("model_type"), checkpoint.folder
    if not isinstance(model_type, str) or model_type not in COMPRESSED:
        return checkpoint
    try:
        config, stated = _stated(checkpoint)
        family = find_family(config | complete_config(config))
        if family.stack.experts is not None:
            raise _UnsupportedError("it is a mixture of experts")
        if family.stack.token_inputs is not None:
            raise _UnsupportedError("its layers read an embedding of their tokens")
        return _with_largest(_multiplied(checkpoint, config, stated, family), family, stated)
    except _UnsupportedError as error:
        raise CheckpointError(
            f"{folder} is a compressed model that cannot be compressed again, because {error}; {again(folder)}."
        ) from error


def _stated(checkpoint: Checkpoint) -> Stated:
    """Return what a result's config says in its family's own terms."""
    config = checkpoint.config
    if config["model_type"] not in STATED:
        raise _UnsupportedError("it is an encoder")
    try:
        stock, stated = STATED[config["model_type"]](config)
        _refuse(stated)
        complete_config(stock)
        return stock, stated
    except _UnsupportedError:
        raise
    except Exception as error:  # of values of any kind, in many types; the cause is named and chained
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'} does not state the sizes of its layers as oneshot writes them "
            f"({cause(error)}); give an unmodified result."
        ) from error


def _per_layer(config: dict[str, Any]) -> Stated:
    """Return a Llama's, a Qwen2's or a Qwen3's config: the class that has the biases and norms of the layers."""
    stack = per_layer_shape(config)
    first = stack.layers[0]
    if not first.gated or stack.num_positions or stack.head_bias or config.get("centred_embedding"):
        raise _UnsupportedError("its LayerNorms became RMSNorms, as no class of transformers has them")
    if stack.head == "mapped":
        raise _UnsupportedError("its output head reads the embedding through a matrix")
    hidden, width = first.hidden_size, int(config["norm_width"])
    stated = _as_llama(config, stack) | {"head_dim": config["head_dim"]}
    return stated | {"rms_norm_eps": scaled_epsilon(stated["rms_norm_eps"], width, hidden)}, stack


def _nemotron_nas(config: dict[str, Any]) -> Stated:
    stack = nemotron_nas_shape(config)
    return _as_llama(config, stack) | {"head_dim": config["head_dim"]}, stack


def _as_llama(config: dict[str, Any], stack: StackShape) -> dict[str, Any]:
    """Return the config of a class with Llama's layers; sizes are the largest."""
    of_input = kept_of_input(config, config) | {"model_type": LLAMA.model_type}  # which Llama's config class reads
    kept, layers = kept_of_input(of_input, complete_config(of_input)), stack.layers
    flags = {tuple(getattr(layer, name) for name in FLAGS) for layer in layers}
    if len(flags) > 1:
        raise ValueError("layers have different biases or norms")
    queries_biased, output_biased, ffn_biased, normed, *_ = flags.pop()
    name, classes = "qwen3" if normed else "llama", {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    if queries_biased and not output_biased and not normed:
        name = "qwen2"
    elif queries_biased != output_biased:
        raise _UnsupportedError("its linears have biases together that no class of transformers has")
    if ffn_biased and name != "llama":
        raise _UnsupportedError("its FFNs have biases beside those or the norms of its queries")
    return kept | {
        "model_type": name,
        "architectures": [f"{classes[name]}ForCausalLM"],
        "vocab_size": stack.vocab_size,
        "hidden_size": stack.embedding_size,
        "intermediate_size": max(layer.intermediate_size for layer in layers),
        "num_hidden_layers": len(layers),
        "num_attention_heads": max(layer.num_attention_heads for layer in layers),
        "num_key_value_heads": max(layer.num_key_value_heads for layer in layers),
        "tie_word_embeddings": stack.head == "tied",
        **({} if name == "qwen2" else {"attention_bias": queries_biased}),
        **({"mlp_bias": ffn_biased} if name == "llama" else {"use_sliding_window": False}),
    }


def _resized(config: dict[str, Any]) -> Stated:
    """Return the config of the family's class that the form's class is made from."""
    own = {name: value for name, value in config.items() if name not in OF_RESIZED}
    stock = [str(name).removeprefix(PREFIX) for name in config["architectures"]]
    ranges = {table: config.get(f"{table}_ranges") or [] for table in TABLES}  # which grow with the vocabulary
    sizes = config["sizes"] | ranges | {"vocab_size": config["vocab_size"]}
    stack = resized_shape({"sizes": sizes})
    return own | {
        "model_type": model_type_of(stock[0]),
        "architectures": stock,
        "tie_word_embeddings": stack.head == "tied",
    }, stack


STATED: dict[str, Callable[[dict[str, Any]], Stated]] = {
    COMPRESSED_MODEL_TYPE: _per_layer,
    NAS_MODEL_TYPE: _nemotron_nas,
    RESIZED_MODEL_TYPE: _resized,
}
"""Readers of a config.json of ours in its family's own terms, by its model type."""


def _refuse(stack: StackShape) -> None:
    """Raise `_UnsupportedError` for layers that differ in more than FFN widths, heads and ranks."""
    if any(layer.experts is not None for layer in stack.layers):  # whose heads may read a latent of other sizes
        raise _UnsupportedError("it is a mixture of experts")
    hidden, head_sizes = stack.embedding_size, {layer.value_size for layer in stack.layers if not layer.carried}
    for number, layer in enumerate(stack.layers):
        attends = layer.num_attention_heads > 0 or layer.carried > 0
        if not attends or not layer.intermediate_size:
            missing = "FFN" if attends else "attention"
            raise _UnsupportedError(f"its layer {number} has no {missing}")
        subspaces = {layer.hidden_size, layer.middle_size, layer.output_size} != {hidden}
        if subspaces or layer.attention_shortcut or layer.ffn_shortcut:
            raise _UnsupportedError("its layers have hidden sizes of their own")
        if not layer.carried and (layer.rotary_selected or {layer.query_key_size} | head_sizes != {layer.value_size}):
            raise _UnsupportedError("its heads have smaller sizes for queries and keys or for values")


def _multiplied(source: Checkpoint, config: dict[str, Any], stated: StackShape, family: Description) -> Checkpoint:
    """Return the view in which linears and the embedding have no ranks. Raises `CheckpointError` for other tensors."""
    stored = {name for name in source.shapes if not name.endswith("inv_freq")}
    if any(name.startswith(FURTHER_PREFIX) for name in stored):
        raise _UnsupportedError("it has layers that predict tokens after the next one")
    names, parts_of = ({name: name for name in stored}, {**_linears(source, stated, family), **_tables(stated, family)})
    parts, places = [part for of_one in parts_of.values() for part in of_one], _places(stated, family)
    files = {file for part in parts for file in part.names} | set(places.values())
    if missing := sorted(files - stored):
        raise CheckpointError(f"{source.folder} lacks {missing[0]}, of which its config.json tells; copy it again.")
    for file in files:
        del names[file]
    for module in _inner(source, stated, family):
        if (bias := names.pop(f"{module}.{WITHIN}.bias", None)) is not None:
            names[f"{module}.bias"] = bias
    count = sum(math.prod(source.shapes[name]) for name in stored)
    if count != stated.stored_parameters():
        raise CheckpointError(
            f"{source.folder} stores {count:,} parameters where its config.json tells of "
            f"{stated.stored_parameters():,}; give an unmodified result."
        )
    shapes, dtypes = source.shapes, source.dtypes
    matrices = {
        name: multiplied(of_one, shapes, dtypes, source.quantised.weights, places.get(name, ""))
        for name, of_one in parts_of.items()
    }
    beside_bytes = max((part.bytes_beside(shapes, dtypes) for part in parts), default=0)
    view = source.multiplying(matrices, names, stated, beside_bytes)
    view.config = config
    return view


def _ranked(stated: StackShape, family: Description) -> Iterator[tuple[str, str]]:
    """Yield every linear of low rank, and the module that it reads through."""
    for number, layer in enumerate(stated.layers):
        stack, prefix = family.stack_of(number), family.layer_prefix(number)
        for sublayer in stack.sublayers:
            for kind, linears in sublayer.mixer.ranked.items():
                if getattr(layer, f"{kind}_rank"):
                    yield from ((prefix + linear, prefix + read_by(sublayer.mixer, kind)) for linear in linears)


def _inner(source: Checkpoint, stated: StackShape, family: Description) -> list[str]:
    """Return the linears of low rank that are stored as a plain linear inside them."""
    return [linear for linear, _ in _ranked(stated, family) if f"{linear}.{WITHIN}.weight" in source.shapes]


def _linears(source: Checkpoint, stated: StackShape, family: Description) -> dict[str, list[LowRank]]:
    """Return the weights of low rank, and what they are made of."""
    inner, found = set(_inner(source, stated, family)), {}
    for linear, read in _ranked(stated, family):
        weight = f"{linear}.{WITHIN}.weight" if linear in inner else f"{linear}.weight"
        found[f"{linear}.weight"] = [LowRank(weight, f"{read}.weight", f"{read}.columns")]
    return found


def _ranged(stated: StackShape, family: Description) -> dict[str, tuple[TableShape, ...]]:
    """Return the embedding and the output head, of which ranges of the vocabulary are stored, with these ranges."""
    tables = {family.stack.embedding: stated.embedding, family.head or "": stated.output_head}
    return {weight: ranges for weight, ranges in tables.items() if ranges}


def _places(stated: StackShape, family: Description) -> dict[str, str]:
    """Return the tables that have ranges, and what lists the places of their tokens."""
    return {weight: f"{weight.removesuffix('.weight')}.places" for weight in _ranged(stated, family)}


def _tables(stated: StackShape, family: Description) -> dict[str, list[LowRank]]:
    """Return the tables that have ranges, and the parts of these."""
    found: dict[str, list[LowRank]] = {}
    for weight, ranges in _ranged(stated, family).items():
        module, parts = weight.removesuffix(".weight"), found.setdefault(weight, [])
        for number, table in enumerate(ranges):
            rows, to_width = f"{module}.tables.{number}.weight", f"{module}.maps.{number}"
            is_whole = table.rank >= stated.embedding_size
            parts.append(LowRank(rows) if is_whole else LowRank(rows, f"{to_width}.weight", f"{to_width}.columns"))
    return found


def _with_largest(view: Checkpoint, family: Description, stated: StackShape) -> Checkpoint:
    """Return the view whose config states the largest sizes of the layers."""
    shape = read_shape(family, view.config | complete_config(view.config), view.shapes)
    if shape.num_hidden_layers != len(stated.layers):
        raise CheckpointError(
            f"{view.folder / 'config.json'} states {shape.num_hidden_layers} layers and the sizes of "
            f"{len(stated.layers)}; give an unmodified result."
        )
    largest = replace(shape.with_layers(stated.layers), own_sizes=())
    if largest.num_attention_heads % largest.num_key_value_heads:
        raise _UnsupportedError("its layers have query heads and KV heads that no config states together")
    return view if largest == shape else view.stating(**resized_config(family, view.config, largest))
