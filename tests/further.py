"""Checkpoints with layers that predict tokens after the next one."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from oneshot.architecture.further import stated_of_further

COUNT = "num_nextn_predict_layers"
# what config.json states of such layers, and the layer of the model that a block is like
STATED: dict[str, tuple[dict[str, Any], int]] = {
    "glm4_moe": ({COUNT: 1}, 2),
    "deepseek_v3": ({"num_mtp_layers": 1}, 2),
    "glm4_moe_lite": ({COUNT: 1, "mtp_layer_types": ["full_attention"]}, 2),
    "qwen3_next": ({}, 3),
    "qwen3_5_text": ({"mtp_num_hidden_layers": 1}, 3),
    "qwen3_5_moe_text": ({"mtp_num_hidden_layers": 1}, 3),
    "qwen3_5": ({"text_config": {"mtp_num_hidden_layers": 1}}, 3),
}


def last_layer(config: dict[str, Any]) -> int:
    text = config.get("text_config", config)
    kinds = text.get("layer_types", ["full_attention"] * text["num_hidden_layers"])
    return max(number for number, kind in enumerate(kinds) if kind == "full_attention")


def add_further_layers(folder: Path, name: str, *, count: int = 1) -> dict[str, torch.Tensor]:
    """Store such layers, each a changed copy of the last layer with full attention, and return their tensors."""
    path, place = folder / "model.safetensors", folder / "config.json"
    dense, config = load_file(path), json.loads(place.read_text())
    text = config.get("text_config", config)
    layers = "model.language_model.layers" if name == "qwen3_5" else "model.layers"
    own, hidden, further = text["num_hidden_layers"], text["hidden_size"], dict[str, torch.Tensor]()
    alike = f"{layers}.{last_layer(config)}."
    behind = not name.startswith("qwen3")
    for index in range(count):
        block = f"{layers}.{own + index}." if behind else f"mtp.layers.{index}."
        further |= {
            block + one.removeprefix(alike): tensor * (1.0 + 0.1 * index) + 0.01
            for one, tensor in dense.items()
            if one.startswith(alike)
        }
        outer = block if behind else "mtp."
        names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
        if not behind:
            names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        further[f"{outer}{names[0]}.weight"] = torch.randn(hidden, 2 * hidden) / hidden**0.5
        further |= {f"{outer}{one}.weight": torch.rand(hidden) + 0.5 for one in names[1:]}
        if behind:
            further[f"{block}embed_tokens.weight"] = dense["model.embed_tokens.weight"].clone()
    save_file(dense | further, path, {"format": "pt"})
    stated = {key: count if isinstance(value, int) else value for key, value in STATED[name][0].items()}
    if "text_config" in stated:
        stated = {"text_config": text | stated["text_config"]}
    config = {key: value for key, value in config.items() if key not in stated_of_further(config)}
    place.write_text(json.dumps(config | stated))
    return further
