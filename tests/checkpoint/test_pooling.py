"""Embedding models between folders of sentence-transformers and GGUF files: how they pool their last states."""

import filecmp
import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from factories import MakeCheckpoint, MakeConfig
from safetensors.torch import save_file

from oneshot.checkpoint import locate_checkpoint, open_model
from oneshot.checkpoint.gguf_file import GgufModel
from oneshot.checkpoint.pooling import pooling_of, write_pooling
from oneshot.errors import CheckpointError, PlanError
from oneshot.pipeline import compress, predict

QWEN3 = {"family": "qwen3", "head_dim": 8, "layers": 1, "tied": True}


def test_pooling_survives_both_ways(own_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path) -> None:
    """As `_try_set_pooling_type` of llama.cpp's converter writes it for Qwen3's embedding models."""
    folder = own_checkpoint(**QWEN3)
    write_pooling(folder, "lasttoken", 32)
    config = make_config(folder, form="gguf", sparsity=0)
    compress(config)
    path = Path(config.output) / "model.gguf"
    assert GgufModel(path).metadata["qwen3.pooling_type"] == gguf.PoolingType.LAST
    alone = tmp_path / "alone" / "model.gguf"
    alone.parent.mkdir()
    shutil.copy(path, alone)
    assert predict(make_config(alone, form="gguf", sparsity=0, output=str(tmp_path / "again"))).result_bytes > 0
    converted = locate_checkpoint(str(alone), tmp_path / "scratch")
    for name in ("modules.json", "1_Pooling/config.json"):
        assert (converted / name).read_text() == (folder / name).read_text()


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode_max_tokens": True}, None),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, None),
        ({"pooling_mode": "weightedmean"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_kinds_of_pooling(config: dict[str, object], kind: str | None, tmp_path: Path) -> None:
    assert pooling_of(tmp_path) is None
    write_pooling(tmp_path, "cls", 32)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    if kind is not None:
        assert pooling_of(tmp_path) == kind
        return
    with pytest.raises(CheckpointError, match="only mean, cls, lasttoken are known"):
        pooling_of(tmp_path)


def test_further_modules_are_refused(own_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    folder = own_checkpoint(**QWEN3)
    write_pooling(folder, "mean", 32)
    path = folder / "modules.json"
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    path.write_text(json.dumps([*json.loads(path.read_text()), dense]))
    with pytest.raises(
        PlanError, match=r"has the module Dense; only Transformer, Pooling, Normalize are known here\. Use --form stock"
    ):
        predict(make_config(folder, form="gguf"))
    assert predict(make_config(folder, output=f"{folder}-stock")).result_bytes > 0


def module(place: str, kind: str = "Dense") -> dict[str, str]:
    """Return an entry of `modules.json`."""
    return {"path": place, "type": f"sentence_transformers.models.{kind}"}


def with_modules(folder: Path, places: list[str]) -> list[str]:
    """Add a pooling and modules with weights at these places, as sentence-transformers saves them; return the files."""
    write_pooling(folder, "cls", 32)
    path, files = folder / "modules.json", ["modules.json", "1_Pooling/config.json"]
    path.write_text(json.dumps([*json.loads(path.read_text()), *map(module, places)]))
    for place in places:
        (folder / place).mkdir(parents=True)
        (folder / place / "config.json").write_text('{"in_features": 32, "out_features": 8}')
        save_file({"linear.weight": torch.randn(8, 32)}, folder / place / "model.safetensors")
        files += [f"{place}/config.json", f"{place}/model.safetensors"]
    return files


@pytest.mark.parametrize("form", ["stock", "per-layer"])
def test_modules_with_weights_are_copied(
    form: str, own_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """As Dense of LaBSE and of EmbeddingGemma; the names of the folders are what modules.json says."""
    folder = own_checkpoint(family="bert", model_class="BertModel", groups=4)
    files = with_modules(folder, ["2_Dense", "3_Dense", "further/dense"])
    torch.save({"linear.weight": torch.zeros(8, 32)}, folder / "3_Dense" / "pytorch_model.bin")  # the safetensors count
    (folder / "2_Dense" / "README.md").write_text("not a part of the model")
    torch.save({"linear.weight": torch.zeros(8, 32)}, folder / "further" / "dense" / "pytorch_model.bin")
    (folder / "further" / "dense" / "model.safetensors").unlink()
    files = [name.replace("dense/model.safetensors", "dense/pytorch_model.bin") for name in files]
    compress(make_config(folder, form=form, output=tmp_path / "result"))
    for name in files:
        assert filecmp.cmp(folder / name, tmp_path / "result" / name, shallow=False), name
    written = {path.relative_to(tmp_path / "result") for path in (tmp_path / "result").rglob("*/*") if path.is_file()}
    assert {str(path) for path in written} == set(files) - {"modules.json"}


def test_weights_of_modules_that_cannot_be_read_are_refused(own_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = own_checkpoint(family="bert", model_class="BertModel", groups=4)
    with_modules(folder, ["2_Dense"])
    weights, pickled = folder / "2_Dense" / "model.safetensors", folder / "2_Dense" / "pytorch_model.bin"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"2_Dense/model.safetensors is damaged or truncated"):
        open_model(str(folder), tmp_path)
    weights.unlink()
    torch.save({"linear.weight": print}, pickled)
    with pytest.raises(CheckpointError, match=r"2_Dense/pytorch_model.bin is damaged, or a pickle that may run code"):
        open_model(str(folder), tmp_path)
    pickled.unlink()
    weights.symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match=r"2_Dense/model.safetensors leads to .*, outside the checkpoint"):
        open_model(str(folder), tmp_path)


@pytest.mark.parametrize("place", ["../beside", "{folder}/../beside", "../{name}/2_Dense", "{folder}/2_Dense", "2\0"])
def test_modules_outside_the_checkpoint_are_refused(place: str, own_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Also one whose path leaves the folder and comes back: beside a result of another name it would be elsewhere."""
    folder = own_checkpoint(family="bert", model_class="BertModel", groups=4)
    with_modules(folder, ["2_Dense"])
    (folder / "modules.json").write_text(json.dumps([module(place.format(folder=folder, name=folder.name))]))
    for reads in (lambda: open_model(str(folder), tmp_path), lambda: pooling_of(folder)):
        with pytest.raises(CheckpointError, match=r"which is not the name of a folder of the checkpoint; download it"):
            reads()


@pytest.mark.parametrize(
    "stated", [[{"type": 7}], ["2_Dense"], [{"type": "Dense", "path": None}], {"path": ""}], ids=str
)
def test_what_is_not_a_list_of_modules_is_refused(
    stated: object, own_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = own_checkpoint(family="bert", model_class="BertModel", groups=4)
    (folder / "modules.json").write_text(json.dumps(stated))
    for reads in (lambda: open_model(str(folder), tmp_path), lambda: pooling_of(folder)):
        with pytest.raises(
            CheckpointError, match=r"modules.json is not JSON with a list of modules \(.*\); download it"
        ):
            reads()


def test_a_model_that_sentence_transformers_reads_elsewhere_is_refused(
    own_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Its weights would be copied as a module's. In older repositories they lie in `0_Transformer`, without a copy."""
    folder = own_checkpoint(family="bert", model_class="BertModel", groups=4)
    shutil.copytree(folder, folder / "0_Transformer")
    modules = [module("0_Transformer", "Transformer"), module("1_Pooling", "Pooling")]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match=r"the model lies in 0_Transformer, so its .*, and state the path \"\""):
        open_model(str(folder), tmp_path)
    assert open_model(str(folder / "0_Transformer"), tmp_path).shape.num_hidden_layers
    (folder / "modules.json").write_text(json.dumps([module("", "Transformer")]))
    assert open_model(str(folder), tmp_path).shape.num_hidden_layers
