"""The sizes that the config.json of a form states whose layers have sizes of their own."""

from dataclasses import fields
from typing import Any

from oneshot.architecture.expert_sizes import ExpertSizes
from oneshot.architecture.latent import LatentSizes
from oneshot.architecture.layer_shape import TABLES, LayerShape, table_shapes
from oneshot.architecture.shapes import StackShape

# the per-layer form has no encoder–decoders and no norms of these kinds
NOT_IN_LAYERS = ("cross_attention", "num_buckets", "norms_all_heads", "norms_per_sublayer", "shared_norm")
WIDTH_STEP = 256  # engines that read `ffn_mult` round widths up to multiples of it


def per_layer_shape(config: dict[str, Any]) -> StackShape:
    """Return the sizes that the config.json of a per-layer checkpoint states."""
    names = {field.name for field in fields(LayerShape)} - set(NOT_IN_LAYERS)
    embedding, output_head = (table_shapes(config.get(table) or ()) for table in TABLES)
    ties = config["tie_word_embeddings"] or (embedding and not config.get("own_head"))
    return StackShape(
        tuple(LayerShape(**{name: layer[name] for name in names & layer.keys()}) for layer in config["layers"]),
        config["vocab_size"],
        "mapped" if config["head_map"] else "tied" if ties else "own",
        head_bias=config["head_bias"],
        num_positions=config["num_positions"],
        embedding=embedding,
        output_head=output_head,
    )


def resized_shape(config: dict[str, Any]) -> StackShape:
    """Return the sizes that the config.json of a per-layer checkpoint in its family's own class states."""
    sizes = config["sizes"]
    layers = tuple(_layer_shape(layer) for layer in sizes["layers"])
    tables = {table: table_shapes(sizes.get(table) or ()) for table in TABLES}
    return StackShape(**sizes | tables | {"layers": layers})


def _layer_shape(stated: dict[str, Any]) -> LayerShape:
    """Return the sizes of a layer from JSON."""
    experts, latent = stated.get("experts"), stated.get("latent")
    if experts is not None:
        experts = ExpertSizes(**experts | {"dense_layers": tuple(experts["dense_layers"])})
    return LayerShape(**stated | {"experts": experts, "latent": None if latent is None else LatentSizes(**latent)})


def nemotron_nas_shape(config: dict[str, Any]) -> StackShape:
    """Return the sizes that the config.json of a Nemotron-NAS checkpoint of ours states."""
    layers = tuple(_of_block(block, config) for block in config["block_configs"])
    return StackShape(layers, config["vocab_size"], "tied" if config["tie_word_embeddings"] else "own")


def _of_block(block: dict[str, Any], config: dict[str, Any]) -> LayerShape:
    """Return the sizes of a block; zero for a sublayer that is left out."""
    size, heads, groups, width = config["hidden_size"], 0, 0, 0
    if not block["attention"]["no_op"]:
        heads = config["num_attention_heads"]
        groups = heads // block["attention"]["n_heads_in_group"]
    if not block["ffn"]["no_op"]:
        width = ffn_width(block["ffn"], size)
    return LayerShape(
        hidden_size=size,
        middle_size=size,
        output_size=size,
        intermediate_size=width,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        query_key_size=config["head_dim"],
        value_size=config["head_dim"],
        attention_bias=config["qkv_bias"],
        output_bias=config["attention_bias"],
        mlp_bias=config["mlp_bias"],
    )


def ffn_width(ffn: dict[str, Any], hidden_size: int) -> int:
    """Return the FFN width of a block config, as engines read it."""
    if ffn.get("ffn_mult") is None:
        return int(ffn["intermediate_size"])
    return -(-int(2 * ffn["ffn_mult"] * hidden_size / 3) // WIDTH_STEP) * WIDTH_STEP
