"""BERT and DistilBERT: layers, streams and whole runs against transformers' own forward pass."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import edit_config
from factories import MakeConfig, build_model, cpu_machine, topics
from safetensors.torch import load_file, save_file
from strategies import TOLERANCES

from oneshot.architecture import read_shape
from oneshot.checkpoint import Model, open_model
from oneshot.compression.correction import Factors
from oneshot.compression.fold import augmented_weight, fold_sublayer
from oneshot.errors import CalibrationError, CheckpointError
from oneshot.families import FAMILIES
from oneshot.pipeline import compress
from oneshot.stream import LayerBuilder, States
from oneshot.text import Text, load_examples, load_tokenizer

TOKEN_IDS = torch.randint(0, 400, (5, 20), generator=torch.Generator().manual_seed(1))
CLASSES = {family: FAMILIES[family].classes for family in ("bert", "distilbert")}
assert_close = partial(torch.testing.assert_close, rtol=TOLERANCES["float32 layer"], atol=TOLERANCES["float32 layer"])


@pytest.fixture(scope="module", params=["bert", "distilbert"])
def stock(request: pytest.FixtureRequest) -> Any:
    """Return a tiny random encoder; every parameter, also of norms and biases, changes its output."""
    return build_model(request.param, width=48, layers=3, model_class=CLASSES[request.param][0])


@pytest.fixture(scope="module")
def layers(stock: Any) -> Any:
    return stock.encoder.layer if stock.config.model_type == "bert" else stock.transformer.layer


@pytest.fixture(scope="module")
def folder(stock: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder") / "tiny"
    stock.save_pretrained(path)
    return path


@pytest.fixture
def model(folder: Path, tmp_path: Path) -> Model:
    return open_model(str(folder), tmp_path)


def test_expected_tensors_equal_the_layers_state_dict(stock: Any, layers: Any) -> None:
    family = FAMILIES[stock.config.model_type]
    stored = {name: tuple(tensor.shape) for name, tensor in stock.state_dict().items()}
    shape = read_shape(family, stock.config.to_dict(), stored)
    for layer in layers:
        expected = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
        assert family.expected_tensors(shape) == expected


def test_the_checkpoint_is_opened(model: Model, stock: Any, layers: Any) -> None:
    assert (model.shape.num_hidden_layers, model.shape.hidden_size, model.shape.intermediate_size) == (3, 32, 48)
    assert (model.shape.num_attention_heads, model.shape.num_key_value_heads, model.shape.head_dim) == (4, 4, 8)
    assert model.shape.num_positions == 64
    assert not model.shape.gated
    assert model.shape.layer_norms
    assert not model.shape.tied
    layer = sum(parameter.numel() for parameter in layers[0].parameters())
    assert model.shape.layer_parameters() == layer
    assert torch.equal(model.read_embedding(), stock.embeddings.word_embeddings.weight)
    assert model.read_final_norm() == {}
    assert model.shape.stack().stored_parameters() == sum(parameter.numel() for parameter in stock.parameters())
    stored = layers[1].state_dict()
    read = model.read_layer(1)
    assert read.keys() == stored.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in stored.items())


def test_a_decoder_is_refused() -> None:
    with pytest.raises(CheckpointError, match="is a decoder"):
        FAMILIES["bert"].check({"is_decoder": True})


@torch.inference_mode()
def test_layers_equal_the_stock_hidden_states(model: Model, stock: Any, tmp_path: Path) -> None:
    states = stock(TOKEN_IDS, output_hidden_states=True).hidden_states
    builder = LayerBuilder(model, cpu_machine(tmp_path), TOKEN_IDS.shape[1])
    x = states[0]
    for number in range(3):
        layer = builder.layer(number, model.read_layer(number))
        assert_close(layer.run_all(x), states[number + 1])
        for index in range(2):
            x = layer.run(index, x)
        assert_close(x, states[number + 1])
    changed = states[0].clone()
    changed[:, -1] += 1
    moved = builder.layer(0, model.read_layer(0)).run_all(changed)
    assert float((moved - states[1])[:, 0].norm()) > 1e-3, "the first token sees the last one"


@torch.inference_mode()
def test_parts_of_sublayers_equal_hooks_on_the_stock_model(model: Model, stock: Any, tmp_path: Path) -> None:
    """The writers' inputs give `inner`, and the inputs of the norms after them give `sum`."""
    inputs: dict[str, torch.Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0].clone()}))
        for name, module in stock.named_modules()
        if name.startswith(model.family.stack.layers)
    ]
    states = stock(TOKEN_IDS, output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    builder = LayerBuilder(model, cpu_machine(tmp_path), TOKEN_IDS.shape[1])
    for number in range(3):
        stack, x = model.family.stack, states[number]
        layer, prefix = builder.layer(number, model.read_layer(number)), stack.layer_prefix(number)
        for index, sublayer in enumerate(stack.sublayers):
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
    index = model.family.stack.index_of("ffn")
    sublayer, tensors = model.family.stack.sublayers[index], model.read_layer(0)
    neurons = torch.tensor([1, 7, 30])
    columns = torch.cat((neurons, torch.tensor([48])))  # with the bias
    factors = Factors(columns, augmented_weight(tensors, sublayer.writer)[:, columns].double())
    silent = torch.zeros_like(tensors[f"{sublayer.writer}.weight"])
    silent[:, neurons] = tensors[f"{sublayer.writer}.weight"][:, neurons]
    builder, x = LayerBuilder(model, cpu_machine(tmp_path), 20), torch.randn(2, 20, 32)
    narrow = builder.layer(0, fold_sublayer(tensors, sublayer, model.shape, factors))
    full = builder.layer(0, tensors | {f"{sublayer.writer}.weight": silent})
    assert narrow.inner(index, x).shape == (40, 3)
    assert_close(narrow.run_all(x), full.run_all(x))


@torch.inference_mode()
def test_streams_of_examples_equal_a_padded_batch(model: Model, stock: Any, tmp_path: Path) -> None:
    """Examples of five lengths pass in batches of one length each; transformers pads them and masks."""
    lengths = torch.tensor([4, 9, 9, 9, 20])
    text = Text(TOKEN_IDS, "text", lengths, None)
    states = States(model, cpu_machine(tmp_path, batch_size=1), text, dense_every=1)
    mask = torch.arange(20) < lengths.unsqueeze(1)
    expected = stock(TOKEN_IDS, attention_mask=mask, output_hidden_states=True).hidden_states
    assert_close(torch.cat([x.flatten(0, 1) for x, _ in states.read()]), expected[0][mask])
    assert [tuple(x.shape[:2]) for x, _ in states.read()] == [(1, 4), (2, 9), (1, 9), (1, 20)]
    for number in range(3):
        layer = states.builder.layer(number, model.read_layer(number))
        states.defer(lambda x, _, layer=layer: layer.run_all(x))  # type: ignore[misc]
        for index in range(2):
            states.defer_dense(lambda x, _, layer=layer, index=index: layer.run(index, x))  # type: ignore[misc]
    states.settle()
    for stream in zip(*states.read(), strict=True):
        assert_close(torch.cat([x.flatten(0, 1) for x in stream]), expected[-1][mask])


@torch.inference_mode()
def test_token_types_are_embedded(tmp_path: Path) -> None:
    stock = build_model("bert", model_class="BertModel")
    stock.save_pretrained(tmp_path / "model")
    model = open_model(str(tmp_path / "model"), tmp_path)
    types = (torch.arange(20) > 11).long().expand(5, 20)
    [batch] = Text(TOKEN_IDS, "text", torch.full((5,), 20), types).batches(5)
    embedded = LayerBuilder(model, cpu_machine(tmp_path), 20).embed(model.read_embedding(), batch)
    assert_close(embedded, stock.embeddings(TOKEN_IDS, token_type_ids=types))


# -- whole runs ------------------------------------------------------------------------------------------------------

ALL_CLASSES = [
    *((family, name) for family, names in CLASSES.items() for name in names),
    ("roberta", "RobertaForMaskedLM"),
    ("roberta", "RobertaForSequenceClassification"),
    ("xlm-roberta", "XLMRobertaModel"),
    ("camembert", "CamembertForTokenClassification"),
    ("electra", "ElectraForPreTraining"),
    ("electra", "ElectraForMaskedLM"),
    ("modernbert", "ModernBertForMaskedLM"),
    ("modernbert", "ModernBertForSequenceClassification"),
]


def make_encoder(folder: Path, family: str, model_class: str, tokenizer: Any) -> Any:
    """Save a tiny random encoder with a tokenizer."""
    model = build_model(family, width=64, layers=3, tied=True, model_class=model_class)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def write_examples(path: Path) -> Path:
    """Write single texts and pairs of many lengths."""
    lines = [line for line in topics(0, 12).splitlines() if line.strip()][:200]
    records = [
        {"text": line} if place % 2 else {"text": line, "text_pair": "a pair"} for place, line in enumerate(lines)
    ]
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def outputs(model: Any, token_ids: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    with torch.inference_mode():
        found = model(token_ids, attention_mask=mask)
    return [value for value in found.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(("family", "model_class"), ALL_CLASSES)
def test_every_class_is_compressed_into_itself(
    family: str, model_class: str, make_config: MakeConfig, tokenizer: Any, tmp_path: Path
) -> None:
    """It loads with no missing or unexpected tensor; at sparsity 0 all bits are the same."""
    import transformers

    dense = make_encoder(tmp_path / "dense", family, model_class, tokenizer)
    text = str(write_examples(tmp_path / "text.jsonl"))
    for sparsity, width in ((0.0, 64), (0.1, None)):
        config = make_config(
            tmp_path / "dense",
            output=str(tmp_path / f"out-{sparsity}"),
            sparsity=sparsity,
            calibration=text,
            sequence_length=32,
        )
        report = compress(config)
        loaded, info = getattr(transformers, model_class).from_pretrained(config.output, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        ids, mask = TOKEN_IDS, (torch.arange(20) < torch.tensor([[20], [3], [11], [20], [7]])).long()
        pairs = zip(outputs(dense, ids, mask), outputs(loaded.eval(), ids, mask), strict=True)
        if width is not None:
            assert all(torch.equal(before, after) for before, after in pairs)
        else:
            assert loaded.num_parameters() == report.stored_parameters["compressed"]
            assert all(bool(after.isfinite().all()) for _, after in pairs)
            assert 0.05 < report.sparsity["reached"] < 0.15


@torch.inference_mode()
def test_the_stream_equals_the_stored_model(
    stock: Any, make_config: MakeConfig, tokenizer: Any, tmp_path: Path
) -> None:
    """The reports measure errors on the compressed stream's last batch: so do hooks on the result."""
    family = stock.config.model_type
    dense = make_encoder(tmp_path / "dense", family, CLASSES[family][0], tokenizer)
    text = str(write_examples(tmp_path / "text.jsonl"))
    config = make_config(
        tmp_path / "dense",
        output=str(tmp_path / "out"),
        sparsity=0.2,
        calibration=text,
        sequence_length=32,
        batch_size=2,
        correction="same-layer",
    )
    report = compress(config)
    result = type(dense).from_pretrained(config.output).eval()
    examples = load_examples(
        [text],
        load_tokenizer(tmp_path / "dense"),
        num_tokens=config.text.num_tokens,
        longest=32,
        seed=config.seed,
        with_types=family == "bert",
    )
    last = examples.batches(2)[-1]
    stack = FAMILIES[family].stack
    ffn = stack.sublayers[1]
    for number, layer in enumerate(report.layers):
        inputs: dict[str, torch.Tensor] = {}
        name = f"{stack.layer_prefix(number)}{ffn.norm.name}"
        first = f"{stack.layer_prefix(number)}{ffn.mixer.up}"
        handles = [
            result.get_submodule(part).register_forward_pre_hook(
                lambda _, args, part=part, inputs=inputs: inputs.update({part: args[0].clone()})
            )
            for part in (name, first)
        ]
        types = {} if last.token_types is None else {"token_type_ids": last.token_types}
        result(last.token_ids, **types)
        for handle in handles:
            handle.remove()
        x = inputs[first]
        dense_layer = dense.get_submodule(stack.layer_prefix(number).rstrip("."))
        up, down = (dense_layer.get_submodule(part) for part in (ffn.mixer.up, ffn.mixer.down))
        target = down(torch.nn.functional.gelu(up(x)))
        measured = float((inputs[name] - x - target).norm() / target.norm())
        assert layer.sublayers[0].measured_error == pytest.approx(measured, rel=1e-3)


def test_old_names_and_unused_tensors_are_read_as_transformers_reads_them(
    make_config: MakeConfig, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The safetensors of `bert-base-uncased` call norms gamma and beta, and hold a head that BertForMaskedLM lacks."""
    make_encoder(tmp_path / "dense", "bert", "BertForMaskedLM", tokenizer)
    path = tmp_path / "dense" / "model.safetensors"
    tensors = load_file(path)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    old |= {"cls.seq_relationship.weight": torch.zeros(2, 32), "bert.embeddings.position_ids": torch.arange(64)}
    old |= {"bert.pooler.dense.weight": torch.zeros(32, 32), "bert.pooler.dense.bias": torch.zeros(32)}
    told = "The result is without bert.pooler.dense.bias and 2 more: a BertForMaskedLM has no such tensors"
    text = str(write_examples(tmp_path / "text.jsonl"))
    written = []
    for number, content in enumerate((tensors, old)):
        save_file(content, path, metadata={"format": "pt"})
        config = make_config(
            tmp_path / "dense",
            output=str(tmp_path / f"out-{number}"),
            sparsity=0.1,
            calibration=text,
            sequence_length=32,
        )
        report = compress(config)
        assert any(warning.startswith(told) for warning in report.all_warnings) == (content is old)
        written.append(load_file(Path(config.output) / "model.safetensors"))
    assert caplog.text.count(told) == 1
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(tensor, written[1][name]) for name, tensor in written[0].items())


@pytest.mark.parametrize("model_class", ["BertForMaskedLM", "DistilBertForSequenceClassification"])
def test_a_config_without_a_class_keeps_its_head(
    model_class: str, make_config: MakeConfig, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The result's config and its card state what the tensors say."""
    family = FAMILIES["bert" if model_class.startswith("Bert") else "distilbert"]
    make_encoder(tmp_path / "dense", family.model_type, model_class, tokenizer)
    edit_config(tmp_path / "dense", architectures="removed")
    text = str(write_examples(tmp_path / "text.jsonl"))
    output = tmp_path / "out"
    compress(make_config(tmp_path / "dense", output=str(output), sparsity=0.0, calibration=text, sequence_length=32))
    assert caplog.text.count(f"config.json states no class: by its tensors the model is taken for a {model_class}") == 1
    stored, written = (load_file(folder / "model.safetensors") for folder in (tmp_path / "dense", output))
    assert stored.keys() == written.keys()
    assert json.loads((output / "config.json").read_text())["architectures"] == [model_class]
    task = {"BertForMaskedLM": "fill-mask", "DistilBertForSequenceClassification": "text-classification"}[model_class]
    assert f"pipeline_tag: {task}\n" in (output / "README.md").read_text()


def test_what_an_encoder_cannot_do_is_refused(make_config: MakeConfig, tokenizer: Any, tmp_path: Path) -> None:
    make_encoder(tmp_path / "dense", "bert", "BertModel", tokenizer)
    with pytest.raises(CalibrationError, match="--calibration self needs a model that writes text"):
        compress(make_config(tmp_path / "dense", output=str(tmp_path / "out"), sparsity=0.1, calibration="self"))
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config | {"architectures": ["BertForPreTraining"]}))
    with pytest.raises(CheckpointError, match="states the class BertForPreTraining"):
        compress(make_config(tmp_path / "dense", output=str(tmp_path / "out"), sparsity=0.1))
