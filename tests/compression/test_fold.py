"""Folding loses nothing of redundant layers: duplicate neurons and silent heads go, the function stays."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeConfig, build_model
from strategies import TOLERANCES

from oneshot.architecture import Description, ModelShape
from oneshot.checkpoint import Checkpoint, open_model
from oneshot.compression.correction import Factors
from oneshot.compression.fold import augmented_weight, cut_heads, fold_sublayer, head_columns, row_energy, to_rms_norms
from oneshot.families import FAMILIES, LLAMA
from oneshot.pipeline import compress

SaveModel = Callable[..., Path]
PROMPT = torch.randint(0, 400, (2, 30), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(PROMPT).logits


def load(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def assert_same_function(compressed: Any, dense: Any) -> None:
    expected = logits(dense)
    error = float((logits(compressed) - expected).abs().max() / expected.abs().max())
    assert error < TOLERANCES["float32 fold"]


@torch.no_grad()
def duplicate_neurons_(model: Any) -> None:
    """Make the second half of the neurons copies of the first, with another share of the output."""
    stack = FAMILIES[model.config.model_type].stack
    for layer in model.get_submodule(stack.layers):
        for linear in map(layer.get_submodule, stack.ffn.readers):
            half = linear.weight.shape[0] // 2
            linear.weight[half:] = linear.weight[:half]
            if linear.bias is not None:
                linear.bias[half:] = linear.bias[:half]


@torch.no_grad()
def combine_neurons_(model: Any) -> None:
    """Share gates among four neurons, and make two of their `up` rows combinations of the others: half the rank."""
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
        ("opt", True, duplicate_neurons_),
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
    readers = len(FAMILIES[family].stack.ffn.readers)
    half = 2 * 32 * ((readers + 1) * 32 + readers * biases)  # layers × neurons × parameters of a neuron
    config = make_config(
        folder,
        parameters=Checkpoint(folder).num_parameters - half,
        correction=correction,
        damping=1e-7,
        num_sequences=64,
    )
    report = compress(config)
    compressed = load(config.output)
    assert getattr(compressed.config, FAMILIES[family].sizes.intermediate_size) == 32
    assert_same_function(compressed, model)
    errors = [sublayer.predicted_error for layer in report.layers for sublayer in layer.sublayers]
    assert all(error is not None and error < 0.01 for error in errors)


def test_without_correction_duplicates_do_lose(save_model: SaveModel, make_config: MakeConfig) -> None:
    """The test above could pass with no fold at all if the duplicates did not matter to the output."""
    model = build_model()
    duplicate_neurons_(model)
    folder = save_model(model)
    config = make_config(folder, parameters=Checkpoint(folder).num_parameters - 2 * 32 * 96, correction="none")
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
        parameters=Checkpoint(folder).num_parameters - surplus,
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
    errors = [sublayer.predicted_error for layer in report.layers for sublayer in layer.sublayers]
    assert all(error is not None and error < 0.01 for error in errors)


# one family with all its biases, one without them, and one with other names and an FFN without a gate
FOLDED: list[tuple[str, bool]] = [("llama", True), ("llama", False), ("qwen3", False), ("opt", True)]


def random_layer(family: Description, biases: bool) -> tuple[ModelShape, dict[str, torch.Tensor]]:
    """Return sizes with 3 groups of 2 heads, and tensors under the family's names."""
    shape = ModelShape(
        num_hidden_layers=1,
        hidden_size=4,
        intermediate_size=5,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=2,
        attention_bias=biases,
        output_bias=biases,
        mlp_bias=biases,
        query_key_norms=family.stack.attention.q_norm is not None,
        layer_norms=family.stack.centres,
        norm_bias=family.stack.centres,
        gated=family.stack.ffn.gate is not None,
    )
    return shape, {name: torch.randn(size) for name, size in family.expected_tensors(shape).items()}


def assert_only_changed(folded: dict[str, torch.Tensor], dense: dict[str, torch.Tensor], linears: set[str]) -> None:
    """Check that the names stay, and that every tensor of other modules is the same object."""
    assert folded.keys() == dense.keys()
    for name, tensor in dense.items():
        if name.rpartition(".")[0] not in linears:
            assert folded[name] is tensor, name


@pytest.mark.parametrize(("name", "biases"), FOLDED)
def test_a_folded_ffn_has_the_kept_rows_and_the_new_writer(name: str, biases: bool) -> None:
    family = FAMILIES[name]
    ffn, index = family.stack.ffn, family.stack.index_of("ffn")
    shape, tensors = random_layer(family, biases)
    tensors[f"{ffn.down}.weight"] = tensors[f"{ffn.down}.weight"].bfloat16()
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    kept_columns = torch.tensor([0, 3, 5] if biases else [0, 3])  # column 5 is the bias
    weight = torch.randn(4, len(kept_columns), dtype=torch.float64)
    folded = fold_sublayer(tensors, family.stack.sublayers[index], shape, Factors(kept_columns, weight))
    assert_only_changed(folded, tensors, {*ffn.readers, ffn.down})
    for linear in ffn.readers:
        assert torch.equal(folded[f"{linear}.weight"], tensors[f"{linear}.weight"][[0, 3]])
        if biases:
            assert torch.equal(folded[f"{linear}.bias"], tensors[f"{linear}.bias"][[0, 3]])
    assert torch.equal(folded[f"{ffn.down}.weight"], weight[:, :2].bfloat16())
    if biases:
        assert torch.equal(folded[f"{ffn.down}.bias"], weight[:, 2].float())
    assert all(torch.equal(tensors[key], tensor) for key, tensor in before.items()), "the input stays as it was"
    expected = family.expected_tensors(replace(shape, intermediate_size=2))
    assert {key: tuple(tensor.shape) for key, tensor in folded.items()} == expected


