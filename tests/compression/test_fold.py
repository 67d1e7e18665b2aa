"""Folding loses nothing where there is nothing to lose: redundant neurons and silent heads go, the function stays."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeConfig, build_model
from strategies import TOLERANCES

from oneshot import compress
from oneshot.checkpoint import Checkpoint
from oneshot.fold import augmented_weight, fold_ffn, fold_heads, head_columns
from oneshot.records import Factors

SaveModel = Callable[..., Path]
PROMPT = torch.randint(0, 400, (2, 30), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(PROMPT).logits


def load(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def assert_same_function(got: Any, wanted: Any) -> None:
    expected = logits(wanted)
    error = float((logits(got) - expected).abs().max() / expected.abs().max())
    assert error < TOLERANCES["float32 fold"]


@torch.no_grad()
def duplicate_neurons_(model: Any) -> None:
    """The second half of the neurons are copies of the first, with another share of the output."""
    for layer in model.model.layers:
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
            half = linear.weight.shape[0] // 2
            linear.weight[half:] = linear.weight[:half]
            if linear.bias is not None:
                linear.bias[half:] = linear.bias[:half]


@torch.no_grad()
def combine_neurons_(model: Any) -> None:
    """With the gate shared, an `up` row that is a combination of two gives one, too: half the rank."""
    for layer in model.model.layers:
        gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
        for first in range(0, gate.shape[0], 4):
            gate[first + 1 : first + 4] = gate[first]
            up[first + 2] = 0.7 * up[first] - 0.4 * up[first + 1]
            up[first + 3] = 0.2 * up[first] + 0.9 * up[first + 1]


@pytest.mark.parametrize("correction", ["same-layer", "two-stream"])
@pytest.mark.parametrize(
    ("family", "biases", "make_redundant"),
    [
        ("llama", False, duplicate_neurons_),
        ("llama", True, duplicate_neurons_),
        ("mistral", False, duplicate_neurons_),
        ("llama", False, combine_neurons_),
    ],
)
def test_redundant_neurons_fold_without_loss(
    correction: str,
    family: str,
    biases: bool,
    make_redundant: Callable[[Any], None],
    save_model: SaveModel,
    make_config: MakeConfig,
) -> None:
    model = build_model(family, attention_bias=biases, mlp_bias=biases)
    make_redundant(model)
    folder = save_model(model)
    half = 2 * 32 * (3 * 32 + 2 * biases)  # layers × neurons × parameters of a neuron
    config = make_config(
        folder,
        params=Checkpoint(folder).num_parameters - half,
        correction=correction,
        damping=1e-7,
        num_sequences=64,
    )
    report = compress(config)
    compressed = load(config.output)
    assert compressed.config.intermediate_size == 32
    assert_same_function(compressed, model)
    assert all(block.predicted_error < 0.01 for layer in report.layers for block in layer.blocks)


def test_without_correction_duplicates_do_lose(save_model: SaveModel, make_config: MakeConfig) -> None:
    """The test above could pass with no fold at all if the duplicates did not matter to the output."""
    model = build_model()
    duplicate_neurons_(model)
    folder = save_model(model)
    config = make_config(folder, params=Checkpoint(folder).num_parameters - 2 * 32 * 96, correction="none")
    compress(config)
    with pytest.raises(AssertionError):
        assert_same_function(load(config.output), model)


@pytest.mark.parametrize("correction", ["none", "same-layer", "two-stream"])
@pytest.mark.parametrize(
    ("biases", "unit", "groups", "silent", "kept"),
    [
        (False, "query-head", 2, (1, 2), (2, 2)),
        (True, "query-head", 2, (1, 2), (2, 2)),
        (False, "kv-group", 2, (0, 1), (2, 1)),
        (True, "kv-group", 2, (0, 1), (2, 1)),
        (False, "kv-group", 4, (2,), (3, 3)),
    ],
)
def test_silent_heads_fold_without_loss(
    correction: str,
    biases: bool,
    unit: str,
    groups: int,
    silent: tuple[int, ...],
    kept: tuple[int, int],
    save_model: SaveModel,
    make_config: MakeConfig,
) -> None:
    """Heads whose columns of `o_proj` are zero contribute nothing. The last case becomes Mistral (3 heads of 4)."""
    model = build_model(groups=groups, attention_bias=biases, mlp_bias=biases)
    with torch.no_grad():
        for layer in model.model.layers:
            for head in silent:
                layer.self_attn.o_proj.weight[:, head * 8 : (head + 1) * 8] = 0
    folder = save_model(model)
    removed = 4 - kept[0]
    key_value = 2 * (groups - kept[1]) * 8 * (32 + biases)
    surplus = 2 * (removed * 8 * (32 + biases) + removed * 8 * 32 + key_value)
    config = make_config(
        folder,
        params=Checkpoint(folder).num_parameters - surplus,
        recipe="stat",
        ffn="none",
        head_unit=unit,
        correction=correction,
        damping=1e-6,
    )
    report = compress(config)
    compressed = load(config.output)
    assert (compressed.config.num_attention_heads, compressed.config.num_key_value_heads) == kept
    assert_same_function(compressed, model)
    assert all(block.predicted_error < 0.01 for layer in report.layers for block in layer.blocks)


def test_folded_tensors_are_the_kept_rows_and_the_new_consumer() -> None:
    tensors = {
        "mlp.gate_proj.weight": torch.arange(20.0).view(5, 4),
        "mlp.gate_proj.bias": torch.arange(5.0),
        "mlp.up_proj.weight": torch.randn(5, 4),
        "mlp.up_proj.bias": torch.randn(5),
        "mlp.down_proj.weight": torch.randn(4, 5).bfloat16(),
        "mlp.down_proj.bias": torch.randn(4),
        "input_layernorm.weight": torch.randn(4),
    }
    kept = torch.tensor([0, 3, 5])  # column 5 is the bias
    weight = torch.randn(4, 3, dtype=torch.float64)
    folded = fold_ffn(tensors, Factors(kept=kept, weight=weight))
    assert torch.equal(folded["mlp.gate_proj.weight"], tensors["mlp.gate_proj.weight"][[0, 3]])
    assert torch.equal(folded["mlp.gate_proj.bias"], torch.tensor([0.0, 3.0]))
    assert torch.equal(folded["mlp.up_proj.weight"], tensors["mlp.up_proj.weight"][[0, 3]])
    assert torch.equal(folded["mlp.down_proj.weight"], weight[:, :2].bfloat16())
    assert torch.equal(folded["mlp.down_proj.bias"], weight[:, 2].float())
    assert folded["input_layernorm.weight"] is tensors["input_layernorm.weight"]
    assert tensors["mlp.gate_proj.weight"].shape == (5, 4), "the input is left alone"


def test_folded_heads_keep_the_groups_they_use() -> None:
    head_dim, heads = 2, torch.tensor([2, 3])  # both heads of the second of three groups
    tensors = {
        "self_attn.q_proj.weight": torch.randn(12, 4),
        "self_attn.k_proj.weight": torch.randn(6, 4),
        "self_attn.v_proj.weight": torch.randn(6, 4),
        "self_attn.o_proj.weight": torch.randn(4, 12),
    }
    columns = head_columns(heads, head_dim)
    assert columns.tolist() == [4, 5, 6, 7]
    weight = augmented_weight(tensors, "self_attn.o_proj")[:, columns].double()
    folded = fold_heads(tensors, Factors(kept=columns, weight=weight), heads=heads, heads_per_group=2, head_dim=2)
    assert torch.equal(folded["self_attn.q_proj.weight"], tensors["self_attn.q_proj.weight"][4:8])
    assert torch.equal(folded["self_attn.k_proj.weight"], tensors["self_attn.k_proj.weight"][2:4])
    assert torch.equal(folded["self_attn.v_proj.weight"], tensors["self_attn.v_proj.weight"][2:4])
    assert torch.equal(folded["self_attn.o_proj.weight"], tensors["self_attn.o_proj.weight"][:, 4:8])
