"""Results with quantised linears: opened by transformers, counted, resumed, and refused where nothing is right."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import edit_config
from factories import MakeCheckpoint, MakeConfig, MakeResult
from interruptions import contents, stop_before, undisturbed
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from worker_threads import run_in_threads

pytest.importorskip("compressed_tensors", reason="the extra `compressed`")
from transformers import AutoModelForCausalLM

import oneshot
from oneshot.checkpoint import Checkpoint, identify
from oneshot.errors import ConfigError, PlanError
from oneshot.evaluation import load_model
from oneshot.pipeline import compress, predict, profile

IN_GROUPS = {"per-layer": {"serve": "group=32"}}  # by form: there are ranks in such groups
SIZES: dict[str, Any] = {"hidden": 64, "width": 128, "tied": True, "heads": 4, "groups": 2}
CASES = [
    ("stock", "w4a16", {}),
    ("stock", "w8a8", {"attention_bias": True}),
    ("per-layer", "w4a16", {}),
    ("per-layer", "w4a16", {"family": "gemma3_text", "head_dim": 16}),
    ("nemotron-nas", "fp8", {}),
    ("stock", "nvfp4", {"family": "phi3", "tied": False}),  # whose linears are stored merged
    ("per-layer", "nvfp4", {}),
    ("per-layer", "mxfp4", {}),
]
READERS = (r"layers\.0\.self_attn\.(q|k|v)", r"layers\.0\.mlp\.(gate|up)")


@pytest.fixture(scope="module")
def plain() -> Callable[[Path, Path], Path]:
    """`plain(folder, copy)` writes the same result with dequantised weights, as this package's reader has them."""

    def write(folder: Path, copy: Path) -> Path:
        shutil.copytree(folder, copy)
        stored = Checkpoint(folder)
        tensors = {name: tensor.contiguous() for name, tensor in stored.read(stored.shapes).items()}
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (copy / "config.json").write_text(json.dumps(config))
        return copy

    return write


@pytest.mark.parametrize(("form", "name", "model"), CASES)
def test_transformers_opens_what_was_written(
    form: str,
    name: str,
    model: dict[str, Any],
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    plain: Callable[[Path, Path], Path],
    tmp_path: Path,
) -> None:
    options = dict(IN_GROUPS.get(form, {}))
    if name.endswith("fp4"):
        options["save_dtype"] = "bfloat16"
    config = make_config(make_checkpoint(**SIZES | model), form=form, quantise=name, sparsity=0.3, **options)
    report, folder = compress(config), Path(config.output)
    opened = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    dequantised, own = (
        load_model(one, device=torch.device("cpu"), dtype=opened.dtype)
        for one in (plain(folder, tmp_path / "plain"), folder)
    )
    tokens = torch.randint(0, 400, (2, 20))
    with torch.inference_mode():
        logits, expected = opened(tokens).logits, dequantised(tokens).logits
        rounds_inputs = name in ("w8a8", "fp8")
        assert torch.equal(own(tokens).logits, logits if rounds_inputs else expected)  # as `oneshot evaluate` opens it
        assert not rounds_inputs or not torch.allclose(logits, expected, rtol=1e-4, atol=0)
    weights = dict(dequantised.named_parameters())
    linears = [one for one, module in opened.model.layers.named_modules() if isinstance(module, nn.Linear)]
    assert linears
    for linear in linears:  # the first pass has dequantised them
        read = opened.model.layers.get_submodule(linear).weight
        torch.testing.assert_close(read, weights[f"model.layers.{linear}.weight"], rtol=1e-6, atol=0)
    if name.endswith(("a16", "fp4")):  # what linears read is not rounded
        torch.testing.assert_close(logits, expected)
    assert any(stored.endswith(".columns") for stored in Checkpoint(folder).shapes) == (form == "per-layer")
    if name == "nvfp4":  # engines merge what reads the same, and take one global scale
        with safe_open(folder / "model.safetensors", "pt") as file:
            found = {one: float(file.get_tensor(one)) for one in file.keys() if one.endswith("global_scale")}  # noqa: SIM118
        for readers in READERS:
            assert len({value for one, value in found.items() if re.search(readers, one)}) == 1
    for number in range(2):  # as an input, whose matrices of low rank are multiplied out
        layer, expected_layer = (identify(Checkpoint(one)).read_layer(number) for one in (folder, tmp_path / "plain"))
        assert layer.keys() == expected_layer.keys()
        assert all(torch.equal(tensor, expected_layer[tensor_name]) for tensor_name, tensor in layer.items())
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert "lm_head" in stated["ignore"]
    assert report.stored_parameters["compressed"] == Checkpoint(folder).num_parameters
    assert f"the linears of layers as {name}" in (folder / "README.md").read_text()
    errors = [layer.rounding_errors for layer in report.layers]
    assert all(0 < error < 0.5 for of_layer in errors for error in of_layer.values())
    assert {len(of_layer) for of_layer in errors} == {7}


