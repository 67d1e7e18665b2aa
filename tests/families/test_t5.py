"""T5 and mT5: layers, streams and whole runs against transformers' own forward pass."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeConfig, assert_cache_changes_nothing, cpu_machine
from safetensors.torch import load_file, save_file
from strategies import TOLERANCES
from t5_models import (
    DECODER_LAYERS,
    ENCODER_LAYERS,
    VARIANTS,
    build_t5,
    padded_batch,
    save_t5,
    t5_tokenizer,
    write_pairs,
)

from oneshot.checkpoint import Model, open_model
from oneshot.compression import LayerCompressor
from oneshot.compression.one_writer import OneWriterTask
from oneshot.config import Config
from oneshot.errors import CalibrationError, CheckpointError, OneshotError
from oneshot.machine import Workers
from oneshot.pipeline import compress, predict, profile
from oneshot.planning import HiddenPlan, Problem
from oneshot.stream import Layer, States, Step
from oneshot.text import Text, load_pairs

pytestmark = pytest.mark.long

NUM_LAYERS = ENCODER_LAYERS + DECODER_LAYERS
assert_close = partial(torch.testing.assert_close, rtol=TOLERANCES["float32 layer"], atol=TOLERANCES["float32 layer"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[bool, bool]], tuple[Any, Path]]:
    """`saved((gated, tied))` -> a model and its folder, made once."""

    @cache
    def make(variant: tuple[bool, bool]) -> tuple[Any, Path]:
        gated, tied = variant
        model = build_t5(gated=gated, tied=tied)
        return model, save_t5(model, tmp_path_factory.mktemp("t5") / "tiny")

    return make


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: f"gated={variant[0]}-tied={variant[1]}")
def variant(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def stock(variant: tuple[bool, bool], saved: Any) -> Any:
    return saved(variant)[0]


@pytest.fixture
def folder(variant: tuple[bool, bool], saved: Any) -> Path:
    return saved(variant)[1]


@pytest.fixture
def tied_folder(saved: Any) -> Path:
    return saved((True, True))[1]


@pytest.fixture
def model(folder: Path, tmp_path: Path) -> Model:
    return open_model(str(folder), tmp_path)


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    return str(write_pairs(tmp_path / "pairs.jsonl"))


def blocks(stock: Any) -> list[Any]:
    return [*stock.encoder.block, *stock.decoder.block]


def padded_text() -> Text:
    """Return the padded batch as a text of examples with their own lengths."""
    batch = padded_batch()
    decoder = Text(batch["decoder_input_ids"], "text", batch["decoder_attention_mask"].sum(1))
    return Text(batch["input_ids"], "text", batch["attention_mask"].sum(1), decoder=decoder)


# -- layers and streams ----------------------------------------------------------------------------------------------


def test_sizes_and_tensors_are_those_of_the_stock_class(model: Model, stock: Any) -> None:
    shape, config = model.shape, stock.config
    assert (shape.num_hidden_layers, shape.num_decoder_layers) == (NUM_LAYERS, DECODER_LAYERS)
    assert (shape.gated, shape.tied) == (config.is_gated_act, "lm_head.weight" not in model.checkpoint.tensor_names)
    assert shape.stack().stored_parameters() == model.checkpoint.num_parameters
    assert shape.layer_parameters() == sum(weight.numel() for weight in stock.decoder.block[0].parameters())
    for number, block in enumerate(blocks(stock)):
        stored = block.state_dict()
        expected = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        assert model.family.expected_tensors(shape, number) == expected
        first = blocks(stock)[0 if number < ENCODER_LAYERS else ENCODER_LAYERS].state_dict()
        table = "layer.0.SelfAttention.relative_attention_bias.weight"
        read = model.read_layer(number)
        assert read.keys() == stored.keys() | {table}
        assert all(torch.equal(tensor, stored.get(name, first[table])) for name, tensor in read.items())


def test_positions_are_numbered_through_both_stacks(model: Model) -> None:
    encoder, decoder = model.family.stacks
    positions = [encoder.position(layer, index) for layer in range(ENCODER_LAYERS) for index in range(2)]
    positions.append(encoder.position(ENCODER_LAYERS))
    layers = range(ENCODER_LAYERS, NUM_LAYERS)
    positions += [decoder.position(layer, index) for layer in layers for index in range(3)]
    assert positions == list(range(2 * ENCODER_LAYERS + 1 + 3 * DECODER_LAYERS))
    assert model.family.layer_prefix(ENCODER_LAYERS) == "decoder.block.0."
    assert [model.family.stack_of(layer) is decoder for layer in range(NUM_LAYERS)] == [False] * 3 + [True] * 2


@torch.inference_mode()
def test_streams_of_examples_equal_a_padded_batch(model: Model, stock: Any, tmp_path: Path) -> None:
    """Examples pass without padding, sublayer by sublayer; transformers pads them and masks both sides."""
    batch = padded_batch()
    expected = stock(**batch, output_hidden_states=True)
    source, target = batch["attention_mask"].bool(), batch["decoder_attention_mask"].bool()
    states = States(model, cpu_machine(tmp_path, batch_size=2), padded_text(), dense_every=1)

    def rows(stream: int) -> torch.Tensor:
        return torch.cat([pair[stream].flatten(0, 1) for pair in states.read()])

    for number in range(NUM_LAYERS):
        if number == ENCODER_LAYERS:
            states.enter_decoder()
        encoding = number < ENCODER_LAYERS
        hidden = expected.encoder_hidden_states if encoding else expected.decoder_hidden_states
        mask, local = (source, number) if encoding else (target, number - ENCODER_LAYERS)
        assert_close(rows(0), hidden[local][mask])
        assert_close(rows(1), hidden[local][mask])
        layer, dense = (build(number, model.read_layer(number)) for build in (states.layer, states.dense_layer))
        states.defer(lambda x, _, layer=layer: layer.run_all(x))  # type: ignore[misc]
        for index in range(len(states.stack.sublayers)):
            states.defer_dense(lambda x, _, dense=dense, index=index: dense.run(index, x))  # type: ignore[misc]
        states.settle()
    norm, head = states.builder.final_norm(states.stack), model.read_head()
    scale = 32**-0.5 if stock.config.__dict__.get("scale_decoder_outputs") else 1.0
    assert_close(scale * norm(rows(0)) @ head.T, expected.logits[target])


@torch.inference_mode()
@pytest.mark.parametrize("dense_every", [1, 2])
def test_workers_have_parts_of_the_streams(dense_every: int, model: Model, tmp_path: Path) -> None:
    """Both streams, in the encoder and in the decoder, where the parts start in the middle of the text."""
    *shares, whole = (
        States(
            model,
            cpu_machine(tmp_path, batch_size=1, workers=workers),
            padded_text(),
            dense_every=dense_every,
        )
        for workers in (Workers(0, 2), Workers(1, 2), Workers())
    )
    for number in range(ENCODER_LAYERS, NUM_LAYERS):
        for states in (*shares, whole):
            if number == ENCODER_LAYERS:
                states.enter_decoder()
            text = padded_text() if number < ENCODER_LAYERS else padded_text().decoder
            assert text is not None
            assert text.lengths is not None
            assert states.stack_tokens == text.lengths.sum()
            assert states.first_row == text.lengths[: states.part.start].sum()
            layer, dense = (build(number, model.read_layer(number)) for build in (states.layer, states.dense_layer))
            states.defer(layer_step(layer))
            states.defer_dense(layer_step(dense))
    expected = list(whole.read())
    found = [pair for states in shares for pair in states.read()]
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(ours[0], theirs[0])
        assert (ours[1] is None) == (theirs[1] is None) == (number % dense_every > 0)
        assert ours[1] is None or torch.equal(ours[1], ours[0])


def layer_step(layer: Layer) -> Step:
    return lambda x, _: layer.run_all(x)


@torch.inference_mode()
def test_parts_of_sublayers_equal_hooks_on_the_stock_model(model: Model, stock: Any, tmp_path: Path) -> None:
    """The writers' inputs give `inner`, the readers' inputs `normed` and the memory."""
    inputs: dict[str, torch.Tensor] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0].clone()}))
        for name, module in stock.named_modules()
        if ".block." in name and isinstance(module, torch.nn.Linear)
    ]
    batch = {name: ids for name, ids in padded_batch().items() if name.endswith("ids")}
    expected = stock(**batch, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    lengths = [torch.full((4,), ids.shape[1]) for ids in batch.values()]
    decoder = Text(batch["decoder_input_ids"], "text", lengths[1])
    states = States(model, cpu_machine(tmp_path), Text(batch["input_ids"], "text", lengths[0], decoder=decoder))
    for number in range(NUM_LAYERS):
        if number == ENCODER_LAYERS:
            states.enter_decoder()
        layer, prefix = states.layer(number, model.read_layer(number)), model.family.layer_prefix(number)
        [(x, _)] = states.read()
        for index, sublayer in enumerate(states.stack.sublayers):
            for reader in sublayer.readers:
                assert_close(layer.normed(index, x), inputs[prefix + reader])
            inner = layer.inner(index, x)
            assert_close(inner, inputs[prefix + sublayer.writer].flatten(0, -2))
            torch.testing.assert_close(x + layer.write(index, inner).view_as(x), layer.sum(index, x))
            if sublayer.kind == "cross-heads":
                queries, keys = layer.queries_keys(index, x)
                linears = (stock.get_submodule(prefix + name) for name in (sublayer.mixer.q, sublayer.mixer.k))
                for rows, linear, read in zip(
                    (queries, keys), linears, (layer.normed(index, x), expected.encoder_last_hidden_state), strict=True
                ):
                    assert_close(rows, linear(read).flatten(0, -2))
            x = layer.run(index, x)
        states.defer(lambda x, _, layer=layer: layer.run_all(x))  # type: ignore[misc]
        states.settle()


# -- whole runs ------------------------------------------------------------------------------------------------------


def small_run(make_config: MakeConfig, checkpoint: Path, **changes: Any) -> Config:
    return make_config(checkpoint, **{"batch_size": 4} | changes)


def load(folder: str | Path, model_class: str = "T5ForConditionalGeneration") -> Any:
    """Return the stock model of a result, which must have all its tensors and no others."""
    import transformers

    model, info = getattr(transformers, model_class).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


@torch.inference_mode()
def test_nothing_removed_gives_the_same_bits(
    stock: Any, folder: Path, make_config: MakeConfig, pairs: str, tmp_path: Path
) -> None:
    config = small_run(make_config, folder, calibration=pairs, sparsity=0.0)
    compress(config)
    before, after = (load_file(Path(place) / "model.safetensors") for place in (folder, config.output))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    batch = padded_batch()
    assert torch.equal(load(config.output)(**batch).logits, stock(**batch).logits)


def cached_numbers(model: Any, length: int) -> int:
    """Return the numbers in the cache after so many tokens of a source and of a target."""
    ids = torch.arange(3, 3 + length).unsqueeze(0)
    cache = model(input_ids=ids, decoder_input_ids=ids).past_key_values
    both = cache.self_attention_cache, cache.cross_attention_cache
    return sum(layer.keys.numel() + layer.values.numel() for part in both for layer in part.layers)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("variant", "with_targets"), [(variant, variant[0] == variant[1]) for variant in VARIANTS], ids=str
)
def test_fewer_neurons_load_and_generate(
    with_targets: bool, folder: Path, make_config: MakeConfig, pairs: str, text_file: Path
) -> None:
    """The result has fewer neurons in every layer, and `generate` with a cache equals the one without.

    Text with targets and without meets gated FFNs and others, and tied embeddings and others: all pairs of the three.
    """
    text = pairs if with_targets else str(text_file)
    config = small_run(make_config, folder, calibration=text, sparsity=0.1)
    predicted = predict(config)
    report = compress(config)
    result = load(config.output)
    assert 0.05 < report.sparsity["reached"] < 0.15
    assert predicted.stored_parameters["compressed"] == report.stored_parameters["compressed"]
    assert sum(weight.numel() for weight in set(result.parameters())) == report.stored_parameters["compressed"]
    assert {len(layer.sublayers) for layer in report.layers} == {1}
    for layer in report.layers:
        assert 0 < layer.sublayers[0].predicted_error < 1.2
    batch = {name: ids for name, ids in padded_batch().items() if not name.startswith("decoder")}
    assert_cache_changes_nothing(result, 8, **batch)
    assert report.kv_bytes_per_token["compressed"] == 2 * (cached_numbers(result, 6) - cached_numbers(result, 5))
    assert "T5ForConditionalGeneration.from_pretrained" in (Path(config.output) / "README.md").read_text()


@torch.inference_mode()
def test_the_stream_equals_the_stored_model(
    model: Model, stock: Any, folder: Path, make_config: MakeConfig, pairs: str
) -> None:
    """Reports measure errors on the compressed stream's last batch; so do hooks on the dense and the stored model."""
    config = small_run(make_config, folder, calibration=pairs, sparsity=0.2, sequence_length=24)
    report, result = compress(config), load(config.output)
    text = load_pairs([pairs], t5_tokenizer(), num_tokens=16 * 24, longest=24, seed=config.seed, start_token=0)
    last = text.batches(4)[-1]
    assert last.decoder is not None
    for number, layer in enumerate(report.layers):
        ffn = f"{model.family.layer_prefix(number)}layer.{1 if number < ENCODER_LAYERS else 2}"
        before: list[torch.Tensor] = []
        after: list[torch.Tensor] = []
        handles = []
        for each in (stock, result):
            module = each.get_submodule(ffn)
            handles.append(module.register_forward_pre_hook(lambda _, args, seen=before: seen.append(args[0].clone())))
            handles.append(module.register_forward_hook(lambda _, args, out, seen=after: seen.append(out.clone())))
            each(input_ids=last.token_ids, decoder_input_ids=last.decoder.token_ids)
        for handle in handles:
            handle.remove()
        target = after[0] - before[1]  # from the compressed stream to the dense one
        measured = float((after[1] - after[0]).norm() / target.norm())
        assert layer.sublayers[0].measured_error == pytest.approx(measured, rel=1e-3)


