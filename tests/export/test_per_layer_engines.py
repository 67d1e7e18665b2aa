"""What other engines read of the per-layer form: `per_layer_config`, a pass without a dictionary, vLLM's plugin."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, module_of_the_plugin, randomise
from torch import nn

from oneshot.evaluation.models import load_model
from oneshot.export import modeling_oneshot
from oneshot.pipeline import compress

CPU = torch.device("cpu")
TOKEN_IDS = torch.randint(2, 400, (2, 24), generator=torch.Generator().manual_seed(1))
PLANS: dict[str, dict[str, Any]] = {
    "heads": {"heads": "id", "head_unit": "kv-group", "sparsity": 0.4, "embedding": "none"},
    "groups": {"recipe": "group-pca", "group_size": 1, "hidden_size": 24},
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_call_without_a_dictionary_gives_the_same_states(
    plan: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(layers=3, tied=True), form="per-layer", **plan)
    compress(config)
    model = load_model(Path(config.output), device=CPU, dtype=torch.float32).model
    with torch.inference_mode():
        states = model(TOKEN_IDS, use_cache=False).last_hidden_state
        (first, *_) = model(input_ids=TOKEN_IDS, use_cache=False, return_dict=False)
    torch.testing.assert_close(first, states, rtol=0, atol=0)


def test_transformers_knows_the_sizes_of_every_layer(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = make_config(make_checkpoint(layers=4), form="per-layer", **PLANS["heads"])
    compress(config)
    read = AutoConfig.from_pretrained(config.output, trust_remote_code=True)
    assert read.is_heterogeneous
    names = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
    stated = [{name: layer[name] for name in names} for layer in read.layers]
    assert [{name: getattr(layer, name) for name in names} for layer in read.per_layer_config] == stated
    assert len({layer["num_key_value_heads"] for layer in stated}) > 1
    model = AutoModelForCausalLM.from_pretrained(config.output, trust_remote_code=True)
    model.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (
        again["per_layer_config"] == json.loads((Path(config.output) / "config.json").read_text())["per_layer_config"]
    )
    with torch.inference_mode():
        reread = AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
        torch.testing.assert_close(reread(TOKEN_IDS).logits, model(TOKEN_IDS).logits, rtol=0, atol=0)


def test_equal_layers_need_no_sizes_of_their_own(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint(), form="per-layer", allocation="uniform", embedding="none")
    compress(config)
    assert "per_layer_config" not in json.loads((Path(config.output) / "config.json").read_text())


def test_the_plugin_for_vllm_has_the_fields_of_the_config() -> None:
    module = module_of_the_plugin("config")
    ours, theirs = (
        {each.name: each.default for each in fields(config)}
        for config in (module.OneshotConfig, modeling_oneshot.OneshotConfig)
    )
    assert ours == theirs
    assert module.OneshotConfig.model_type == modeling_oneshot.OneshotConfig.model_type


class LogitsOfRange(nn.Module):
    """What vLLM's `LogitsProcessor` computes on one GPU."""

    def __init__(self, _: int) -> None:
        super().__init__()

    def forward(self, table: nn.Embedding, states: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(states, table.weight)


class Unquantised:
    """Stand in for vLLM's linears and tables in 16 or 32 bits on one GPU."""

    def create_weights(
        self, layer: nn.Module, inputs: int, outputs: list[int], *_: object, weight_loader: Callable[..., None]
    ) -> None:
        layer.weight = nn.Parameter(torch.empty(sum(outputs), inputs), requires_grad=False)
        vars(layer.weight)["weight_loader"] = weight_loader

    def apply(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight)


def load_(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill a module of the plugin as its `load_weights` does."""
    places = dict(module.named_parameters()) | dict(module.named_buffers())
    assert set(places) == set(tensors)
    for name, place in places.items():
        load = getattr(place, "weight_loader", lambda place, tensor: place.copy_(tensor))
        load(place, tensors[name])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@torch.no_grad()
def test_the_plugin_for_vllm_looks_up_what_the_modelling_file_does(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare embeddings and logits of every token, and rows that linears of low rank read, by equal weights."""
    layers = "vllm.model_executor.layers"
    for name, stand_in in (
        ("logits_processor", {"LogitsProcessor": LogitsOfRange}),
        ("linear", {"UnquantizedLinearMethod": Unquantised}),
        (
            "vocab_parallel_embedding",
            {"VocabParallelEmbedding": nn.Embedding, "UnquantizedEmbeddingMethod": Unquantised},
        ),
    ):
        module = ModuleType(f"{layers}.{name}")
        vars(module).update(stand_in)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for parent in ("vllm", "vllm.model_executor", layers):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    plugin, width = module_of_the_plugin("low_rank"), 16
    ranges = [{"rows": 12, "rank": 8}, {"rows": 7, "rank": width}, {"rows": 5, "rank": 4}]
    ours = modeling_oneshot.OneshotEmbedding(ranges, width)
    randomise(ours, 0)
    for read in ours.maps:
        if isinstance(read, modeling_oneshot.OneshotCoordinates):
            read.columns.copy_(torch.randperm(width, generator=torch.Generator().manual_seed(2)))
    ours.to(dtype)
    theirs = plugin.Embedding(ranges, width).to(dtype)
    load_(theirs, ours.state_dict())
    tokens, states = torch.arange(24), torch.randn(5, width, generator=torch.Generator().manual_seed(3)).to(dtype)
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(theirs(tokens), ours(tokens[None])[0], **close)
    torch.testing.assert_close(theirs.logits(states), ours(states, to_logits=True), **close)
    whole = torch.cat([rows_of(ours, number) for number in range(len(ranges))])
    torch.testing.assert_close(ours(tokens[None])[0].double(), whole, **close)
    torch.testing.assert_close(ours(states, to_logits=True).double(), states.double() @ whole.T, **close)


def rows_of(embedding: modeling_oneshot.OneshotEmbedding, number: int) -> torch.Tensor:
    """Return the rows of a range at full width in float64, by one assignment of columns."""
    table, read = embedding.tables[number].weight.detach().double(), embedding.maps[number]
    if isinstance(read, nn.Identity):
        return table
    every = torch.empty(len(table), len(read.columns), dtype=torch.float64)
    every[:, read.columns] = torch.cat((table, table @ read.weight.detach().double().T), dim=1)
    return every
