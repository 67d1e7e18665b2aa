"""Errors of the command line about the checkpoint: missing, damaged, not supported, or not finite."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import edit_config, first_shard
from factories import Fails, MakeCheckpoint, small_arguments
from safetensors.torch import load_file, save_file

from oneshot.checkpoint.reader import INDEX_NAME, SINGLE_NAME
from oneshot.cli.compress import main


@pytest.mark.parametrize(
    ("checkpoint", "reason"),
    [
        ("/no/such/path", "does not exist"),
        ("no-such-folder", "does not exist"),
        ("./no/such", "does not exist"),
        ("/no/such.gguf", "does not exist"),
        (__file__, "is a file"),
        ("no-such-organisation/no-such-model", "hub"),
        ("two words/no model", "two words/no model"),
    ],
)
def test_no_such_checkpoint(checkpoint: str, reason: str, fails: Fails) -> None:
    fails(checkpoint, checkpoint, reason)


def test_an_empty_folder(tmp_path: Path, fails: Fails) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    fails(empty, str(empty), "empty folder")


def test_a_folder_without_config(own_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    folder = own_checkpoint()
    (folder / "config.json").unlink()
    fails(folder, "config.json", "missing")


@pytest.mark.parametrize("content", ["{unfinished", "[1, 2]", "\ufeff"])
def test_a_damaged_config(content: str, own_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    folder = own_checkpoint()
    (folder / "config.json").write_text(content)
    fails(folder, "config.json", "JSON")


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model_type": "qwen9"}, ("qwen9", "qwen2", "qwen3", "with that of llama", "supported-models")),
        ({"model_type": "mamba2"}, ("mamba2", "without an FFN", "supported-models")),
        ({"model_type": "jamba", "num_experts": 8}, ("jamba", "recurrent state", "supported-models")),
        ({"model_type": "nemotron_h"}, ("nemotron_h", "one mixer each", "supported-models")),
        ({"model_type": "granitemoehybrid", "num_local_experts": 8}, ("granitemoehybrid", "num_experts_per_tok")),
        ({"model_type": "lfm2", "layer_types": ["conv", "rwkv"]}, ("layer_types 'rwkv'", "conv, full_attention")),
        ({"model_type": "removed"}, ("(none)",)),
        ({"model_type": "phimoe"}, ("phimoe", "mixture of experts", "qwen3_moe, qwen2_moe, mixtral")),
        ({"model_type": "mixtral"}, ("num_experts", "mixtral")),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, ("passes 3",)),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0, 1], **EXPERTS}, ("no layer with experts",)),
        ({"model_type": "qwen2_moe", "decoder_sparse_step": 0, **EXPERTS}, ("decoder_sparse_step 0",)),
        ({"model_type": "qwen3_moe", "mlp_only_layers": "all", **EXPERTS}, ("mlp_only_layers 'all'",)),
        ({"num_local_experts": 8}, ("mixture of experts",)),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ("quantised",)),
        ({"quantization_config": {"quant_method": "mxfp4"}}, ("mxfp4",)),
        ({"intermediate_size": "removed"}, ("intermediate_size",)),
        ({"vocab_size": "removed"}, ("vocab_size",)),
        ({"intermediate_size": 100}, ("mlp",)),
        ({"num_hidden_layers": 3}, ("model.layers.2",)),
        ({"num_attention_heads": 8}, ("self_attn",)),
    ],
)
def test_models_that_are_not_supported(
    changes: dict[str, Any], names: tuple[str, ...], own_checkpoint: MakeCheckpoint, fails: Fails
) -> None:
    folder = own_checkpoint()
    edit_config(folder, **changes)
    fails(folder, *names)


def test_a_missing_tensor(own_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    folder = own_checkpoint()
    tensors = load_file(folder / SINGLE_NAME)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / SINGLE_NAME)
    for recipe in ("oneshot", "random"):
        fails(folder, "model.layers.1.mlp.down_proj.weight", recipe=recipe)


@pytest.mark.parametrize("name", ["weights.bin", "model.pt"])
def test_pickled_weights_under_another_name_are_refused(
    name: str, own_checkpoint: MakeCheckpoint, fails: Fails
) -> None:
    folder = own_checkpoint()
    (folder / SINGLE_NAME).unlink()
    torch.save({"a": torch.ones(1)}, folder / name)
    fails(folder, str(folder), "pickled", "save_pretrained")


def test_no_weights(own_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    folder = own_checkpoint()
    (folder / SINGLE_NAME).unlink()
    fails(folder, str(folder), "no safetensors weights")


def test_a_missing_shard(own_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    folder = own_checkpoint(shard_size="20KB")
    shard = first_shard(folder)
    shard.unlink()
    fails(folder, shard.name, "missing")


@pytest.mark.parametrize("kept_bytes", [0, 5, 200, -100])
def test_a_truncated_shard(kept_bytes: int, own_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    folder = own_checkpoint(shard_size="20KB")
    shard = first_shard(folder)
    shard.write_bytes(shard.read_bytes()[:kept_bytes])
    fails(folder, shard.name, "truncated")


def test_a_shard_that_lacks_a_tensor(own_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    folder = own_checkpoint(shard_size="20KB")
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"]["model.layers.0.extra"] = first_shard(folder).name
    (folder / INDEX_NAME).write_text(json.dumps(index))
    fails(folder, "model.layers.0.extra", "lacks")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("recipe", ["stat", "random"])
def test_weights_that_are_not_finite(
    value: float, name: str, recipe: str, own_checkpoint: MakeCheckpoint, fails: Fails
) -> None:
    folder = own_checkpoint()
    tensors = load_file(folder / SINGLE_NAME)
    tensors[name][3, 3] = value
    save_file(tensors, folder / SINGLE_NAME)
    fails(folder, name, "NaN or Inf", recipe=recipe)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "activations of layer 0 overflow to NaN or Inf, where the largest weight is "),
        ({"form": "per-layer"}, " in mlp."),
        ({"form": "per-layer", "settings": ["curvature=none"]}, "layer 0 overflow"),
        ({"recipe": "tcsp"}, "overflow to NaN or Inf"),
    ],
    ids=str,
)
def test_activations_that_overflow(
    settings: dict[str, Any], named: str, own_checkpoint: MakeCheckpoint, fails: Fails
) -> None:
    folder = own_checkpoint()
    tensors = load_file(folder / SINGLE_NAME)
    for name in ("up_proj", "gate_proj"):
        tensors[f"model.layers.0.mlp.{name}.weight"] *= 1e25
    save_file(tensors, folder / SINGLE_NAME)
    fails(folder, named, "--dtype float32", **settings)


def test_gradients_that_overflow_though_activations_do_not(
    own_checkpoint: MakeCheckpoint, text_file: Path, output: Path, fails: Fails
) -> None:
    """Zeros reach the large weights, and gradients reach both of them. The advice of the sentence gives a result."""
    folder = own_checkpoint()
    tensors = load_file(folder / SINGLE_NAME)
    for name, factor in (("up_proj", 0), ("gate_proj", 1e12), ("down_proj", 1e32)):
        tensors[f"model.layers.1.mlp.{name}.weight"] *= factor
    save_file(tensors, folder / SINGLE_NAME)
    message = fails(folder, "gradients of layer 1 overflow to NaN or Inf", " in mlp.", form="per-layer")
    assert "--set curvature=none" in message
    assert "activations" not in message
    assert main([*small_arguments(folder, output, text_file), "--form=per-layer", "--set=curvature=none"]) == 0


def test_a_damaged_gguf_file(tmp_path: Path, fails: Fails) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(50))
    fails(path, str(path), "GGUF")


def test_damaged_copies_do_not_reach_the_shared_checkpoint(
    own_checkpoint: MakeCheckpoint, make_checkpoint: MakeCheckpoint
) -> None:
    shutil.rmtree(own_checkpoint())
    assert (make_checkpoint() / SINGLE_NAME).exists()
