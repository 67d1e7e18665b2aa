"""A random adapter in peft's layout for every linear in the layers of a result, and the result with it merged."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from oneshot.evaluation.models import load_model

RANK, ALPHA = 4, 8
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_of_another(adapter: Path, other: Path) -> None:
    """Write an adapter whose FFN has more neurons than the result, as the dense model has."""
    shutil.copytree(adapter, other)
    tensors = load_file(other / "adapter_model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if "up_proj" in name or "gate_proj" in name}
    wider = {name: torch.cat((tensor, tensor)) if "lora_B" in name else tensor for name, tensor in tensors.items()}
    save_file(wider, other / "adapter_model.safetensors")


def write_adapter(folder: Path, adapter: Path, merged: Path) -> None:
    """Write a LoRA adapter of a result (`W + α/r B A`, 2106.09685), and a copy of the result that has it already."""
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    generator, stored, found = torch.Generator().manual_seed(0), dict[str, torch.Tensor](), set[str]()
    shutil.copytree(folder, merged)
    (file,) = merged.glob("*.safetensors")
    tensors = load_file(file)
    for name, module in model.model.layers.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in NAMES:
            found.add(name.rpartition(".")[2])
            first = 0.1 * torch.randn(RANK, module.in_features, generator=generator)
            second = 0.1 * torch.randn(module.out_features, RANK, generator=generator)
            tensors[f"model.layers.{name}.weight"] += ALPHA / RANK * second @ first
            stored[f"base_model.model.model.layers.{name}.lora_A.weight"] = first
            stored[f"base_model.model.model.layers.{name}.lora_B.weight"] = second
    assert found == set(NAMES)
    save_file(tensors, file, {"format": "pt"})
    adapter.mkdir()
    save_file(stored, adapter / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    stated |= {"target_modules": list(NAMES), "base_model_name_or_path": str(folder)}
    (adapter / "adapter_config.json").write_text(json.dumps(stated))