@pytest.mark.parametrize(("form", "name"), [("stock", "w8a8"), ("per-layer", "fp8"), ("stock", "w4a16")])
def test_results_that_state_tuples_as_outputs_are_evaluated(
    form: str, name: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, text_file: Path
) -> None:
    """Evaluation reads outputs by their names."""
    config = make_config(make_checkpoint(**SIZES), form=form, quantise=name, sparsity=0.3, **IN_GROUPS.get(form, {}))
    compress(config)
    options: dict[str, Any] = {"max_windows": 1, "sequence_length": 32, "decode_tokens": 2, "device": "cpu"}
    expected, *_ = oneshot.evaluate(config.output, text_file, **options)
    edit_config(Path(config.output), return_dict=False)
    found, *_ = oneshot.evaluate(config.output, text_file, **options)
    assert found.perplexity == expected.perplexity


@pytest.mark.parametrize("passes", [False, True], ids=["at once", "after a pass"])
@pytest.mark.parametrize("name", ["w8a8", "w4a16", "fp8", "nvfp4", "mxfp4"])
def test_quantised_linears_are_neither_expanded_nor_laid_out(
    name: str, passes: bool, make_checkpoint: MakeCheckpoint, make_result: MakeResult, tmp_path: Path
) -> None:
    """The first pass dequantises the weights of compressed-tensors, and what linears read is still rounded."""
    options = {"save_dtype": "bfloat16"} if name.endswith("fp4") else dict(IN_GROUPS["per-layer"])
    folder = make_result(make_checkpoint(**SIZES), form="per-layer", quantise=name, sparsity=0.3, **options)
    tokens = torch.randint(0, 400, (2, 20))

    def logits(model: Any) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model(tokens).logits
        return found

    def opened(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

    model, expected = opened(folder), logits(opened(folder))
    if passes:
        logits(model)
    before = repr(model), repr(model.config)
    with pytest.raises(ValueError, match=r"_proj is quantised or has an adapter.* made without --quantise, and call"):
        model.expand_(0)
    model.lay_out_()
    linears = [one for one in model.model.layers.modules() if isinstance(one, nn.Linear)]
    assert all(weight.is_contiguous() for linear in linears for weight in linear.parameters())
    assert (repr(model), repr(model.config)) == before
    # tables of the embedding are laid out, and some CPUs then sum in another order in bfloat16
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=2**-8 if expected.dtype == torch.bfloat16 else 0)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(opened(tmp_path / "saved")), expected)


