"""Predictions for a name on the hub, which fetch headers and no weights; the hub is a local folder here."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig
from huggingface_hub.utils._safetensors import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo
from safetensors.torch import load_file, save_file

from oneshot.checkpoint import Checkpoint, locate
from oneshot.errors import CalibrationError, CheckpointError
from oneshot.pipeline import compress, predict

NAME = "someone/model"
RUNS: dict[str, dict[str, Any]] = {
    "stock": {},
    "own sizes": {"form": "per-layer"},
    "parameters": {"recipe": "magnitude", "parameters": 40_000},
}


@pytest.fixture
def on_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`on_hub(folder)`: the hub has this folder under NAME, and nothing else."""

    def put(folder: Path) -> None:
        whole = Checkpoint(folder)

        def headers(name: str, *, revision: str | None) -> SafetensorsRepoMetadata:
            assert (name, revision) == (NAME, "v1")
            tensors = {
                name: TensorInfo(whole.dtypes[name], list(shape), (0, 4 * torch.Size(shape).numel()))
                for name, shape in whole.shapes.items()
            }
            file = SafetensorsFileMetadata({}, tensors)
            places = dict.fromkeys(tensors, "model.safetensors")
            return SafetensorsRepoMetadata(None, False, places, {"model.safetensors": file})

        def snapshot(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
            assert (name, revision) == (NAME, "v1")
            fetched = tmp_path / "cache"
            fetched.mkdir(exist_ok=True)
            for pattern in allow_patterns:
                for path in folder.glob(pattern):
                    shutil.copy(path, fetched)
            return str(fetched)

        monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", headers)
        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)

    return put


@pytest.mark.parametrize("form", ["stock", "per-layer", "gguf"])
@pytest.mark.parametrize("tied", [False, True])
def test_headers_predict_what_the_whole_checkpoint_predicts(
    form: str, tied: bool, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, on_hub: Any, tmp_path: Path
) -> None:
    folder = make_checkpoint(tied=tied)
    on_hub(folder)
    found, wanted = (
        predict(make_config(Path(name), form=form, **revision))
        for name, revision in ((NAME, {"revision": "v1"}), (str(folder), {}))
    )
    assert not list((tmp_path / "cache").glob("*.safetensors"))
    assert found.stored_parameters == wanted.stored_parameters
    assert found.result_bytes == wanted.result_bytes
    assert found.store == wanted.store


def with_an_equal_head(folder: Path, copy: Path, *, tied: bool) -> Path:
    """A copy that also stores the embedding as a head; `tied`: whether its config says that they are one."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, copy / "model.safetensors")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    return copy


@pytest.mark.parametrize("tie", [False, True])
def test_an_equal_head_counts_once(
    tie: bool, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, on_hub: Any, tmp_path: Path
) -> None:
    """Count it once where the config ties both, or where `--tie` does."""
    folder = with_an_equal_head(make_checkpoint(tied=True), tmp_path / "two tables", tied=not tie)
    on_hub(folder)
    found = predict(make_config(Path(NAME), tie=tie, revision="v1"))
    assert found.stored_parameters == predict(make_config(folder, tie=tie)).stored_parameters


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_a_name_is_compressed_as_its_folder(
    changes: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig, on_hub: Any, tmp_path: Path
) -> None:
    folder = make_checkpoint()
    on_hub(folder)
    outputs = [tmp_path / "of a name", tmp_path / "of a folder"]
    for checkpoint, revision, output in ((NAME, "v1", outputs[0]), (folder, None, outputs[1])):
        compress(make_config(Path(checkpoint), revision=revision, output=output, **changes))
    found, wanted = (
        {path.name: path.read_bytes() for path in output.iterdir() if path.suffix == ".safetensors"}
        for output in outputs
    )
    assert found == wanted


def test_a_request_that_fails_fetches_no_weights(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, on_hub: Any, tmp_path: Path
) -> None:
    on_hub(make_checkpoint())
    with pytest.raises(CalibrationError, match=r"missing\.txt does not exist"):
        compress(make_config(Path(NAME), revision="v1", calibration=str(tmp_path / "missing.txt")))
    assert {*tmp_path.glob("cache/*.json")}
    assert not {*tmp_path.glob("cache/*.safetensors")}


def test_a_model_in_the_cache_needs_no_hub(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(name: str, *, revision: str | None) -> None:
        raise OSError(f"{name} {revision} is out of reach")

    folder = make_checkpoint()
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", unreachable)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    config = make_config(Path(NAME), recipe="random")
    compress(config)
    assert Checkpoint(Path(config.output)).num_parameters < Checkpoint(folder).num_parameters


def test_what_the_hub_has_not_is_named(make_config: MakeConfig) -> None:
    with pytest.raises(CheckpointError, match=r"someone/model is not a local path and cannot be fetched"):
        predict(make_config(Path(NAME)))


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["model-1.safetensors", "model-2.safetensors"], ["model-1.safetensors", "model-2.safetensors"]),
        (["pytorch_model.bin", "consolidated.00.pth"], ["pytorch_model.bin"]),
        (["pytorch_model-1.bin"], ["pytorch_model-1.bin"]),
    ],
)
def test_only_weights_that_are_read_are_fetched(
    stored: list[str], wanted: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A repository may also have the weights in another format, and under the names of another library."""
    from huggingface_hub.utils import filter_repo_objects

    files = ["config.json", *stored, "consolidated.safetensors", "original/model.safetensors", "tf_model.h5"]
    indices = {
        "model-1.safetensors": "model.safetensors.index.json",
        "pytorch_model-1.bin": "pytorch_model.bin.index.json",
    }
    files += [indices[name] for name in stored if name in indices]

    def snapshot(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        for file in filter_repo_objects(files, allow_patterns=allow_patterns):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            content = {"weight_map": {name: name for name in stored}} if file.endswith("index.json") else {}
            (tmp_path / file).write_text(json.dumps(content))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert locate.download(NAME, None) == tmp_path
    fetched = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.suffix not in ("", ".json")}
    assert fetched == set(wanted)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_weights_of_modules_are_fetched(weights: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects

    modules = [{"path": path, "type": "sentence_transformers.models.Dense"} for path in ("", "1_Pooling", "2_Dense")]
    files = ["modules.json", "model.safetensors", "1_Pooling/config.json", "2_Dense/config.json", "3/model.safetensors"]
    files += ["2_Dense/pytorch_model.bin", f"2_Dense/{weights}", "colbert_linear.pt", "onnx/model.pt"]
    asked: list[list[str]] = []

    def snapshot(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        for file in filter_repo_objects(files, allow_patterns=allow_patterns):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(json.dumps(modules if file == "modules.json" else {}))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    locate.download(NAME, None)
    fetched = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.suffix not in ("", ".json")}
    assert fetched == {"model.safetensors", f"2_Dense/{weights}", "colbert_linear.pt"}
    lacking = ["1_Pooling"] if weights == "model.safetensors" else ["1_Pooling", "2_Dense"]
    assert asked[1:3] == [
        ["1_Pooling/model.safetensors", "2_Dense/model.safetensors"],
        [f"{place}/pytorch_model.bin" for place in lacking],
    ]
    assert asked[3:] == [["model.safetensors"]]


def test_nothing_more_is_asked_without_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def snapshot(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    locate.download(NAME, None)
    assert asked == [locate.SMALL_PATTERNS, ["model.safetensors"]]
