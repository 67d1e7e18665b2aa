"""The whole pipeline on tiny models: identity, determinism, every recipe and variant, exact counts, no gradient."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, build_model, calibration_tokens
from safetensors import safe_open
from safetensors.torch import load_file

from oneshot import OneshotError
from oneshot.checkpoint import Checkpoint, identify
from oneshot.checkpoint.reader import INDEX_NAME
from oneshot.cli.compress import main
from oneshot.compression import LayerCompressor
from oneshot.compression.correction import DAMPINGS
from oneshot.config import TextOptions
from oneshot.evaluation import load_model
from oneshot.method import SelectorName
from oneshot.pipeline import compress, compress_sizes, profile
from oneshot.recipes import RECIPES, find_recipe
from oneshot.run.calibration import broadened
from oneshot.stream import Layer
from oneshot.text import shares

pytestmark = pytest.mark.long

VARIANTS: dict[str, dict[str, Any]] = {
    "llama-gqa": {},
    "llama-tied-mha": {"tied": True, "groups": 4},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-bfloat16-sharded": {"dtype": torch.bfloat16, "shard_size": "20KB"},
    "mistral-window": {"family": "mistral", "sliding_window": 8},
    "mistral-tied": {"family": "mistral", "tied": True, "groups": 1},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "tied": True, "head_dim": 8},
}

# Every recipe meets three variants and every variant three recipes; and what is refused, or has only biases to add.
PAIRS = [
    (recipe, variant)
    for row, recipe in enumerate(RECIPES)
    for column, variant in enumerate(VARIANTS)
    if (column - row) % len(VARIANTS) in (0, 3, 5)
    or (recipe, variant) in {("flap", "llama-gqa"), ("flap", "llama-biases"), ("group-pca", "mistral-window")}
]

PROMPT = torch.arange(2, 26).view(1, -1)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def weight_hash(folder: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))).hexdigest()


def load_strictly(folder: Path) -> Any:
    """Return the stock model; every tensor must be there and fit, and none may be left over."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert type(model).__module__.startswith("transformers.models.")
    return model.eval()


