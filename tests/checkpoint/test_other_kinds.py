"""Folders of other kinds than a model that predicts the next token: one sentence that says what they hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import build_model

from oneshot.checkpoint import open_model
from oneshot.errors import CheckpointError


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_a_model_without_a_head(family: str, save_model: Callable[..., Path]) -> None:
    """Embedding models; some of them state the class with a head all the same."""
    options: dict[str, Any] = {"head_dim": 8} if family == "qwen3" else {}
    folder = save_model(build_model(family, **options).model)
    for stated in (None, ["Qwen3ForCausalLM"]):
        if stated is not None:
            path = folder / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": stated}))
        with pytest.raises(CheckpointError, match=rf"of {family} only models that predict the next token"):
            open_model(str(folder), folder)


def test_a_classifier(save_model: Callable[..., Path]) -> None:
    folder = save_model(build_model(model_class="AutoModelForSequenceClassification"))
    with pytest.raises(CheckpointError, match="has the class LlamaForSequenceClassification"):
        open_model(str(folder), folder)


def test_an_adapter_alone(tmp_path: Path) -> None:
    """A folder of peft has no config.json."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="holds an adapter; merge it into the model"):
        open_model(str(tmp_path), tmp_path)


def test_a_folder_with_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"give .*model\.gguf itself"):
        open_model(str(tmp_path), tmp_path)