def test_little_text_is_what_a_stack_reads(
    tied_folder: Path, make_config: MakeConfig, pairs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources and targets together are enough tokens for a neuron, and the tokens of each stack are not."""
    few: list[bool] = []
    stock_way = OneWriterTask.correct

    def observed(self: OneWriterTask, weight: torch.Tensor, columns: torch.Tensor, sums: Any, **options: Any) -> Any:
        few.append(self.shrinkage(weight.shape[1], sums.num_rows) > 0)
        assert (sums.held_out is not None) == few[-1]
        return stock_way(self, weight, columns, sums, **options)

    monkeypatch.setattr(OneWriterTask, "correct", observed)
    compress(small_run(make_config, tied_folder, calibration=pairs, sparsity=0.1, num_sequences=36))
    assert few == [True] * NUM_LAYERS


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (1, {}),
        (ENCODER_LAYERS, {}),
        (NUM_LAYERS - 1, {}),
        (2, {"heads": "id", "sparsity": 0.2}),
        (NUM_LAYERS - 1, {"heads": "id", "query_key_size": 6, "value_size": 6, "sparsity": 0.3}),
        (ENCODER_LAYERS + 1, {"hidden": "pca", "hidden_size": 24, "ffn": "none", "correction": "two-stream"}),
    ],
)
def test_an_interrupted_run_continues_with_the_same_bytes(
    layer: int,
    options: dict[str, Any],
    tied_folder: Path,
    make_config: MakeConfig,
    pairs: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "hidden_size" not in options:
        options = {"sparsity": 0.1} | options
    config = small_run(make_config, tied_folder, calibration=pairs, **options)
    beside = replace(config, output=f"{config.output}-undisturbed")
    compress(beside)
    original = LayerCompressor.compress_layer

    def interrupted(self: LayerCompressor, index: int, *rest: Any) -> Any:
        if index == layer:
            raise KeyboardInterrupt
        return original(self, index, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(LayerCompressor, "compress_layer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compress(config)
    compress(replace(config, resume=True))
    written = [(Path(place) / "model.safetensors").read_bytes() for place in (config.output, beside.output)]
    assert written[0] == written[1]


def test_up_proj_is_corrected_in_both_stacks(tied_folder: Path, make_config: MakeConfig, pairs: str) -> None:
    config = small_run(make_config, tied_folder, calibration=pairs, sparsity=0.1, up_steps=2)
    compress(config)
    load(config.output)


def test_old_tensors_are_read_as_transformers_reads_them(make_config: MakeConfig, pairs: str, tmp_path: Path) -> None:
    """Old T5 1.0 checkpoints repeat the embedding, and have a table in cross-attention that nothing reads."""
    folder = save_t5(build_t5(gated=False, tied=True), tmp_path / "dense")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    old = tensors | {
        "encoder.embed_tokens.weight": tensors["shared.weight"].clone(),
        "decoder.embed_tokens.weight": tensors["shared.weight"].clone(),
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.zeros(8, 4),
    }
    written = []
    for number, content in enumerate((tensors, old)):
        save_file(content, path, metadata={"format": "pt"})
        config = small_run(make_config, folder, output=str(tmp_path / f"out-{number}"), calibration=pairs, sparsity=0.1)
        compress(config)
        written.append(load_file(Path(config.output) / "model.safetensors"))
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(tensor, written[1][name]) for name, tensor in written[0].items())


def test_mt5_is_compressed_into_itself(make_config: MakeConfig, pairs: str, tmp_path: Path) -> None:
    folder = save_t5(build_t5(gated=True, tied=False, model_type="mt5"), tmp_path / "dense")
    config = small_run(make_config, folder, calibration=pairs, sparsity=0.1)
    compress(config)
    result = load(config.output, "MT5ForConditionalGeneration")
    assert result.config.d_ff < 64


def test_errors_of_cross_attention_are_measured_beside_their_own_source(
    make_config: MakeConfig, folder: Path, pairs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They belong to the last batch with a dense stream, and not to the last one that was read."""
    monkeypatch.setattr("oneshot.schedule.DENSE_TOKENS_PER_NEURON", 0)
    changes: dict[str, Any] = {"ffn": "none", "heads": "id", "sparsity": 0.1, "correction": "two-stream"}
    report = compress(small_run(make_config, folder, calibration=pairs, batch_size=2, **changes))
    sublayers = [sublayer for layer in report.layers for sublayer in layer.sublayers if sublayer.kind == "cross-heads"]
    assert len(sublayers) == DECODER_LAYERS
    for sublayer in sublayers:
        assert sublayer.measured_error is not None
        assert sublayer.measured_error < 1


# -- heads, sizes inside heads, the hidden size -----------------------------------------------------------------------

SMALLER: list[dict[str, Any]] = [
    {"sparsity": 0.2},
    {"sparsity": 0.2, "heads": "id"},
    {"sparsity": 0.1, "heads": "wanda", "ffn": "none", "correction": "same-layer"},
    {"query_key_size": 6, "value_size": 6},
    {"query_key_size": 5, "value_size": 5, "heads": "id", "sparsity": 0.3},
    {"hidden_size": 24, "hidden": "pca", "ffn": "none", "correction": "two-stream"},
    {"hidden_size": 27, "hidden": "pca", "heads": "id", "query_key_size": 6, "value_size": 6, "sparsity": 0.4},
]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("variant", "options"),
    [
        (variant, options)
        for variant in VARIANTS
        for number, options in enumerate(SMALLER)
        if (variant[0] == variant[1]) == (number % 2 == 0)
    ],
    ids=str,
)
def test_the_stored_model_has_the_streams_logits(
    options: dict[str, Any], stock: Any, folder: Path, make_config: MakeConfig, pairs: str, monkeypatch: Any
) -> None:
    """The compressed stream passes full-width layers; the stored model is smaller, and computes the same.

    Every setting meets gated FFNs and others, and tied embeddings and others; the four of these meet in turns.
    """
    last: list[tuple[torch.Tensor, Any]] = []
    close = States.close

    def keep_last(self: States) -> None:
        if not self._compressed.steps:  # the choice of shared heads leaves the last layer out
            last.append((self.read_judged()[0], self))
        close(self)

    monkeypatch.setattr(States, "close", keep_last)
    config = small_run(make_config, folder, calibration=pairs, **options)
    report, result = compress(config), load(config.output)
    sizes = {name: options.get(name, full) for name, full in (("hidden_size", 32), ("value_size", 8))}
    assert (result.config.d_model, result.config.d_kv) == (sizes["hidden_size"], sizes["value_size"])
    assert sum(weight.numel() for weight in set(result.parameters())) == report.stored_parameters["compressed"]
    x, states = last[-1]
    batch = states._batches[-1]
    scale = 32**-0.5 if stock.config.__dict__.get("scale_decoder_outputs") else 1.0
    expected = scale * stock.decoder.final_layer_norm(x) @ stock.lm_head.weight.T
    logits = result(input_ids=batch.source.token_ids, decoder_input_ids=batch.token_ids).logits
    assert float((logits - expected).norm() / expected.norm()) < 2e-5


