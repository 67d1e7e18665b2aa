"""A result with weights rounded by hand in the layouts of compressed-tensors, and the same in plain numbers."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from oneshot.evaluation.models import load_model

FOUR_BITS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def rounded_result(folder: Path, stored: Path, plain: Path, *, group: int | None) -> None:
    """Write a result with four-bit weights (W4A16) in groups, or without one with eight bits (W8A8), and in bfloat16.

    `stored`: for engines. `plain`: the rounded weights as plain numbers, for transformers.
    """
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.bfloat16)
    linears = [
        f"model.layers.{name}.weight"
        for name, module in model.model.layers.named_modules()
        if isinstance(module, nn.Linear)
    ]
    for copy in (stored, plain):
        shutil.copytree(folder, copy)
    (file,) = folder.glob("*.safetensors")
    tensors = {name: cast(tensor) for name, tensor in load_file(file).items()}
    packed = dict(tensors)
    for name in linears:
        weight, columns = packed.pop(name).float(), tensors[name].shape[1]
        largest = 127 if group is None else 7
        groups = weight.unflatten(1, (-1, columns if group is None else group))
        scale = (groups.abs().amax(-1, keepdim=True) / largest).bfloat16()
        numbers = (groups / scale.float()).round().clamp(-largest, largest)
        tensors[name] = (numbers * scale.float()).flatten(1).bfloat16()
        of_linear, numbers = name.removesuffix("weight"), numbers.flatten(1).to(torch.int32)
        packed[f"{of_linear}weight_scale"] = scale.squeeze(-1)
        if group is None:
            packed[f"{of_linear}weight"] = numbers.to(torch.int8)
            continue
        eights = (numbers + 8).unflatten(1, (-1, 8)) << (4 * torch.arange(8, dtype=torch.int32))
        packed[f"{of_linear}weight_packed"] = eights.sum(-1, dtype=torch.int32)
        packed[f"{of_linear}weight_shape"] = torch.tensor(weight.shape)
    scheme: dict[str, Any] = {"targets": ["Linear"], "weights": EIGHT_BITS, "input_activations": TOKENS}
    if group is not None:
        scheme = {"targets": ["Linear"], "weights": FOUR_BITS | {"group_size": group}, "input_activations": None}
    stated = {"quant_method": "compressed-tensors", "format": "int-quantized" if group is None else "pack-quantized"}
    stated |= {"config_groups": {"group_0": scheme}, "ignore": ["lm_head"], "quantization_status": "compressed"}
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (plain / "config.json").write_text(json.dumps(config))
    (stored / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    save_file(tensors, plain / file.name, {"format": "pt"})
    save_file(packed, stored / file.name, {"format": "pt"})


def cast(tensor: torch.Tensor) -> torch.Tensor:
    """Return floating-point numbers in bfloat16, and others as they are."""
    return tensor.bfloat16() if tensor.is_floating_point() else tensor
