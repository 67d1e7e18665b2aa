"""Results whose layers have sizes of their own, given as inputs: read, refused, and compressed again."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import Fails, MakeCheckpoint, MakeConfig, cpu_machine, randomise
from families.cases import CASES, MIXTURES, decoders
from last_states import assert_passes, keep_last_states
from safetensors.torch import load_file, save_file

from oneshot.architecture import TableShape
from oneshot.checkpoint import Checkpoint, Model, identify, open_model
from oneshot.compression import LayerCompressor
from oneshot.config import Target
from oneshot.errors import CheckpointError, PlanError
from oneshot.evaluation import load_model
from oneshot.export import form_of, model_classes
from oneshot.job import Job
from oneshot.pipeline import compress, predict
from oneshot.planning import HiddenPlan, LayerPlan, Plan, make_plan, vocabulary_ranges
from oneshot.planning.damages import even_damages
from oneshot.recipes import find_recipe
from oneshot.report.summary import summary
from oneshot.run import Run
from oneshot.stream import LayerBuilder
from oneshot.text import Text

LAYERS, WIDTH = 3, 64
IDS = (torch.arange(24).view(2, 12) * 7) % 400
RANKS = {"query_key_rank": 9, "output_rank": 12, "gate_rank": 8, "up_rank": 13}
WIDTHS = [{"intermediate_size": width} for width in (48, 20, 33)]
QUERY_HEADS = [{"num_attention_heads": heads} for heads in (4, 2, 4)]
GROUPS = [{"num_attention_heads": 2 * groups, "num_key_value_heads": groups} for groups in (4, 2, 1)]
GEMMA3: dict[str, Any] = {
    "family": "gemma3_text",
    "head_dim": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GEMMA4: dict[str, Any] = {
    "family": "gemma4_text",
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
# models by name, and what their layers keep: sizes of every layer, layers without a rank, ranges of the embedding
READ: dict[str, tuple[dict[str, Any], list[dict[str, Any]], bool]] = {
    "llama": ({}, [{**WIDTHS[0], **RANKS}, {**WIDTHS[1], "up_rank": 5}, WIDTHS[2]], True),
    "llama, heads": ({"heads": 8, "groups": 2}, [{"num_attention_heads": heads} for heads in (8, 2, 6)], False),
    "llama, groups": ({"heads": 8, "groups": 4}, [WIDTHS[1], {**GROUPS[1], **RANKS}, GROUPS[2]], False),
    "llama, biases": ({"attention_bias": True, "mlp_bias": True, "tied": False}, WIDTHS, False),
    "llama, equal": ({}, [{"intermediate_size": 40, "gate_rank": 6}] * LAYERS, False),
    "qwen2": ({"family": "qwen2", "tied": False}, [{**size, **RANKS} for size in WIDTHS], False),
    "qwen3": ({"family": "qwen3", "head_dim": 8}, [{**size, **RANKS} for size in WIDTHS], True),
    "gemma3": (GEMMA3, [{**WIDTHS[0], **RANKS}, QUERY_HEADS[1], WIDTHS[2]], True),
    "olmo2, heads' norms": ({"family": "olmo2"}, [{**size, **RANKS} for size in WIDTHS], True),
    "gpt2": ({"family": "gpt2", "groups": 4}, WIDTHS, False),
    "lfm2": (
        {"family": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
        [{**WIDTHS[0], "gate_rank": 8}, RANKS, WIDTHS[2]],
        True,
    ),
    "gemma4": (GEMMA4, [{**WIDTHS[0], "up_rank": 8}, WIDTHS[1], WIDTHS[2]], True),
    "cohere": ({"family": "cohere", "groups": 4}, WIDTHS, False),
}
MakeRandom = Callable[..., Path]


def planned(model: Model, sizes: list[dict[str, Any]], *, ranges: bool, **others: Any) -> Plan:
    """Return the plan whose layers have these sizes, and all else of the model."""
    shape = model.shape
    whole = LayerPlan(shape.intermediate_size, shape.num_attention_heads, shape.num_key_value_heads)
    width = shape.hidden_size
    ranks = [width // 2, width, width - 5, 3] * len(vocabulary_ranges(shape.vocab_size))
    parts = vocabulary_ranges(shape.vocab_size) if ranges else []
    tables = tuple(TableShape(part.stop - part.start, rank) for part, rank in zip(parts, ranks, strict=False))
    return Plan(tuple(replace(whole, **size) for size in sizes), "query-head", embedding=tables, **others)


@pytest.fixture(scope="session")
def make_random(
    make_checkpoint: MakeCheckpoint, save_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> MakeRandom:
    """`make_random(build options, sizes of the layers, ranges=…)` -> a random result, as transformers saves it."""
    made: dict[str, Path] = {}

    def make(options: dict[str, Any], sizes: list[dict[str, Any]], *, ranges: bool = False, **others: Any) -> Path:
        key = repr((sorted(options.items()), sizes, ranges, others))
        if key in made:
            return made[key]
        folder = make_checkpoint(**{"layers": LAYERS, "width": WIDTH, "tied": True} | options)
        model = open_model(str(folder), tmp_path_factory.mktemp("scratch"))
        config = form_of("per-layer", model.family).config(model, planned(model, sizes, ranges=ranges, **others))
        config_class, model_class = model_classes(config)
        result = randomise(model_class(config_class.from_dict(config)), seed=3)
        generator = torch.Generator().manual_seed(0)
        for name, buffer in result.named_buffers():
            if name.endswith((".columns", ".places")):
                buffer.copy_(torch.randperm(len(buffer), generator=generator))
        made[key] = save_model(result.eval())
        return made[key]

    return make


def opened(folder: Path | str) -> Any:
    return load_model(Path(folder), device=torch.device("cpu"), dtype=torch.float32)


@torch.inference_mode()
def logits_of(model: Model, scratch: Path) -> torch.Tensor:
    """Return the logits of the engine's own pass through a model."""
    builder = LayerBuilder(model, cpu_machine(scratch), IDS.shape[1])
    [batch] = Text(IDS, "a test").batches(len(IDS))
    states = builder.embed(model.read_embedding(), batch)
    for number in range(model.shape.num_hidden_layers):
        states = builder.layer(number, model.read_layer(number)).run_all(states)
    return builder.output_head().logits(states)


