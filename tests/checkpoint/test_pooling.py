"""Embedding models between folders of sentence-transformers and GGUF files: how they pool their last states."""

import json
import shutil
from pathlib import Path

import gguf
import pytest
from factories import MakeCheckpoint, MakeConfig

from oneshot.checkpoint import locate_checkpoint
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