@pytest.mark.parametrize(("name", "biases"), FOLDED)
@pytest.mark.parametrize(("heads", "groups"), [([2, 3], [1]), ([1, 2, 5], [0, 1, 2])])
def test_folded_heads_keep_the_groups_that_they_use(
    heads: list[int], groups: list[int], name: str, biases: bool
) -> None:
    family = FAMILIES[name]
    attention, index = family.stack.attention, family.stack.index_of("heads")
    shape, tensors = random_layer(family, biases)
    columns = head_columns(torch.tensor(heads), 2)
    assert columns.tolist() == [column for head in heads for column in (2 * head, 2 * head + 1)]
    weight = augmented_weight(tensors, attention.out)
    kept_columns = torch.cat((columns, torch.tensor([12]))) if biases else columns  # column 12 is the bias
    factors = Factors(kept_columns, weight[:, kept_columns].double())
    folded = fold_sublayer(tensors, family.stack.sublayers[index], shape, factors)
    if attention.fixed_heads:
        silent = folded[f"{attention.out}.weight"].clone()
        assert torch.equal(folded[f"{attention.q}.weight"], tensors[f"{attention.q}.weight"])
        silent[:, columns] = 0
        assert not silent.any()
        folded = cut_heads(folded, attention, shape, torch.tensor(heads))
    assert_only_changed(folded, tensors, {*attention.readers, attention.out})
    rows_of_groups = [row for group in groups for row in (2 * group, 2 * group + 1)]
    for linear, rows in ((attention.q, columns), (attention.k, rows_of_groups), (attention.v, rows_of_groups)):
        assert torch.equal(folded[f"{linear}.weight"], tensors[f"{linear}.weight"][rows])
        if biases:
            assert torch.equal(folded[f"{linear}.bias"], tensors[f"{linear}.bias"][rows])
    assert torch.equal(folded[f"{attention.out}.weight"], tensors[f"{attention.out}.weight"][:, columns])
    if biases:
        assert torch.equal(folded[f"{attention.out}.bias"], tensors[f"{attention.out}.bias"])


def test_row_energies_add_up_over_linears() -> None:
    _, tensors = random_layer(LLAMA, biases=True)
    ffn = LLAMA.stack.ffn
    both = torch.cat([tensors[f"{linear}.weight"] for linear in ffn.readers], dim=1)
    torch.testing.assert_close(row_energy(tensors, *ffn.readers), both.norm(dim=1).square())


@torch.inference_mode()
def test_layers_with_rms_norms_equal_layers_with_layer_norms(make_checkpoint: Callable[..., Path]) -> None:
    """OPT's LayerNorms become RMSNorms: the same sublayer outputs less their mean, for streams without one."""
    model = open_model(str(make_checkpoint(family="opt", groups=4)), Path())
    stack, tensors = model.family.stack, model.read_layer(0)
    folded = to_rms_norms(tensors, stack)
    assert folded.keys() == tensors.keys() - {f"{sublayer.norm.name}.bias" for sublayer in stack.sublayers}
    x = torch.randn(7, 32, dtype=torch.float64)
    x = x - x.mean(1, keepdim=True)
    for sublayer in stack.sublayers:
        gamma, beta = (tensors[f"{sublayer.norm.name}.{part}"].double() for part in ("weight", "bias"))
        normed = torch.nn.functional.layer_norm(x, (32,), gamma, beta)
        rms_normed = torch.nn.functional.rms_norm(x, (32,), gamma, eps=1e-5)
        for linear in sublayer.readers:
            expected = normed @ tensors[f"{linear}.weight"].double().T + tensors[f"{linear}.bias"]
            reached = rms_normed @ folded[f"{linear}.weight"].double().T + folded[f"{linear}.bias"]
            torch.testing.assert_close(reached, expected, rtol=1e-5, atol=1e-5)
        inner = torch.randn(7, tensors[f"{sublayer.writer}.weight"].shape[1], dtype=torch.float64)
        output = inner @ tensors[f"{sublayer.writer}.weight"].double().T + tensors[f"{sublayer.writer}.bias"]
        reached = inner @ folded[f"{sublayer.writer}.weight"].double().T + folded[f"{sublayer.writer}.bias"]
        torch.testing.assert_close(reached, output - output.mean(1, keepdim=True), rtol=1e-5, atol=1e-5)
