"""Layers that predict tokens after the next one: classes of transformers do not read them, no result promises them."""

import json
from pathlib import Path

import pytest
import torch
from cases import CASES
from factories import MakeCheckpoint, MakeConfig
from safetensors.torch import load_file, save_file
from wrapper_models import build_wrapper

from oneshot.families.further import without_further
from oneshot.pipeline import compress
from oneshot.report.card import CARD_NAME

# what begins the names of such layers in published files, and what their config.json states
STORED = {
    "glm4_moe": ("model.layers.3.", {"num_nextn_predict_layers": 1}),
    "deepseek_v3": ("model.layers.3.", {"num_mtp_layers": 1}),
    "glm4_moe_lite": ("model.layers.3.", {"num_nextn_predict_layers": 1, "mtp_layer_types": ["full_attention"]}),
    "qwen3_5_text": ("mtp.", {"mtp_num_hidden_layers": 1}),
    "qwen3_5": ("mtp.", {"text_config": {"mtp_num_hidden_layers": 1}}),
}


def add_further_layer(folder: Path, prefix: str, stated: dict[str, object]) -> dict[str, torch.Tensor]:
    """Store two more tensors, state such a layer, and return the tensors that the folder had."""
    path, config = folder / "model.safetensors", folder / "config.json"
    dense, whole = load_file(path), json.loads(config.read_text())
    further = {f"{prefix}eh_proj.weight": torch.ones(32, 64), f"{prefix}enorm.weight": torch.ones(32)}
    save_file(dense | further, path, {"format": "pt"})
    inner = stated.get("text_config")
    stated = {"text_config": whole["text_config"] | inner} if isinstance(inner, dict) else stated
    config.write_text(json.dumps(whole | stated))
    return dense


def promised(config: dict[str, object]) -> dict[str, object]:
    """Return all that a config.json states of such layers, also inside it, but for zeros and empty lists."""
    found = {name: config[name] for name, none in without_further(config).items() if config[name] != none}
    inner = config.get("text_config")
    return found | (promised(inner) if isinstance(inner, dict) else {})


@pytest.mark.parametrize("name", STORED)
def test_layers_for_later_tokens_are_left_out(
    name: str, own_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path, tokenizer_folder: Path
) -> None:
    """In every form the config promises none, and the run, its report and the card say that they are gone."""
    if name == "qwen3_5":
        folder = tmp_path / "own"
        build_wrapper(name).save_pretrained(folder)
        (folder / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    else:
        folder = own_checkpoint(**CASES[name].options)
    dense = add_further_layer(folder, *STORED[name])
    assert promised(json.loads((folder / "config.json").read_text()))
    for form in ("stock",) if name == "qwen3_5" else ("stock", "per-layer"):
        config = make_config(folder, sparsity=0, form=form, output=tmp_path / form)
        report = compress(config)
        result = load_file(tmp_path / form / "model.safetensors")
        assert report.stored_parameters["compressed"] == sum(tensor.numel() for tensor in dense.values())
        if form == "stock":
            assert result.keys() == dense.keys()
            assert all(torch.equal(tensor, dense[key]) for key, tensor in result.items())
        assert not any("eh_proj" in key for key in result)
        assert promised(json.loads((tmp_path / form / "config.json").read_text())) == {}
        told = [warning for warning in report.warnings if f"{STORED[name][0]}eh_proj.weight and 1 other" in warning]
        assert len(told) == 1
        assert "left out of the result" in (tmp_path / form / CARD_NAME).read_text()