def full_width(problem: Problem, plan: Any, **_: Any) -> Any:
    """Return a plan that rotates the residual stream and leaves nothing out."""
    grid = problem.grid
    positions = grid.family.last_stack.position(grid.shape.num_hidden_layers) + 1
    return replace(plan, hidden=HiddenPlan((0,) * positions, (grid.shape.hidden_size,) * positions))


@torch.inference_mode()
def test_a_rotation_at_full_width_gives_the_dense_logits(
    stock: Any, folder: Path, make_config: MakeConfig, pairs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oneshot.planning.sizes.plan_hidden", full_width)
    config = small_run(make_config, folder, calibration=pairs, recipe="tcsp", hidden_size=32)
    compress(config)
    result, batch = load(config.output), padded_batch()
    assert not torch.equal(result.shared.weight, stock.shared.weight)
    logits, expected = result(**batch).logits, stock(**batch).logits
    rows = batch["decoder_attention_mask"].bool()
    assert float((logits - expected)[rows].norm() / expected[rows].norm()) < 2e-5


@torch.inference_mode()
def test_directions_are_those_of_the_normed_hidden_states(
    stock: Any, folder: Path, make_config: MakeConfig, pairs: str
) -> None:
    """Predicted errors equal errors of the stock model's own states at every norm, of all stacks, in one subspace."""
    config = small_run(make_config, folder, calibration=pairs, recipe="tcsp", hidden_size=24)
    report, result = compress(config), load(config.output)
    inputs: dict[str, list[torch.Tensor]] = {}
    for name, module in stock.named_modules():
        if name.endswith("layer_norm"):
            module.register_forward_pre_hook(
                lambda _, args, name=name: inputs.setdefault(name, []).append(args[0].flatten(0, 1))
            )
    text = load_pairs([pairs], t5_tokenizer(), num_tokens=16 * 32, longest=32, seed=config.seed, start_token=0)
    for batch in text.batches(4):
        assert batch.decoder is not None
        stock(input_ids=batch.token_ids, decoder_input_ids=batch.decoder.token_ids)
    for module in stock.modules():
        module._forward_pre_hooks.clear()
    rows = {name: torch.cat(parts).double() for name, parts in inputs.items()}
    rows = {name: each / each.square().mean(1, keepdim=True).sqrt() for name, each in rows.items()}
    assert len(rows) == 2 * ENCODER_LAYERS + 3 * DECODER_LAYERS + 2
    gram = sum(each.T @ each for each in rows.values())
    basis = torch.linalg.eigh(gram).eigenvectors[:, -24:]
    errors = {name: float((each - each @ basis @ basis.T).norm() / each.norm()) for name, each in rows.items()}
    names = [name for name in rows if ".block." in name]
    found = [sublayer.predicted_error for layer in report.layers for sublayer in layer.sublayers]
    assert found == pytest.approx([errors[name] for name in names], rel=1e-4)
    embedding = stock.shared.weight.double()
    inside = embedding @ basis @ basis.T
    torch.testing.assert_close(result.shared.weight @ result.shared.weight.T, (inside @ inside.T).float())
    assert_cache_changes_nothing(result, 6, input_ids=padded_batch()["input_ids"])


@torch.inference_mode()
def test_layers_of_a_stack_keep_the_heads_of_summed_statistics(
    stock: Any, folder: Path, make_config: MakeConfig, pairs: str
) -> None:
    """The heads are pivots of the output-weighted heads of all layers, one below the other."""
    from scipy.linalg import qr

    config = small_run(make_config, folder, calibration=pairs, sparsity=0.1, heads="id", ffn="none")
    compress(config)
    result = load(config.output)
    kept = result.config.num_heads
    assert kept < 4
    text = load_pairs([pairs], t5_tokenizer(), num_tokens=16 * 32, longest=32, seed=config.seed, start_token=0)
    for name in ("encoder", "decoder"):
        long_heads: list[torch.Tensor] = []

        def keep(out: Any, args: Any, long_heads: list[torch.Tensor] = long_heads) -> None:
            weighted = (args[0].flatten(0, 1) * out.weight.norm(dim=0)).view(-1, 4, 8)
            long_heads.append(weighted.transpose(1, 2).flatten(0, 1))

        outs = [block.layer[0].SelfAttention.o for block in getattr(stock, name).block]
        handles = [out.register_forward_pre_hook(keep) for out in outs]
        for batch in text.batches(4):
            assert batch.decoder is not None
            stock(input_ids=batch.token_ids, decoder_input_ids=batch.decoder.token_ids)
        for handle in handles:
            handle.remove()
        _, _, pivots = qr(torch.cat(long_heads).double().numpy(), mode="economic", pivoting=True)
        heads = sorted(pivots[:kept].tolist())
        columns = (8 * torch.tensor(heads).unsqueeze(1) + torch.arange(8)).flatten()
        for before, after in zip(getattr(stock, name).block, getattr(result, name).block, strict=True):
            dense, smaller = before.layer[0].SelfAttention, after.layer[0].SelfAttention
            for linear in ("q", "k", "v"):
                assert torch.equal(getattr(smaller, linear).weight, getattr(dense, linear).weight[columns])
        first, table = (getattr(each, name).block[0].layer[0].SelfAttention for each in (stock, result))
        assert torch.equal(table.relative_attention_bias.weight, first.relative_attention_bias.weight[:, heads])


REFUSALS = [
    ({"calibration": "self"}, "--calibration self needs a model that continues text"),
    ({"form": "per-layer"}, "T5's layers have equal sizes"),
    ({"form": "gguf"}, "has no decoder beside an encoder"),
    ({"form": "nemotron-nas"}, "has no decoder beside an encoder"),
    ({"allocation": "sensitivity"}, "A profile of T5 is not supported"),
    ({"depth": "sensitivity"}, "A profile of T5 is not supported"),
    ({"budget": "latency"}, "--budget latency is not supported for T5"),
    ({"correction": "bias"}, "which T5 lacks"),
    ({"heads": "obs"}, "all layers of a stack share theirs"),
    ({"value_size": 4, "sparsity": 0.2}, "give --set query_key_size= and value_size= the same size"),
    ({"hidden": "pca", "group_size": 2, "ffn": "none"}, "shortcut matrices"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSALS, ids=lambda value: str(value)[:40])
def test_what_t5_cannot_do_is_refused(
    options: dict[str, Any], sentence: str, tied_folder: Path, make_config: MakeConfig, pairs: str
) -> None:
    with pytest.raises(OneshotError, match=sentence):
        compress(small_run(make_config, tied_folder, **{"calibration": pairs, "sparsity": 0.1} | options))


def test_a_profile_is_refused(tied_folder: Path, make_config: MakeConfig, pairs: str) -> None:
    with pytest.raises(OneshotError, match="A profile of T5 is not supported"):
        profile(small_run(make_config, tied_folder, calibration=pairs))


def test_a_tokenizer_without_sentinels_needs_targets(
    make_config: MakeConfig, tokenizer: Any, text_file: Path, tmp_path: Path
) -> None:
    folder = save_t5(build_t5(gated=True, tied=True), tmp_path / "dense")
    tokenizer.save_pretrained(folder)
    with pytest.raises(CalibrationError, match="no <extra_id_0> to mark gaps"):
        compress(small_run(make_config, folder, calibration=str(text_file), sparsity=0.1))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architectures": ["T5EncoderModel"]}, "states the class T5EncoderModel"),
        ({"is_decoder": True}, "not an encoder with a decoder"),
        ({"num_decoder_layers": 4}, "decoder.block.2"),
        ({"num_decoder_layers": 10**9}, "layers where there are"),
        ({"num_heads": 3}, "relative_attention_bias|SelfAttention"),
        ({"relative_attention_num_buckets": 16}, "relative_attention_bias"),
        ({"feed_forward_proj": "relu"}, "DenseReluDense.wi"),
    ],
    ids=str,
)
def test_configs_that_contradict_the_tensors_are_refused(
    change: dict[str, Any], sentence: str, tied_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tied_folder, tmp_path / "changed"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=sentence):
        open_model(str(folder), tmp_path)
