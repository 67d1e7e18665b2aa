"""Configs and models of stock classes that are made from a config.json: asked for again, they are as new."""

from typing import Any

import torch
from torch import nn

from oneshot.checkpoint import per_layer_lists, sample_model, stock_config
from oneshot.families import LLAMA

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def test_a_spoilt_config_spoils_no_other() -> None:
    spoilt = stock_config(CONFIG)
    spoilt.hidden_size, spoilt.rope_parameters["rope_theta"] = 4, 1.0
    found = stock_config(CONFIG)
    assert (found.hidden_size, found.rope_parameters["rope_theta"]) == (8, 1e4)
    assert CONFIG["rope_parameters"]["rope_theta"] == 1e4


def test_spoilt_lists_of_layers_spoil_no_others() -> None:
    config = CONFIG | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    per_layer_lists(config)["layer_types"].clear()
    assert per_layer_lists(config)["layer_types"] == ["full_attention"] * 2


def test_a_spoilt_model_spoils_no_other() -> None:
    """Runs take modules out of it, replace layers, and assign weights; inference tensors must not outlive their run."""
    with torch.inference_mode():
        spoilt = sample_model(CONFIG, LLAMA, torch.float32)
        spoilt.model.norm = nn.Identity()
        spoilt.model.layers[0].mlp.down_proj.weight = nn.Parameter(torch.ones(8, 16))
        spoilt.config.hidden_size = 4
    found = sample_model(CONFIG, LLAMA, torch.float32)
    assert found.config.hidden_size == 8
    assert not isinstance(found.model.norm, nn.Identity)
    assert all(parameter.is_meta and not parameter.is_inference() for parameter in found.parameters())
    assert sample_model(CONFIG, LLAMA, torch.bfloat16).dtype == torch.bfloat16
