"""The sizes of layers in config.json are a border: results that were written keep their meaning.

`stated_sizes.json` has what each form states, with the keys in their order. Earlier commits stated fewer sizes of a
layer.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oneshot.architecture import ExpertSizes, LatentSizes, LayerShape, ModelShape, StackShape, TableShape
from oneshot.architecture.stated_shapes import nemotron_nas_shape, per_layer_shape, resized_shape
from oneshot.export import renamed_ranks
from oneshot.export.encoder import encoder_config, encoder_shape
from oneshot.export.nemotron_nas import nemotron_nas_config
from oneshot.export.per_layer import per_layer_config
from oneshot.export.resized import stated_sizes

WRITTEN: dict[str, Any] = json.loads((Path(__file__).parent / "stated_sizes.json").read_text())
WHOLE = LayerShape(32, 32, 32, 64, 4, 2, query_key_size=8, value_size=8)
NARROW = replace(WHOLE, intermediate_size=40, num_attention_heads=2, num_key_value_heads=1)
INNER = replace(WHOLE, middle_size=24, query_key_size=4, value_size=6, attention_shortcut=True, rotary_selected=True)
RANKED = replace(NARROW, query_key_rank=5, output_rank=6, gate_rank=7, up_rank=9, attention_bias=True, output_bias=True)
EXPERTS = replace(WHOLE, intermediate_size=16, experts=ExpertSizes(5, 2, shared_count=1, dense_layers=(0,)), sinks=True)
LATENT = replace(WHOLE, latent=LatentSizes(query_rank=0, rank=16, plain_size=8, rotary_size=4), norms_per_sublayer=2)
CARRIED = replace(NARROW, num_attention_heads=0, num_key_value_heads=0, carried=123)
SUMS = replace(NARROW, output_size=24, norm_weights=False, attention_shortcut=True, ffn_shortcut=True, gated=False)
TABLES = TableShape(100, 32), TableShape(300, 12)
STACKS = {
    "per-layer": StackShape((WHOLE, INNER, RANKED), 400, "tied", embedding=TABLES),
    "resized": StackShape((NARROW, RANKED, EXPERTS, LATENT, CARRIED), 400, "own", table_width=16),
    "nemotron-nas": StackShape((WHOLE, replace(WHOLE, intermediate_size=40, num_key_value_heads=1)), 400, "own"),
    "encoder": StackShape(
        (WHOLE, SUMS), 400, "none", num_token_types=2, num_positions=64, final_norm=False, output_size=32, causal=False
    ),
}
SHAPE = ModelShape(2, 32, 64, 4, 2, 8, vocab_size=400)
LLAMA, BERT = {"model_type": "llama", "hidden_size": 32}, {"model_type": "bert", "max_position_embeddings": 64}
WRITERS: dict[str, Callable[[StackShape], dict[str, Any]]] = {
    "per-layer": lambda stack: per_layer_config(LLAMA, SHAPE, stack),
    "resized": lambda stack: {"sizes": stated_sizes(stack)},
    "nemotron-nas": lambda stack: nemotron_nas_config(LLAMA, SHAPE, stack),
    "encoder": lambda stack: encoder_config(BERT, SHAPE, stack, has_pooler=False),
}
READERS = {
    "per-layer": per_layer_shape,
    "resized": resized_shape,
    "nemotron-nas": nemotron_nas_shape,
    "encoder": encoder_shape,
}
# of a layer, in the order in which commits added them to what is stated
ADDED = (
    ("norm_weights",),
    ("query_key_rank", "output_rank"),
    ("gate_rank", "up_rank"),
    ("experts",),
    ("latent",),
    ("sinks",),
    ("carried",),
)


@pytest.mark.parametrize("form", STACKS)
def test_sizes_are_written_and_read_as_they_always_were(form: str) -> None:
    written = WRITTEN[form]
    config = WRITERS[form](STACKS[form])
    assert json.dumps({name: config[name] for name in written}) == json.dumps(written)
    assert READERS[form](written) == STACKS[form]


@pytest.mark.parametrize("form", ["per-layer", "resized", "encoder"])
@pytest.mark.parametrize("first", range(len(ADDED)))
def test_sizes_without_what_was_added_later_are_read(form: str, first: int) -> None:
    absent = {name for names in ADDED[first:] for name in names}
    plain = (WHOLE, replace(NARROW, mlp_bias=True), replace(NARROW, query_key_norms=True))
    stack = replace(STACKS[form], layers=plain, embedding=())
    config = json.loads(json.dumps(WRITERS[form](stack)))
    sizes = config["sizes"] if form == "resized" else config
    sizes["layers"] = [{name: one for name, one in layer.items() if name not in absent} for layer in sizes["layers"]]
    assert READERS[form](config) == stack


def test_a_per_layer_config_of_a_time_that_stated_cross_attention_is_read() -> None:
    config = json.loads(json.dumps(WRITTEN["per-layer"]))
    for layer in config["layers"]:
        layer |= {"cross_attention": False, "num_buckets": 0}
    assert per_layer_shape(config) == STACKS["per-layer"]


def test_older_names_of_low_rank_tensors_are_known() -> None:
    linears = {"mlp.up_proj": [40, "mlp.up_read"], "mlp.down_proj": [32, 40]}
    config = {"model_type": "oneshot-resized", "layers_name": "model.layers", "resized": [{"linears": linears}]}
    name = "model.layers.0.mlp.up_proj"
    assert renamed_ranks(config) == {f"{name}.{part}": f"{name}.linear.{part}" for part in ("weight", "bias")}
    assert renamed_ranks(config | {"model_type": "oneshot"}) == {}