def assert_same_tensors(folder: Path, other: Path) -> None:
    got, wanted = all_tensors(folder), all_tensors(other)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize(
    ("recipe", "variant"),
    [pair for pair in PAIRS if pair[1] in ("llama-biases", "llama-bfloat16-sharded", "qwen2", "qwen3")],
)
def test_removing_nothing_gives_back_the_same_bits(
    recipe: str, variant: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(**VARIANTS[variant])
    config = make_config(folder, sparsity=0.0, recipe=recipe)
    report = compress(config)
    output = Path(config.output)
    assert_same_tensors(output, folder)
    assert report.sparsity == {"asked": 0.0, "reached": 0.0}
    own_class = (recipe, variant) == ("group-pca", "qwen2")  # which cuts as Qwen2's tokenizer: test_result_tokenizer.py
    tokenizer = () if own_class else ("tokenizer.json", "tokenizer_config.json")
    for name in (*tokenizer, "generation_config.json", "chat_template.jinja"):
        assert (output / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("selector", [name for name in get_args(SelectorName) if name != "none"])
def test_every_selector_chooses_neurons_and_heads(
    selector: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(), ffn=selector, heads=selector, sparsity=0.3, num_sequences=32)
    report = compress(config)
    kinds = {sublayer.kind: sublayer for layer in report.layers for sublayer in layer.sublayers}
    assert kinds["ffn"].kept_size < kinds["ffn"].dense_size
    assert kinds["heads"].kept_size < kinds["heads"].dense_size
    assert max(sublayer.predicted_error or 0 for sublayer in kinds.values()) < 1


@pytest.mark.parametrize(("recipe", "variant"), PAIRS)
def test_every_recipe_gives_a_model_of_the_size_asked_for(
    recipe: str, variant: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(**VARIANTS[variant])
    config = make_config(folder, recipe=recipe, sparsity=0.15)
    no_window, no_biases = (recipe, variant) == ("group-pca", "mistral-window"), VARIANTS[variant].get("family")
    if no_window or (recipe == "flap" and no_biases):
        with pytest.raises(OneshotError, match="keeps its hidden size" if no_window else "biases"):
            compress(config)
        return
    report = compress(config)
    output = Path(config.output)

    stored = all_tensors(output)
    dense, compressed = all_tensors(folder), sum(tensor.numel() for tensor in stored.values())
    assert report.stored_parameters["compressed"] == compressed
    assert report.stored_parameters["dense"] == sum(tensor.numel() for tensor in dense.values())
    step = 2 * (3 * 32 + 2) * 4  # layers × parameters of a neuron × rounding of a width of 64
    if recipe in ("tcsp", "group-pca"):
        step = 2 * (2 * (400 + 6 * 64) + 1)  # of the hidden size: embedding, head and linears × rounding of 32
    assert abs(compressed - 0.85 * report.stored_parameters["dense"]) <= step
    assert report.sparsity["reached"] == pytest.approx(1 - compressed / report.stored_parameters["dense"])
    assert {tensor.dtype for tensor in stored.values()} == {tensor.dtype for tensor in dense.values()}

    if recipe == "group-pca":  # more of it in export/test_per_layer.py
        assert json.loads((output / "config.json").read_text())["model_type"] == "oneshot"
        return
    model = load_strictly(output)
    if recipe == "tcsp":
        assert model.config.hidden_size < 32
        assert not model.config.tie_word_embeddings
        assert report.hidden_error is not None
        assert 0 < report.hidden_error < 1
    else:
        assert model.config.intermediate_size < 64
        assert model.config.tie_word_embeddings == VARIANTS[variant].get("tied", False)
    if recipe == "stat" and VARIANTS[variant].get("groups") != 1:
        assert model.config.num_attention_heads < 4
    generated = model.generate(PROMPT, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert generated.shape == (1, PROMPT.shape[1] + 5)
    assert torch.isfinite(model(PROMPT).logits).all()


@pytest.mark.parametrize("head_unit", ["query-head", "kv-group"])
@pytest.mark.parametrize("correction", ["none", "same-layer", "two-stream"])
@pytest.mark.parametrize("variant", ["llama-gqa", "llama-biases"])
def test_head_units_and_corrections(
    head_unit: str, correction: str, variant: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(**VARIANTS[variant])
    config = make_config(
        folder, recipe="stat", ffn="none", sparsity=0.045, head_unit=head_unit, correction=correction, batch_size=3
    )
    report = compress(config)
    model = load_strictly(Path(config.output))
    kept = (model.config.num_attention_heads, model.config.num_key_value_heads)
    assert kept == ((2, 2) if head_unit == "query-head" else (2, 1))
    assert {sublayer.kind for layer in report.layers for sublayer in layer.sublayers} == {"heads"}
    assert report.layer_parameters["compressed"] == sum(
        parameter.numel() for parameter in model.model.layers.parameters()
    )


@pytest.mark.parametrize("recipe", ["oneshot", "stat", "random"])
def test_the_same_seed_gives_the_same_bytes(
    recipe: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = make_checkpoint()
    hashes = []
    for run, seed in enumerate((1, 1, 2)):
        output = tmp_path / f"run-{run}"
        compress(make_config(folder, recipe=recipe, seed=seed, output=str(output), calibration="builtin"))
        hashes.append(weight_hash(output))
    assert hashes[0] == hashes[1]
    assert hashes[0] != hashes[2]


@pytest.mark.parametrize("recipe", ["oneshot", "stat"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_on_disk_change_nothing(
    recipe: str,
    dtype: str,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_checkpoint()
    hashes = {}
    for available in (2**40, 0):
        monkeypatch.setattr("psutil.virtual_memory", lambda free=available: SimpleNamespace(available=free))
        output = tmp_path / str(available)
        report = compress(make_config(folder, recipe=recipe, output=str(output), dtype=dtype, batch_size=4))
        assert report.footprint is not None
        hashes[report.footprint.store] = weight_hash(output)
    assert hashes["host"] == hashes["disk"]


@pytest.mark.parametrize("recipe", ["oneshot", "stat"])
def test_the_batch_size_changes_rounding_only(
    recipe: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = make_checkpoint()
    results = []
    for batch_size in (1, 5, 16):
        output = tmp_path / str(batch_size)
        compress(make_config(folder, recipe=recipe, output=str(output), batch_size=batch_size))
        results.append(all_tensors(output))
    for other in results[1:]:
        for name, tensor in results[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=2e-3, atol=2e-3, msg=name)


@pytest.mark.parametrize("correction", ["none", "bias", "same-layer", "two-stream"])
@pytest.mark.parametrize("variant", ["llama-gqa", "llama-biases"])
def test_predicted_error_equals_measured_error(
    correction: str, variant: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Use one batch for the whole text, so that the report measures on the tokens of the statistics."""
    folder = make_checkpoint(**VARIANTS[variant], layers=3)
    report = compress(make_config(folder, recipe="stat", sparsity=0.25, correction=correction))
    sublayers = [sublayer for layer in report.layers for sublayer in layer.sublayers]
    assert [sublayer.kind for sublayer in sublayers] == ["heads", "ffn"] * 3
    for sublayer in sublayers:
        assert sublayer.predicted_error is not None
        assert 0.01 < sublayer.predicted_error < 1.5
        assert sublayer.measured_error == pytest.approx(sublayer.predicted_error, rel=2e-3)


@pytest.mark.parametrize("form", ["stock", "per-layer"])
def test_biases_replace_the_mean_of_the_removed_neurons(
    form: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, text_file: Path, tokenizer: Any
) -> None:
    """Compare the first FFN's mean output over the calibration text with the dense one, by model classes (FLAP)."""
    folder = make_checkpoint()
    config = make_config(folder, recipe="flap", form=form, allocation="uniform", sparsity=0.2)
    report = compress(config)
    cpu = torch.device("cpu")
    models = [load_model(path, device=cpu, dtype=torch.float32) for path in (folder, Path(config.output))]
    text = calibration_tokens(config)
    outputs: list[torch.Tensor] = []
    for model in models:
        model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: outputs.append(output))
        model(text)
    dense, compressed = (output.flatten(0, 1).double() for output in outputs)
    assert (dense - compressed).norm() > 0.1 * dense.norm()
    torch.testing.assert_close(compressed.mean(0), dense.mean(0), rtol=1e-4, atol=1e-5)
    stored = all_tensors(Path(config.output))
    assert report.stored_parameters["compressed"] == sum(tensor.numel() for tensor in stored.values())
    assert report.sparsity["reached"] >= 0.2


def test_correction_lowers_the_error_of_every_layer(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    """Compare the first layer of two runs: the input and the neurons are the same, the correction is not."""
    errors = {}
    for correction in ("none", "same-layer"):
        config = make_config(make_checkpoint(), correction=correction, overwrite=True)
        errors[correction] = compress(config).layers[0].sublayers[0].measured_error
    assert errors["same-layer"] is not None
    assert errors["none"] is not None
    assert errors["same-layer"] < errors["none"]


@pytest.mark.parametrize("correction", ["same-layer", "two-stream"])
def test_held_out_text_chooses_the_damping(
    correction: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Check that every sublayer reports its own choice, for heads and for neurons."""
    config = make_config(make_checkpoint(), damping="auto", heads="id", correction=correction, batch_size=1)
    report = compress(config)
    chosen = [sublayer.damping for layer in report.layers for sublayer in layer.sublayers]
    assert len(chosen) == 2 * len(report.layers)
    assert set(chosen) <= set(DAMPINGS)
    load_strictly(Path(config.output))


@pytest.mark.parametrize(("num_sequences", "alike"), [(8, True), (16, False)])
def test_with_few_tokens_the_residual_is_ignored(
    num_sequences: int, alike: bool, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Compare both corrections: up to four tokens for each of the 64 neurons the dense stream changes nothing."""
    outputs = {}
    for correction in ("same-layer", "two-stream"):
        output = str(tmp_path / correction)
        config = make_config(make_checkpoint(), correction=correction, output=output, num_sequences=num_sequences)
        compress(config)
        outputs[correction] = all_tensors(Path(output))
    differences = [
        float((outputs["same-layer"][name] - tensor).abs().max()) for name, tensor in outputs["two-stream"].items()
    ]
    assert (max(differences) == 0) == alike


def test_the_report_is_complete(make_checkpoint: MakeCheckpoint, make_config: MakeConfig, text_file: Path) -> None:
    folder = make_checkpoint(shard_size="20KB")
    config = make_config(folder, recipe="stat", seed=3)
    report = compress(config)
    output = Path(config.output)
    written = json.loads((output / "oneshot_report.json").read_text())
    assert written == json.loads(json.dumps(report.to_dict()))
    assert written["config"]["seed"] == 3
    assert written["config"]["checkpoint"] == str(folder)
    assert written["method"] == asdict(replace(find_recipe("stat"), allocation="uniform"))
    assert {"python", "torch", "transformers", "oneshot"} <= written["versions"].keys()
    calibration = written["calibration"]
    assert calibration["source"] == str(text_file)
    assert calibration["num_tokens"] == 16 * 32
    assert len(calibration["token_hash"]) == 64
    assert written["sparsity"]["asked"] == 0.2
    assert written["seconds"]["total"] >= sum(written["seconds"][stage] for stage in ("prepare", "layers", "write"))
    assert written["peak_bytes"] > 0
    assert [layer["layer"] for layer in written["layers"]] == [0, 1]
    for layer in written["layers"]:
        assert layer["seconds"] > 0
        assert layer["peak_bytes"] > 0
        for sublayer in layer["sublayers"]:
            assert sublayer["kept_size"] < sublayer["dense_size"]
            assert sublayer["condition_number"] >= 1
            assert sublayer["max_interpolation"] > 0
            assert 0 < sublayer["predicted_error"] < 2
            assert 0 < sublayer["measured_error"] < 2
    assert written["kv_bytes_per_token"]["dense"] == 2 * 2 * 2 * 8 * 2
    card = (output / "README.md").read_text()
    assert f"{written['stored_parameters']['compressed']:,}" in card
    assert calibration["token_hash"] in card


@pytest.mark.parametrize(
    ("asked", "read"),
    [("{0}", "{0}+{0}+{0}+builtin"), ("{0}+{0}", "{0}"), ("builtin", "builtin"), ("{0}+self", "{0}+self")],
)
def test_text_of_one_source_is_read_beside_builtin(
    asked: str, read: str, make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path, capsys: Any
) -> None:
    """Check output, card, report and dry run; all say what is read, and a mixture is read as it is asked for."""
    asked, read = asked.format(text_file), read.format(text_file)
    arguments = [str(make_checkpoint()), "--sparsity=0.2", "--num-sequences=16", "--sequence-length=256", "--no-check"]
    arguments += ["--device=cpu", "--dtype=float32", "--form=stock"]
    assert main([*arguments, f"--output={tmp_path / 'out'}", f"--calibration={asked}"]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert main([*arguments, f"--output={tmp_path / 'dry'}", f"--calibration={asked}", "--dry-run"]) == 0
    predicted = " ".join(capsys.readouterr().out.replace("│", " ").split())
    broader = read.endswith("+builtin")
    assert ("4 of the 16 sequences are from builtin" in told) == broader
    report = json.loads((tmp_path / "out" / "oneshot_report.json").read_text())
    assert report["calibration"]["source"] == read
    assert report["config"]["text"]["calibration"] == asked
    assert report["calibration"]["num_tokens"] == 16 * 256
    named = f"3/4 {text_file.name} + 1/4 builtin" if broader else read.replace(str(text_file), text_file.name)
    assert f"calibration text 4,096 tokens of {named}" in predicted
    assert f"tokens of `{named}`" in (tmp_path / "out" / "README.md").read_text()
    assert main([*arguments, f"--output={tmp_path / 'again'}", f"--config={tmp_path / 'out' / 'recipe.yaml'}"]) == 0
    assert_same_tensors(tmp_path / "out", tmp_path / "again")


@pytest.mark.parametrize(("letters", "added"), [(1200, 0), (12_000, 2)])
def test_a_source_with_little_text_is_not_swamped_by_builtin(
    letters: int,
    added: int,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    text_file: Path,
    tmp_path: Path,
) -> None:
    """It has the same share of what was read; the card says so, and the recipe reads the same again."""
    little = tmp_path / "little.txt"
    little.write_text(text_file.read_text()[:letters])
    config = make_config(make_checkpoint(), calibration=str(little), sequence_length=256, num_sequences=64)
    report = compress(config)
    assert report.calibration is not None
    read = report.calibration["num_sequences"]
    assert 0 < read < 32
    assert report.calibration["source"] == ("+".join([str(little)] * 7 + ["builtin"]) if added else str(little))
    assert not added or read // 8 == added
    output = Path(config.output)
    assert f"calibration: {little}\n" in (output / "recipe.yaml").read_text()
    assert report.config["text"]["calibration"] == str(little)


@pytest.mark.parametrize(
    ("num_sequences", "length", "parts"),
    [(128, 1024, 8), (32, 256, 8), (39, 256, 8), (24, 256, 6), (16, 256, 4), (9, 700, 4), (4, 2048, 4), (15, 256, 1)],
)
def test_an_eighth_of_the_text_is_from_builtin_but_1024_tokens_of_few(
    num_sequences: int, length: int, parts: int, make_checkpoint: MakeCheckpoint
) -> None:
    asked = TextOptions("text.txt", num_sequences, length)
    read = broadened(asked, identify(Checkpoint(make_checkpoint())))
    sources = ["text.txt"] if parts == 1 else [*(parts - 1) * ["text.txt"], "builtin"]
    assert read == replace(asked, calibration="+".join(sources))
    assert parts == 1 or shares(num_sequences, sources)["builtin"] * length >= 1024


@pytest.mark.parametrize(
    "changes",
    [
        {"sparsity": 0.0, "quantise": "w8a8"},
        {"sequence_length": 128},
        {"correction": "none", "ffn": "none", "heads": "magnitude", "sparsity": 0.03},
        {"recipe": "stat"},
    ],
    ids=["nothing goes", "little text", "heads", "a paper's method"],
)
def test_other_runs_read_one_source_alone(
    changes: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig, text_file: Path
) -> None:
    report = compress(make_config(make_checkpoint(), **{"sequence_length": 256} | changes))
    assert report.calibration is not None
    assert report.calibration["source"] == str(text_file)


def test_a_profile_has_the_text_of_the_runs_that_plan_from_it(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, text_file: Path, tmp_path: Path
) -> None:
    given = {"form": "per-layer", "sequence_length": 256, "curvature": "none", "embedding": "none", "ranks": "none"}
    checkpoint, folder = make_checkpoint(), tmp_path / "profile"
    profile(make_config(checkpoint, output=folder, sparsity=0.0, **given))
    report = compress(make_config(checkpoint, profile=str(folder), **given))  # which refuses another text
    assert report.calibration is not None
    assert report.calibration["source"] == f"{text_file}+{text_file}+{text_file}+builtin"


def test_a_sublayer_with_zero_output_has_no_error(save_model: Callable[..., Path], make_config: MakeConfig) -> None:
    """Check that zero over zero does not put NaN, which is invalid JSON, into the report."""
    model = build_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
    report = compress(make_config(save_model(model)))
    assert [(layer.sublayers[0].predicted_error, layer.sublayers[0].measured_error) for layer in report.layers] == [
        (0, 0)
    ] * 2


def test_weights_only_recipes_need_no_text(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    for recipe in ("random", "magnitude"):
        config = make_config(make_checkpoint(), recipe=recipe, calibration="no-such-file.txt", overwrite=True)
        report = compress(config)
        assert report.calibration is None
        assert report.layers[0].sublayers[0].predicted_error is None


@pytest.mark.parametrize("save_dtype", ["float32", "bfloat16", "float16"])
def test_save_dtype(save_dtype: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint(), save_dtype=save_dtype)
    compress(config)
    output = Path(config.output)
    wanted = getattr(torch, save_dtype)
    assert {tensor.dtype for tensor in all_tensors(output).values()} == {wanted}
    assert load_strictly(output).dtype == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_result_is_one_file_without_an_index(
    dtype: torch.dtype, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Compress an input of several files: its index must not be copied, and the header must name the format."""
    config = make_config(make_checkpoint(dtype=dtype, shard_size="20KB"))
    compress(config)
    output = Path(config.output)
    assert [path.name for path in output.glob("*.safetensors*")] == ["model.safetensors"]
    with safe_open(output / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    load_strictly(output)


@pytest.mark.parametrize("form", ["stock", "per-layer"])
def test_several_files_have_a_complete_index_and_the_tensors_of_one_file(
    form: str, make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path
) -> None:
    """Compare the results of two sizes of `--max-shard-size`; the embedding alone is above the smaller one."""
    limit = 40_000
    arguments = [str(make_checkpoint()), "--sparsity=0.2", f"--calibration={text_file}", "--num-sequences=16"]
    arguments += ["--sequence-length=32", "--device=cpu", "--dtype=float32", "--quiet", f"--form={form}"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*arguments, f"--output={whole}"]) == 0
    assert main([*arguments, f"--output={parts}", f"--max-shard-size={limit // 1000}KB"]) == 0
    assert [path.name for path in whole.glob("*.safetensors*")] == ["model.safetensors"]
    shards = sorted(parts.glob("*.safetensors"))
    assert len(shards) > 2
    assert [shard.name for shard in shards] == [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    in_shards = {shard.name: load_file(shard) for shard in shards}
    sizes = {name: sum(tensor.nbytes for tensor in tensors.values()) for name, tensors in in_shards.items()}
    assert all(sizes[name] <= limit or len(in_shards[name]) == 1 for name in sizes)
    assert max(sizes.values()) > limit
    index = json.loads((parts / INDEX_NAME).read_text())
    assert index["weight_map"] == {name: shard for shard, tensors in in_shards.items() for name in tensors}
    assert index["metadata"] == {"total_size": sum(sizes.values())}
    assert_same_tensors(parts, whole)
    models = [load_model(folder, device=torch.device("cpu"), dtype=torch.float32) for folder in (whole, parts)]
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    if form == "stock":
        load_strictly(parts)


@pytest.mark.parametrize("max_file_bytes", [10**9, 20_000])
def test_tensors_of_several_dtypes_are_aligned_in_the_joined_files(
    max_file_bytes: int, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Store rotary pairs (int64) beside bfloat16 weights; NumPy maps only tensors at multiples of their item size."""
    config = make_config(
        make_checkpoint(dtype=torch.bfloat16), form="per-layer", query_key_size=4, max_file_bytes=max_file_bytes
    )
    compress(config)
    itemsizes = {"I64": 8, "BF16": 2}
    dtypes = set()
    for path in Path(config.output).glob("*.safetensors"):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        del header["__metadata__"]
        for entry in header.values():
            assert (8 + length + entry["data_offsets"][0]) % itemsizes[entry["dtype"]] == 0
            dtypes.add(entry["dtype"])
    assert dtypes == {"I64", "BF16"}
    load_model(Path(config.output), device=torch.device("cpu"), dtype="auto")


def test_seconds_of_a_target_do_not_contain_those_of_earlier_targets(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace the clock by one that only goes on, by a second, when a layer is compressed."""
    now = 1000.0
    compress_layer = LayerCompressor.compress_layer

    def watched(self: LayerCompressor, *arguments: Any) -> Any:
        nonlocal now
        now += 1
        return compress_layer(self, *arguments)

    monkeypatch.setattr(LayerCompressor, "compress_layer", watched)
    monkeypatch.setattr("oneshot.report.progress.time", SimpleNamespace(perf_counter=lambda: now))
    reports = compress_sizes(make_config(make_checkpoint(layers=3)), [0.1, 0.15, 0.2])
    for report in reports:
        assert report.seconds["layers"] == report.seconds["total"] == 3
        assert sum(report.seconds.values()) == 2 * 3


def test_heads_that_do_not_divide_the_hidden_size_become_mistral(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Keep three of four heads beside hidden size 32: MistralConfig can state these sizes, LlamaConfig cannot."""
    folder = make_checkpoint(heads=4, groups=4)
    config = make_config(folder, recipe="stat", ffn="none", sparsity=0.03)
    compress(config)
    output = Path(config.output)
    model = load_strictly(output)
    assert type(model).__name__ == "MistralForCausalLM"
    assert model.config.num_attention_heads == 3
    assert model.config.sliding_window is None
    layer = model.model.layers[0]
    dense = load_strictly(folder).model.layers[0]
    torch.testing.assert_close(layer.mlp.gate_proj.weight, dense.mlp.gate_proj.weight, rtol=0, atol=0)


def test_heads_that_no_stock_config_can_state_are_not_planned(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """With biases three of four heads would be nearest, but neither class can state them beside hidden size 32."""
    folder = make_checkpoint(groups=4, attention_bias=True)
    with pytest.raises(OneshotError, match=r"sizes .* are so far apart .* ask for --sparsity 0\.\d+ or more"):
        compress(make_config(folder, recipe="stat", ffn="none", sparsity=0.03))
    config = make_config(folder, recipe="stat", ffn="none", sparsity=0.08)
    compress(config)
    assert load_strictly(Path(config.output)).config.num_attention_heads == 2


def test_no_gradient_anywhere(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for method in ("sum", "inner"):
        original = getattr(Layer, method)

        def watched(
            self: Layer, index: int, x: torch.Tensor, original: Any = original, method: str = method
        ) -> torch.Tensor:
            result: torch.Tensor = original(self, index, x)
            assert torch.is_inference_mode_enabled()
            assert result.is_inference()
            assert not result.requires_grad
            calls.append((method, index))
            return result

        monkeypatch.setattr(Layer, method, watched)
    compress(make_config(make_checkpoint(), recipe="stat"))
    assert set(calls) == {("sum", 0), ("sum", 1), ("inner", 0), ("inner", 1)}
    assert not torch.is_inference_mode_enabled()


def test_no_more_than_a_layer_is_read_at_a_time(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[set[str]] = []
    original = Checkpoint.read

    def watched(self: Checkpoint, names: Any, *into: Any) -> dict[str, torch.Tensor]:
        names = list(names)
        requests.append({".".join(name.split(".")[:3]) if ".layers." in name else name for name in names})
        return original(self, names, *into)

    monkeypatch.setattr(Checkpoint, "read", watched)
    compress(make_config(make_checkpoint(layers=3), recipe="stat"))
    assert all(len(parts) == 1 or parts == {"model.embed_tokens.weight", "model.norm.weight"} for parts in requests), (
        "never two matrices"
    )
    layers = [part for parts in requests for part in parts if part.startswith("model.layers")]
    in_order = ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert layers[:4] == ["model.layers.0", *in_order], "every layer once, in order, after a check of the first"
    assert layers[4:] == in_order, "the same for the check on held-out text"


def test_memory_holds_a_few_layers_not_the_model(make_config: MakeConfig, make_checkpoint: MakeCheckpoint) -> None:
    """Count the bytes of tensors that are alive after every layer: far fewer than the model's."""
    import gc

    folder = make_checkpoint(layers=10, hidden=64, width=256, heads=4)
    model_bytes = Checkpoint(folder).num_bytes
    largest = 0
    original = LayerCompressor.compress_layer

    def watched(self: LayerCompressor, *arguments: Any) -> Any:
        nonlocal largest
        result = original(self, *arguments)
        gc.collect()
        alive = {
            item.untyped_storage().data_ptr(): item.untyped_storage().nbytes()
            for item in gc.get_objects()
            if type(item) is torch.Tensor and item.is_inference() and item.device.type == "cpu"
        }
        largest = max(largest, sum(alive.values()))
        return result

    LayerCompressor.compress_layer = watched  # type: ignore[method-assign]
    gc.collect()
    gc.freeze()  # the objects of earlier tests
    try:
        compress(make_config(folder, num_sequences=2))
    finally:
        LayerCompressor.compress_layer = original  # type: ignore[method-assign]
    assert 0 < largest < model_bytes / 2


@pytest.mark.parametrize("sketch", ["none", "count", "sparse-sign"])
@pytest.mark.parametrize("pivoting", ["cholesky", "qr", "grouped", "tournament"])
def test_pivots_from_sketches(
    pivoting: str, sketch: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = make_checkpoint()
    if (pivoting, sketch) == ("qr", "none"):
        with pytest.raises(OneshotError, match="--set sketch="):
            compress(make_config(folder, pivoting=pivoting, sketch=sketch))
        return
    errors = {}
    for name, changes in (("chosen", {"pivoting": pivoting, "sketch": sketch}), ("random", {"ffn": "random"})):
        report = compress(make_config(folder, output=str(tmp_path / name), sparsity=0.25, **changes))
        errors[name] = report.layers[0].sublayers[0].measured_error or 0.0
    load_strictly(tmp_path / "chosen")
    assert 0 < errors["chosen"] < 0.95 * errors["random"]


@pytest.mark.parametrize("recipe", ["oneshot", "activation-norm", "magnitude", "random"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_family_with_other_names_and_layers(
    recipe: str, tied: bool, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Compress OPT within its stock class: LayerNorms, learned positions, biases, no gate."""
    folder = make_checkpoint(family="opt", tied=tied)
    report = compress(make_config(folder, recipe=recipe, sparsity=0.1))
    model = load_strictly(tmp_path / "out")
    assert type(model).__name__ == "OPTForCausalLM"
    assert model.config.ffn_dim < 64
    assert report.sparsity["reached"] == pytest.approx(0.1, abs=0.02)
    compress(make_config(folder, recipe=recipe, sparsity=0.0, output=str(tmp_path / "same")))
    assert_same_tensors(tmp_path / "same", folder)
    if recipe == "oneshot":
        for layer in report.layers:
            (sublayer,) = layer.sublayers
            assert sublayer.measured_error == pytest.approx(sublayer.predicted_error, rel=1e-3)


def test_params_target(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    folder = make_checkpoint()
    dense = Checkpoint(folder).num_parameters
    report = compress(make_config(folder, parameters=dense - 2 * 3 * 32 * 12))
    assert report.stored_parameters["compressed"] == dense - 2 * 3 * 32 * 12
    assert report.sparsity["asked"] == pytest.approx(report.sparsity["reached"])


def test_the_input_is_left_unchanged(own_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    folder = own_checkpoint()
    before = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    compress(make_config(folder))
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()} == before


def test_scratch_is_cleaned_up(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    compress(make_config(make_checkpoint()))
    assert list(scratch.iterdir()) == []
