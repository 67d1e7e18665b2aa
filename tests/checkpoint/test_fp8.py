"""FP8 checkpoints, dequantised as they are read, against transformers' own reading; other kinds are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from oneshot.checkpoint import Checkpoint, open_model
from oneshot.errors import CheckpointError
from oneshot.evaluation import evaluate
from oneshot.pipeline import compress, predict

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [16, 8]}


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def to_fp8(folder: Path, stated: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Store the layers' linears in FP8, with a scale for each block or one for all; return what they stand for."""
    path, block = folder / "model.safetensors", stated["weight_block_size"]
    tensors = load_file(path)
    meant, stored = dict(tensors), dict(tensors)
    for name in [name for name in tensors if "proj" in name]:
        weight = tensors[name]
        rows, columns = block or weight.shape
        panels = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2)  # blocks, then inside
        scales = panels.abs().amax((2, 3)) / 448
        quantised = (panels / scales[..., None, None]).to(torch.float8_e4m3fn)
        restored = quantised.double() * scales.double()[..., None, None]
        meant[name] = restored.transpose(1, 2).reshape(weight.shape).bfloat16()
        stored[name] = quantised.transpose(1, 2).reshape(weight.shape)
        stored[f"{name}_scale_inv"] = scales if block else scales.reshape(())
        if stated["activation_scheme"] == "static":
            stored[name.replace("weight", "activation_scale")] = torch.ones(())
    save_file(stored, path, metadata={"format": "pt"})
    edit_config(folder, quantization_config=stated)
    return meant


@pytest.mark.parametrize("changes", [{}, {"weight_block_size": None, "activation_scheme": "static"}])
def test_fp8_is_the_bfloat16_that_it_stands_for(
    changes: dict[str, Any], own_checkpoint: MakeCheckpoint, make_config: MakeConfig, text_file: Path
) -> None:
    """The result of removing nothing has transformers' own numbers, and states no quantisation."""
    folder = own_checkpoint(dtype=torch.bfloat16)
    meant = to_fp8(folder, FP8 | changes)
    config = make_config(folder, sparsity=0)
    compress(make_config(folder, calibration="self", output=f"{config.output}-own"))
    predicted = predict(config)
    report = compress(config)
    result = load_file(Path(config.output) / "model.safetensors")
    assert result.keys() == meant.keys()
    assert all(torch.equal(tensor, result[name]) for name, tensor in meant.items())
    assert predicted.stored_parameters == report.stored_parameters
    model = AutoModelForCausalLM.from_pretrained(config.output, dtype=torch.float32)
    ids = torch.arange(20).unsqueeze(0)
    assert "quantization_config" not in json.loads((Path(config.output) / "config.json").read_text())
    if FP8 | changes == FP8:
        theirs = AutoModelForCausalLM.from_pretrained(folder).float()
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=0.02, atol=0.02)
    ours, dense = evaluate(
        [config.output], [str(text_file)], baseline=str(folder), sequence_length=16, max_windows=2, decode_tokens=0
    )
    assert ours.perplexity == dense.perplexity
    assert dense.file_bytes < ours.file_bytes


def test_blocks_may_end_early(own_checkpoint: MakeCheckpoint) -> None:
    """A matrix need not be a multiple of the block."""
    folder = own_checkpoint()
    name, scale = "model.layers.0.mlp.up_proj.weight", torch.rand(3, 2)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    stored = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors | {name: stored, f"{name}_scale_inv": scale}, path)
    edit_config(folder, quantization_config=FP8 | {"weight_block_size": [30, 20]})
    read = open_model(str(folder), folder).checkpoint.read_one(name)
    for row in range(64):
        for column in range(32):
            wanted = stored[row, column].float() * scale[row // 30, column // 20]
            assert read[row, column] == wanted.bfloat16()


@pytest.mark.parametrize(
    ("scale", "block"),
    [
        (torch.tensor(0.25), None),
        (torch.tensor([0.25]), None),
        (torch.tensor([[0.25]]), [16, 8]),
        (torch.tensor([0.25]), [16, 8]),
        (torch.rand(4, 4), [16, 8]),
        (torch.rand(4, 4).to(torch.float8_e8m0fnu), [16, 8]),
        (torch.arange(120, 136, dtype=torch.uint8).view(4, 4), [16, 8]),
        (torch.rand(64, 1), [1, 32]),
    ],
    ids=["scalar", "vector", "one", "vector-for-blocks", "blocks", "e8m0", "bytes", "mxfp8"],
)
def test_scales_of_every_kind_are_transformers_own(
    scale: torch.Tensor, block: Any, own_checkpoint: MakeCheckpoint
) -> None:
    folder, name = own_checkpoint(), "model.layers.0.mlp.up_proj.weight"
    path = folder / "model.safetensors"
    tensors = load_file(path)
    stored = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors | {name: stored, f"{name}_scale_inv": scale}, path)
    edit_config(folder, quantization_config=FP8 | {"weight_block_size": block})
    theirs = Fp8Dequantize(None)._dequantize_one(stored, scale, torch.bfloat16)
    assert torch.equal(open_model(str(folder), folder).checkpoint.read_one(name), theirs)


@pytest.mark.parametrize("block", [[64, 64], [30, 20], [32, 32], [0, 16], [16], "wide", [True, 8]])
def test_scales_that_do_not_fit_are_refused(block: Any, own_checkpoint: MakeCheckpoint) -> None:
    folder = own_checkpoint()
    to_fp8(folder, FP8)
    edit_config(folder, quantization_config=FP8 | {"weight_block_size": block})
    with pytest.raises(CheckpointError, match=r"_scale_inv has shape .* which does not fit"):
        Checkpoint(folder)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "fp8"])
def test_other_kinds_are_refused_with_the_name_of_the_original(method: str, own_checkpoint: MakeCheckpoint) -> None:
    """Also FP8 whose weights have no scales."""
    folder = own_checkpoint()
    edit_config(folder, quantization_config={"quant_method": method, "bits": 4})
    (folder / "README.md").write_text("---\nbase_model: someone/original\n---\n")
    with pytest.raises(CheckpointError, match=rf"quantised \({method}\); give the unquantised .*, someone/original by"):
        open_model(str(folder), folder)