SMALLER = {"hidden": HiddenPlan((0,) * 7, (24,) * 7)}  # a stock hidden size, so the epsilon of norms is another


def test_a_smaller_hidden_size_is_read(make_random: MakeRandom, tmp_path: Path) -> None:
    folder = make_random({"tied": False}, WIDTHS, **SMALLER)
    model = open_model(str(folder), tmp_path)
    assert model.shape.hidden_size == 24
    with torch.inference_mode():
        expected = opened(folder)(IDS).logits
        torch.testing.assert_close(logits_of(model, tmp_path), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", READ)
@torch.inference_mode()
def test_it_is_read_as_its_own_class_computes_it(name: str, make_random: MakeRandom, tmp_path: Path) -> None:
    """Also the sizes of every layer, what is stored, and that every tensor of the files counts for the run."""
    options, sizes, ranges = READ[name]
    folder = make_random(options, sizes, ranges=ranges)
    model = open_model(str(folder), tmp_path)
    model = replace(model, checkpoint=model.checkpoint.logging())
    torch.testing.assert_close(logits_of(model, tmp_path), opened(folder)(IDS).logits, rtol=1e-4, atol=1e-4)
    stored = Checkpoint(folder)
    for number, size in enumerate(sizes):
        layer = model.shape.layer(number)
        assert {key: getattr(layer, key) for key in size if "rank" not in key} == {
            key: value for key, value in size.items() if "rank" not in key
        }
    assert model.stored.stored_parameters() == model.checkpoint.num_parameters == stored.num_parameters
    assert model.has_ranks == (ranges or any("rank" in key for size in sizes for key in size))
    model.checkpoint.log_all()
    assert model.checkpoint.log is not None
    assert model.checkpoint.log.hashes.keys() == stored.stored_names
    whole = model.as_whole()
    assert whole.stored == model.shape.stack()
    assert whole.checkpoint.num_parameters == model.shape.stack().stored_parameters()


def test_an_input_that_removes_nothing_is_written_as_it_is(
    make_random: MakeRandom, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Whole linears bit for bit; matrices of low rank multiplied out, in whatever form holds the layers."""
    options, sizes, _ = READ["gemma3"]
    plain = [{key: value for key, value in size.items() if "rank" not in key} for size in sizes]
    folder = make_random(options, plain)
    report = compress(make_config(folder, form="auto", sparsity=0, output=str(tmp_path / "plain")))
    assert report.config["form"] == "per-layer"
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "plain"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())

    options, sizes, _ = READ["llama"]
    folder = make_random(options, sizes, ranges=True)
    with pytest.raises(PlanError, match="removes nothing writes a larger model"):
        compress(make_config(folder, form="per-layer", sparsity=0))
    for form in ("nemotron-nas", "per-layer"):
        methods: dict[str, Any] = {} if form == "nemotron-nas" else {"ranks": "none", "embedding": "none"}
        output = tmp_path / form
        report = compress(make_config(folder, form=form, sparsity=0, output=str(output), **methods))
        assert report.stored_parameters["dense"] == report.stored_parameters["compressed"]
        assert any("this result has whole" in warning for warning in report.warnings)
        with torch.inference_mode():
            expected = opened(folder)(IDS).logits
            torch.testing.assert_close(opened(output)(IDS).logits, expected, rtol=1e-4, atol=1e-4)
        again = logits_of(open_model(str(output), tmp_path), tmp_path)
        torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)


TWICE: dict[str, tuple[str, dict[str, Any]]] = {
    "ranks": ("llama", {}),
    "heads": ("gemma3", {"heads": "id", "ranks": "none", "curvature": "none", "embedding": "none", "depth": "none"}),
}


@pytest.mark.parametrize("name", TWICE)
def test_it_is_compressed_again(
    name: str, make_random: MakeRandom, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The result computes the stream, shares count from what the input has, and no layer becomes larger."""
    case, changes = TWICE[name]
    options, sizes, ranges = READ[case]
    folder = make_random(options, sizes, ranges=ranges and name == "ranks")
    config = make_config(folder, form="auto", sparsity=0.1, num_sequences=8, output=str(tmp_path / "again"), **changes)
    last = keep_last_states(monkeypatch)
    report = compress(config)
    assert report.config["form"] == "per-layer"
    assert_passes(opened(config.output), "model.layers", config, last[0])
    model = open_model(str(folder), tmp_path)
    dense = model.stored if name == "ranks" else model.shape.stack()
    assert report.stored_parameters["dense"] == dense.stored_parameters()
    assert report.sparsity["reached"] == pytest.approx(0.1, abs=0.02)
    for number, kept in enumerate(report.plan["layers"]):
        own = model.shape.layer(number)
        assert 0 < kept["intermediate_size"] <= own.intermediate_size
        assert 0 < kept["num_attention_heads"] <= own.num_attention_heads
        assert 0 < kept["num_key_value_heads"] <= own.num_key_value_heads
    assert open_model(config.output, tmp_path).stored.stored_parameters() == report.stored_parameters["compressed"]


def test_a_matrix_of_low_rank_keeps_what_it_computes(
    make_random: MakeRandom, make_config: MakeConfig, tmp_path: Path
) -> None:
    """A rank that the input has costs nothing again: a profile says so, and the plan takes it."""
    folder = make_random({}, [{"gate_rank": 8, "up_rank": 8}] * LAYERS)
    report = compress(make_config(folder, form="per-layer", sparsity=0.02, num_sequences=8))
    assert all(layer[f"{kind}_rank"] is not None for layer in report.plan["layers"] for kind in ("gate", "up"))
    with torch.inference_mode():
        before, after = (opened(place)(IDS).logits.log_softmax(-1) for place in (folder, tmp_path / "out"))
    assert float((before.exp() * (before - after)).sum(-1).mean()) < 0.02


def test_a_run_goes_on_after_it_was_interrupted(
    make_random: MakeRandom, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also the share against the first model, which only the report of the input knows."""
    options, sizes, _ = READ["llama, heads"]
    folder = tmp_path / "in"
    shutil.copytree(make_random(options, sizes), folder)
    (folder / "oneshot_report.json").write_text('{"stored_parameters": {"dense": 90000, "compressed": 40000}}')
    method: dict[str, Any] = {"allocation": "uniform", "ranks": "none", "embedding": "none", "curvature": "none"}
    changes: dict[str, Any] = {"form": "per-layer", "sparsity": 0.1, "num_sequences": 4} | method
    report = compress(make_config(folder, output=str(tmp_path / "whole"), **changes))
    assert report.stored_parameters["original"] == 90000
    told = summary(report, weights=(None, None), check=None, source=str(folder))
    assert f"−{1 - report.stored_parameters['compressed'] / 90000:.1%} of the 90.0 K" in told
    passed = LayerCompressor.compress_layer

    def stopped(self: Any, layer: int, tensors: Any) -> Any:
        if layer == 1:
            raise KeyboardInterrupt
        return passed(self, layer, tensors)

    monkeypatch.setattr(LayerCompressor, "compress_layer", stopped)
    with pytest.raises(KeyboardInterrupt):
        compress(make_config(folder, output=str(tmp_path / "stopped"), **changes))
    monkeypatch.setattr(LayerCompressor, "compress_layer", passed)
    compress(make_config(folder, output=str(tmp_path / "stopped"), resume=True, **changes))
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert weights[0] == weights[1]


REFUSED: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any], str]] = {
    "attention": ({}, [{}, {"num_attention_heads": 0, "num_key_value_heads": 0}, {}], {}, "layer 1 has no attention"),
    "ffn": ({}, [{"intermediate_size": 0}, {}, {}], {}, "layer 0 has no FFN"),
    "values": ({}, [{"value_size": 6}] * LAYERS, {}, "heads have smaller sizes"),
    "queries": ({}, [{"query_key_size": 6}] * LAYERS, {}, "heads have smaller sizes"),
    "subspaces": (
        {"tied": False},
        [{}] * LAYERS,
        {"hidden": HiddenPlan((0, 0, 1, 1, 2, 2, 2), (30, 30, 28, 28, 26, 26, 26))},
        "hidden sizes of their own",
    ),
    "mapped head": ({}, [{}] * LAYERS, SMALLER, "through a matrix"),
    "layer norms": ({"family": "opt"}, [{"intermediate_size": 40}] * LAYERS, {}, "LayerNorms became RMSNorms"),
    "mixture": (
        {"family": "qwen3_moe", "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
        [{"intermediate_size": 16}] * LAYERS,
        {},
        "a mixture of experts",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_an_input_is_refused(name: str, make_random: MakeRandom, fails: Fails) -> None:
    options, sizes, others, words = REFUSED[name]
    folder = make_random(options, sizes, **others)
    fails(folder, "cannot be compressed again, because", words, "start from the model it came from", form=None)


@pytest.mark.parametrize("name", [name for name in decoders() if CASES[name].refused >= MIXTURES])
def test_every_mixture_is_refused_as_one(name: str, make_random: MakeRandom, fails: Fails) -> None:
    options = {"layers": 2, "tied": False} | CASES[name].options
    folder = make_random(options, [{}] * options["layers"])
    fails(folder, "because it is a mixture of experts; start from the model it came from", form=None)


def test_the_refusal_has_the_command_that_starts_from_the_original(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, fails: Fails, tmp_path: Path
) -> None:
    source = make_checkpoint(family="opt", layers=2)
    config = make_config(source, form="per-layer", embedding="none", sparsity=0.1, output=str(tmp_path / "first"))
    stored = compress(config).stored_parameters
    share = 1 - (stored["compressed"] / stored["dense"]) ** 2
    fails(tmp_path / "first", f"larger share: oneshot compress {source} --form per-layer --sparsity {share:.2f}")


def damaged(folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Return a copy of a result whose config was changed."""
    config, copy = json.loads((folder / "config.json").read_text()), tmp_path / "damaged"
    copy.mkdir()
    change(config)
    (copy / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "model.safetensors", copy)
    return copy


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "no layers": lambda config: config.pop("layers"),
    "a layer is no object": lambda config: config.update(layers=[1, 2, 3]),
    "a size is a word": lambda config: config["layers"][0].update(intermediate_size="wide"),
    "a size is a fraction": lambda config: config["layers"][0].update(intermediate_size=48.5),
    "a size is negative": lambda config: config["layers"][0].update(intermediate_size=-48),
    "another width": lambda config: config["layers"][0].update(intermediate_size=47),
    "another rank": lambda config: config["layers"][0].update(up_rank=12),
    "no rank": lambda config: config["layers"][0].update(up_rank=0),
    "another embedding": lambda config: config["embedding"][0].update(rank=7),
    "no width of norms": lambda config: config.pop("norm_width"),
    "a layer less": lambda config: config["layers"].pop(),
    "other biases": lambda config: config["layers"][0].update(mlp_bias=True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_config_that_does_not_fit_is_refused(name: str, make_random: MakeRandom, tmp_path: Path) -> None:
    options, sizes, _ = READ["llama"]
    folder = damaged(make_random(options, sizes, ranges=True), tmp_path, CHANGES[name])
    with pytest.raises(
        CheckpointError, match=r"give an unmodified result|copy it again|complete, unmodified checkpoint"
    ):
        identify(Checkpoint(folder))


def column_twice(tensors: dict[str, torch.Tensor]) -> None:
    order = tensors["model.layers.0.mlp.up_read.columns"]
    order[0] = order[1]


def read_some(folder: Path) -> None:
    model = identify(Checkpoint(folder))
    model.read_layer(0)
    model.read_embedding()


def place_twice(tensors: dict[str, torch.Tensor]) -> None:
    places = tensors["model.embed_tokens.places"]
    places[0] = places[1]


def further_layer(tensors: dict[str, torch.Tensor]) -> None:
    tensors["mtp.fc.weight"] = torch.ones(2, 2)


TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], str]] = {
    "a column twice": (column_twice, r"up_read\.columns does not list every column once"),
    "a place twice": (place_twice, r"embed_tokens\.places does not list every place once"),
    "a further layer": (further_layer, "because it has layers that predict tokens after the next one"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_are_refused(name: str, make_random: MakeRandom, tmp_path: Path) -> None:
    (options, sizes, _), (change, words) = READ["llama"], TENSORS[name]
    folder, copy = make_random(options, sizes, ranges=True), tmp_path / "damaged"
    copy.mkdir()
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        read_some(copy)


@pytest.mark.parametrize("form", ["stock", "nemotron-nas"])
def test_a_form_that_cannot_hold_the_layers_is_refused(form: str, make_random: MakeRandom, fails: Fails) -> None:
    options, sizes, _ = READ["llama, heads"]
    fails(make_random(options, sizes), "have sizes of their own", "use --form per-layer", form=form)


def test_layers_of_equal_sizes_are_any_models(make_random: MakeRandom, make_config: MakeConfig) -> None:
    folder = make_random({}, [{"intermediate_size": 40}] * LAYERS)
    report = compress(make_config(folder, form="stock", sparsity=0.1, recipe="magnitude"))
    assert report.config["form"] == "stock"


def test_a_plan_takes_each_layer_for_what_it_is(
    make_random: MakeRandom, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Whatever the share and the way, no layer gets more than it has; memory is predicted for the largest layer."""
    folder = make_random({"heads": 8, "groups": 4}, [{**GROUPS[1], **WIDTHS[1]}, WIDTHS[2], GROUPS[2]])
    config = make_config(folder, form="per-layer", sparsity=0.1)
    with torch.inference_mode():
        run = Run(config, tmp_path)
    for recipe in ("oneshot", "stat"):
        method = run.grid.settle(find_recipe(recipe), Target(sparsity=0.1))
        for share in (0.02, 0.1, 0.25):
            for damages in (None, even_damages(run.grid, "kv-group")):
                plan = make_plan(run.grid, method, Target(sparsity=share), damages)
                for number, kept in enumerate(plan.layers):
                    own = run.model.shape.layer(number)
                    assert kept.intermediate_size <= own.intermediate_size
                    assert kept.num_attention_heads <= own.num_attention_heads
                    assert kept.num_key_value_heads <= own.num_key_value_heads
                assert run.grid.stack(plan).stored_parameters() < run.dense.stored_parameters()
    largest = max(layer.parameters() for layer in run.dense.layers)
    footprint = predict(config)
    job = Job(config, run)
    assert job.footprint.stored_parameters["dense"] == run.dense.stored_parameters()
    assert footprint.host_bytes > 4 * largest