def test_bytes_are_known_before(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    """The files have the bytes that are counted from the sizes, and keep below `--max-size`."""
    folder = make_checkpoint(**SIZES)
    config = make_config(folder, quantise="w4a16", sparsity=None, size_bytes=160_000)
    report, written = compress(config), Path(config.output) / "model.safetensors"
    assert 100_000 < written.stat().st_size <= 160_000
    assert report.footprint is not None
    header = int.from_bytes(written.read_bytes()[:8], "little") + 8
    assert report.footprint.result_bytes == written.stat().st_size - header
    assert predict(config).result_bytes == report.footprint.result_bytes
    assert "compressed-tensors" in report.versions  # which a run that continues another one compares


BYTES = [
    ("stock", "w4a16", {}),
    ("stock", "fp8", {"attention_bias": True, "tied": False}),
    ("nemotron-nas", "w8a8", {}),
    *(("per-layer", name, {}) for name in ("w4a16", "w8a8", "fp8", "nvfp4", "mxfp4")),
    ("per-layer", "w4a16", {"family": "gemma3_text", "head_dim": 16}),
]


@pytest.mark.parametrize(("form", "name", "model"), BYTES)
def test_a_dry_run_predicts_the_bytes(
    form: str,
    name: str,
    model: dict[str, Any],
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    tmp_path: Path,
) -> None:
    """Exactly by a profile; before one the files may be smaller by what goes of the embedding, which is not rounded."""
    options = {"form": form, "quantise": name, "sparsity": 0.3, "save_dtype": "bfloat16", "num_sequences": 4}
    options |= IN_GROUPS.get(form, {})
    config = make_config(make_checkpoint(**SIZES | model), **options)
    early, of_profile = predict(config), config
    if form != "stock":
        measured = replace(config, output=str(tmp_path / "profile"), quantise=None)
        profile(measured)
        of_profile = replace(config, profile=measured.output)
    report, written = compress(of_profile), Path(config.output) / "model.safetensors"
    size = written.stat().st_size - int.from_bytes(written.read_bytes()[:8], "little") - 8
    known = predict(replace(of_profile, output=str(tmp_path / "again")))
    assert known.result_bytes == size
    assert known.stored_parameters["compressed"] == report.stored_parameters["compressed"]
    embedding = 2 * (report.stored_parameters["dense"] - known.stored_parameters["compressed"])
    assert 0.9 * size <= early.result_bytes <= 1.1 * size + embedding
    assert form != "stock" or early.result_bytes == size


@pytest.mark.parametrize("name", ["w4a16", "nvfp4"])
def test_what_is_folded_at_the_end_is_rounded_to_the_nearest(
    name: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    options = {"save_dtype": "bfloat16", "serve": "group=32"} if name == "nvfp4" else {}
    config = make_config(make_checkpoint(**SIZES), recipe="tcsp", hidden_size=32, quantise=name, **options)
    report = compress(config)
    assert not any(layer.rounding_errors for layer in report.layers)
    whole = make_config(
        make_checkpoint(**SIZES), recipe="tcsp", hidden_size=32, serve="group=32", output=str(tmp_path / "whole")
    )
    compress(whole)
    small, large = (Checkpoint(Path(one.output)) for one in (config, whole))
    name = "model.layers.0.mlp.down_proj.weight"
    error = (small.read_one(name) - large.read_one(name)).norm() / large.read_one(name).norm()
    assert 0.02 < error < 0.15


def test_an_interrupted_run_ends_with_the_same_bytes(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint(**SIZES), form="per-layer", quantise="w4a16", resume=True)
    stop_before(1, partial(compress, config))
    compress(config)
    assert contents(Path(config.output)) == undisturbed(config)


@pytest.mark.parametrize(("form", "name"), [("per-layer", "w4a16"), ("stock", "w8a8"), ("nemotron-nas", "fp8")])
def test_two_processes_write_the_bytes_of_one(
    form: str, name: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Each sums its own part of the text, and one of them rounds."""
    options = {"form": form, "quantise": name, "num_sequences": 4, "batch_size": 1}
    folder = make_checkpoint(**SIZES)
    one, two = (make_config(folder, output=tmp_path / each, **options) for each in ("one", "two"))
    alone, (shared, _) = compress(one), run_in_threads(2, lambda: compress(two))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert [layer.rounding_errors for layer in shared.layers] == [layer.rounding_errors for layer in alone.layers]


def test_a_whole_model_is_rounded_by_its_text(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint(**SIZES), quantise="w4a16", sparsity=0.0)
    report = compress(config)
    assert report.sparsity["reached"] == 0
    assert all(len(layer.rounding_errors) == 7 for layer in report.layers)


@pytest.mark.parametrize(
    "options",
    [
        {"sparsity": 0.0, "correction": "none"},
        {"sparsity": 0.0},
        {"sparsity": 0.3, "correction": "none"},
        {"sparsity": 0.3, "form": "per-layer"},
    ],
    ids=str,
)
def test_neurons_are_stored_by_falling_norms_of_the_columns_that_read_them(
    options: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Each neuron of the result is the same one of the dense layer in all of its linears."""
    config = make_config(make_checkpoint(**SIZES), quantise="w4a16", **IN_GROUPS.get("per-layer", {}) | options)
    compress(config)
    for number in range(2):
        folders = (Path(config.checkpoint), Path(config.output))
        dense, layer = (identify(Checkpoint(one)).read_layer(number) for one in folders)
        found = []
        for name in ("gate_proj", "up_proj", "down_proj"):
            before, after = (one[f"mlp.{name}.weight"].float() for one in (dense, layer))
            before, after = (one.T if name == "down_proj" else one for one in (before, after))
            found.append((nn.functional.normalize(after) @ nn.functional.normalize(before).T).argmax(1))
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        assert len(found[0].unique()) == len(found[0])
        norms = layer["mlp.down_proj.weight"].float().norm(dim=0)
        assert bool((norms[1:] < 1.2 * norms[:-1]).all())
        assert not bool((found[0].diff() > 0).all())


NVFP4 = {"quantise": "nvfp4", "save_dtype": "bfloat16"}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"form": "gguf"}, "whose types --bits and --max-file-size choose; leave it out"),
    ({}, {"budget": "bytes"}, "give --max-size"),
    ({"hidden": 40, "width": 64}, {}, "do not divide the 40 inputs"),
    ({"hidden": 40, "width": 64}, NVFP4, "groups of 16 inputs, which do not divide the 40 inputs"),
    ({}, NVFP4 | {"serve": "group=24"}, "groups of 16 inputs, of which --serve group=24 is not a multiple"),
    ({}, {"quantise": "mxfp4"}, "add --save-dtype bfloat16"),
    ({"family": "gpt2"}, {}, "linears of the class Conv1D"),
    ({"family": "qwen3_moe"}, {}, "mixtures of experts"),
    ({}, {"serve": "engine=mlx"}, "MLX does not open"),
    ({"family": "gemma3_text", "head_dim": 16}, {"serve": "engine=vllm", "form": "per-layer"}, "add --form stock"),
    *(({}, {"serve": f"group={one}"}, f"128, 64 or 32 inputs, and not in groups of {one}") for one in (16, 48, 256)),
    ({}, {"serve": "group=128"}, "groups of 128 do not divide"),
    ({}, {"keep": ("layers.0.mlp.*",), "form": "per-layer"}, "--keep of layers and --quantise do not go together"),
]


@pytest.mark.parametrize(("model", "options", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_refusals(
    model: dict[str, Any], options: dict[str, Any], said: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(**SIZES | model)
    with pytest.raises((ConfigError, PlanError), match=said):
        compress(make_config(folder, **{"quantise": "w4a16"} | options))


def test_the_missing_package_is_named(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"pip install 'oneshot-llm\[compressed\]'"):
        compress(make_config(make_checkpoint(**SIZES), quantise="w8a8"))
