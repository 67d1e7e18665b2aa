"""A family with norms after its sublayers needs one file: its layers equal the stock model's."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bert_fixture import BERT
from factories import cpu_machine
from strategies import TOLERANCES

from oneshot.checkpoint import Model, open_model
from oneshot.compression.correction import Factors
from oneshot.compression.fold import augmented_weight, fold_sublayer
from oneshot.errors import CheckpointError
from oneshot.families import FAMILIES, read_shape
from oneshot.stream import LayerBuilder, States
from oneshot.text import Text

TOKEN_IDS = torch.randint(0, 100, (5, 20), generator=torch.Generator().manual_seed(1))
assert_close = partial(torch.testing.assert_close, rtol=TOLERANCES["float32 layer"], atol=TOLERANCES["float32 layer"])


@pytest.fixture(autouse=True)
def _known_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, BERT.model_type, BERT)


@pytest.fixture(scope="module")
def stock() -> Any:
    """Return a tiny random BERT; every parameter, also of norms and biases, changes its output."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=40,
    )
    model = BertModel(config).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("LayerNorm.weight"):
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(0.2 * noise)
    return model


@pytest.fixture(scope="module")
def folder(stock: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert") / "tiny"
    stock.save_pretrained(path)
    return path


@pytest.fixture
def model(folder: Path, tmp_path: Path) -> Model:
    return open_model(str(folder), tmp_path)


def test_expected_tensors_equal_the_layers_state_dict(stock: Any) -> None:
    stored = {name: tuple(tensor.shape) for name, tensor in stock.state_dict().items()}
    shape = read_shape(BERT, stock.config.to_dict(), stored)
    for layer in stock.encoder.layer:
        expected = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
        assert BERT.expected_tensors(shape) == expected


def test_the_checkpoint_is_opened(model: Model, stock: Any) -> None:
    assert model.family is BERT
    assert (model.shape.num_hidden_layers, model.shape.hidden_size, model.shape.intermediate_size) == (3, 32, 48)
    assert (model.shape.num_attention_heads, model.shape.num_key_value_heads, model.shape.head_dim) == (4, 4, 8)
    assert model.shape.num_positions == 40
    assert not model.shape.gated
    assert model.shape.layer_norms
    assert not model.shape.tied
    layer = sum(parameter.numel() for parameter in stock.encoder.layer[0].parameters())
    assert model.shape.layer_parameters() == layer
    assert torch.equal(model.read_embedding(), stock.embeddings.word_embeddings.weight)
    assert model.read_final_norm() == {}
    stored = stock.encoder.layer[1].state_dict()
    read = model.read_layer(1)
    assert read.keys() == stored.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in stored.items())


def test_a_decoder_is_refused() -> None:
    with pytest.raises(CheckpointError, match="is a decoder"):
        BERT.check({"is_decoder": True})


@torch.inference_mode()
def test_layers_equal_the_stock_hidden_states(model: Model, stock: Any, tmp_path: Path) -> None:
    states = stock(TOKEN_IDS, output_hidden_states=True).hidden_states
    builder = LayerBuilder(model, cpu_machine(tmp_path), TOKEN_IDS.shape[1])
    x = states[0]
    for number in range(3):
        layer = builder.layer(model.read_layer(number))
        assert_close(layer.run_all(x), states[number + 1])
        for index in range(2):
            x = layer.run(index, x)
        assert_close(x, states[number + 1])
    changed = states[0].clone()
    changed[:, -1] += 1
    moved = builder.layer(model.read_layer(0)).run_all(changed)
    assert float((moved - states[1])[:, 0].norm()) > 1e-3, "the first token sees the last one"


@torch.inference_mode()
def test_parts_of_sublayers_equal_hooks_on_the_stock_model(model: Model, stock: Any, tmp_path: Path) -> None:
    """The writers' inputs give `inner`, and the inputs of the norms after them give `sum`."""
    inputs: dict[str, torch.Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0].clone()}))
        for name, module in stock.named_modules()
        if name.startswith("encoder.layer.")
    ]
    states = stock(TOKEN_IDS, output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    builder = LayerBuilder(model, cpu_machine(tmp_path), TOKEN_IDS.shape[1])
    for number in range(3):
        layer, prefix, x = builder.layer(model.read_layer(number)), BERT.stack.layer_prefix(number), states[number]
        for index, sublayer in enumerate(BERT.stack.sublayers):
            for reader in sublayer.readers:
                assert_close(layer.normed(index, x), inputs[prefix + reader])
            inner, total = layer.inner(index, x), layer.sum(index, x)
            assert_close(inner, inputs[prefix + sublayer.writer].flatten(0, -2))
            assert_close(total, inputs[prefix + sublayer.norm.name])
            torch.testing.assert_close(x + layer.write(index, inner).view_as(x), total)
            assert torch.equal(layer.leave(index, total), layer.run(index, x))
            x = layer.run(index, x)


@torch.inference_mode()
def test_a_narrow_ffn_equals_silent_neurons(model: Model, tmp_path: Path) -> None:
    index = BERT.stack.index_of("ffn")
    sublayer, tensors = BERT.stack.sublayers[index], model.read_layer(0)
    neurons = torch.tensor([1, 7, 30])
    columns = torch.cat((neurons, torch.tensor([48])))  # with the bias
    factors = Factors(columns, augmented_weight(tensors, sublayer.writer)[:, columns].double())
    silent = torch.zeros_like(tensors[f"{sublayer.writer}.weight"])
    silent[:, neurons] = tensors[f"{sublayer.writer}.weight"][:, neurons]
    builder, x = LayerBuilder(model, cpu_machine(tmp_path), 20), torch.randn(2, 20, 32)
    narrow = builder.layer(fold_sublayer(tensors, sublayer, model.shape, factors))
    full = builder.layer(tensors | {f"{sublayer.writer}.weight": silent})
    assert narrow.inner(index, x).shape == (40, 3)
    assert_close(narrow.run_all(x), full.run_all(x))


@torch.inference_mode()
def test_streams_move_through_the_layers(model: Model, stock: Any, tmp_path: Path) -> None:
    """Both streams begin at other states than the stock model's, whose embeddings are also normed."""
    states = States(model, cpu_machine(tmp_path, batch_size=2), Text(TOKEN_IDS, "text"), two=True)
    x = torch.cat([batch for batch, _ in states.read()])
    for number in range(3):
        layer = states.builder.layer(model.read_layer(number))
        states.defer(lambda x, _, layer=layer: layer.run_all(x))  # type: ignore[misc]
        for index in range(2):
            states.defer_dense(lambda x, _, layer=layer, index=index: layer.run(index, x))  # type: ignore[misc]
    states.settle()
    expected = stock.encoder(x).last_hidden_state
    compressed, dense = (torch.cat(stream) for stream in zip(*states.read(), strict=True))
    assert_close(compressed, expected)
    assert_close(dense, expected)
