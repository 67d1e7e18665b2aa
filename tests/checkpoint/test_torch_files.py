"""Weights in torch's own files: read as the same tensors in safetensors are, and never as code."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig
from safetensors.torch import load_file

from oneshot.checkpoint import Checkpoint, open_model
from oneshot.errors import CheckpointError
from oneshot.evaluation import evaluate
from oneshot.pipeline import compress

NAME = "pytorch_model.bin"


def as_torch_files(folder: Path) -> dict[str, torch.Tensor]:
    """Replace the safetensors of a checkpoint by torch's files, shard by shard; return the tensors."""
    every: dict[str, torch.Tensor] = {}
    names = {}
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        names[path.name] = path.name.replace("model", "pytorch_model").replace(".safetensors", ".bin")
        torch.save(tensors, folder / names[path.name])
        path.unlink()
        every |= tensors
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] = {name: names[file] for name, file in content["weight_map"].items()}
        (folder / f"{NAME}.index.json").write_text(json.dumps(content))
        index.unlink()
    return every


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_reading_equals_safetensors(shard_size: str, own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint(shard_size=shard_size, dtype=torch.bfloat16)
    before = Checkpoint(folder)
    tensors = as_torch_files(folder)
    model = open_model(str(folder), folder)
    assert (model.checkpoint.shapes, model.checkpoint.dtypes) == (before.shapes, before.dtypes)
    read = model.checkpoint.read(tensors)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    name = "model.embed_tokens.weight"
    assert torch.equal(model.checkpoint.read_rows(name, slice(3, 7)), tensors[name][3:7])
    assert model.checkpoint.num_bytes == sum(path.stat().st_size for path in folder.glob("*.bin"))


def test_a_run_and_an_evaluation(
    own_checkpoint: MakeCheckpoint,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    text_file: Path,
    tmp_path: Path,
) -> None:
    """The result equals safetensors'; own text is written by the stock class, which also reads the files."""
    folder, same = own_checkpoint(), make_checkpoint()
    as_torch_files(folder)
    results = []
    for number, checkpoint in enumerate((folder, same)):
        output = str(tmp_path / str(number))
        compress(make_config(checkpoint, sparsity=0.1, calibration=f"{text_file}+self", output=output))
        results.append(load_file(Path(output) / "model.safetensors"))
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())
    first, second = evaluate(
        [str(folder)], [str(text_file)], baseline=str(same), sequence_length=16, max_windows=2, decode_tokens=0
    )
    assert first.perplexity == second.perplexity


def test_views_of_other_tensors(own_checkpoint: MakeCheckpoint) -> None:
    """A pickle may hold a table twice in one storage, and transposed matrices."""
    folder = own_checkpoint(tied=True)
    tensors = as_torch_files(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    stored = dict(tensors) | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    stored[name] = torch.nn.Parameter(tensors[name].T.contiguous().T)
    torch.save(stored, folder / NAME)
    model = open_model(str(folder), folder)
    assert model.shape.tied
    read = model.checkpoint.read_one(name)
    assert read.is_contiguous()
    assert torch.equal(read, tensors[name])


class Hostile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def test_no_code_runs(own_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder, trace = own_checkpoint(), tmp_path / "trace"
    tensors = as_torch_files(folder)
    torch.save(tensors | {"x": Hostile(trace)}, folder / NAME)
    with pytest.raises(CheckpointError, match="a pickle that may run code, which is not read"):
        open_model(str(folder), folder)
    assert not trace.exists()


@pytest.mark.parametrize("name", ["colbert_linear.pt", "sparse_linear.pt", "2_Dense/pytorch_model.bin"])
def test_weights_behind_the_last_states_are_copied_if_they_are_tensors_alone(
    name: str, own_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """FlagEmbedding reads the linears of BGE-M3, and sentence-transformers the weights of its modules."""
    folder = own_checkpoint(family="xlm-roberta", model_class="XLMRobertaModel", groups=4)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    modules = [{"path": place, "type": "sentence_transformers.models.Dense"} for place in ("", "2_Dense")]
    (folder / "modules.json").write_text(json.dumps(modules))
    tensors: dict[str, Any] = {"weight": torch.ones(1, 32), "bias": torch.ones(1)}
    torch.save(tensors, path)
    config = make_config(folder, ffn="magnitude", correction="none", form="stock")
    compress(config)
    assert (Path(config.output) / name).read_bytes() == path.read_bytes()
    torch.save(tensors | {"x": Hostile(tmp_path / "trace")}, path)
    with pytest.raises(CheckpointError, match="a pickle that may run code, which is not read"):
        open_model(str(folder), folder)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("kind", ["old", "plain", "nested", "sparse", "list", "spread", "truncated"])
def test_other_files_are_refused(kind: str, own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint()
    tensors = as_torch_files(folder)
    path = folder / NAME
    if kind == "old":
        torch.save(tensors, path, _use_new_zipfile_serialization=False)
    elif kind == "plain":
        path.write_bytes(pickle.dumps({"a": 1}))
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:-200])
    else:
        wrong: dict[str, Any] = {
            "nested": {"model": tensors},
            "sparse": {"a": torch.eye(3).to_sparse()},
            "list": list(tensors.values()),
            "spread": {"a": torch.ones(1).expand(2**40)},  # a file of some bytes that would take 4 TiB
        }
        torch.save(wrong[kind], path)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin (is damaged|holds something else)"):
        open_model(str(folder), folder)
