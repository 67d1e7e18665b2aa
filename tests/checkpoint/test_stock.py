"""Configs and models of stock classes that are made from a config.json: asked for again, they are as new."""

from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from families.cases import CASES
from torch import nn

from oneshot.checkpoint import copy_modules, per_layer_lists, sample_model, stock_config
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


def modules_in(value: Any) -> Iterator[nn.Module]:
    """Yield the modules that an attribute of a module leads to: itself, in containers, by a method or a closure."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, dict | list | tuple | set | frozenset):
        for part in value.values() if isinstance(value, dict) else value:
            yield from modules_in(part)
    elif isinstance(value, partial):
        yield from modules_in([value.func, value.args, value.keywords])
    elif isinstance(value, MethodType):
        yield from modules_in(value.__self__)
    elif isinstance(value, FunctionType):
        yield from modules_in([cell.cell_contents for cell in value.__closure__ or ()])


@pytest.mark.parametrize("name", CASES)
def test_copied_modules_lead_to_no_other_modules(name: str) -> None:
    """A copy that called a module of the first one would compute with its weights."""
    case = CASES[name]
    with torch.device("meta"):
        model = case.build(**case.options)
    copied = copy_modules(model)
    own, names = set(copied.modules()), [module_name for module_name, _ in model.named_modules()]
    assert not own & set(model.modules())
    assert [module_name for module_name, _ in copied.named_modules()] == names
    assert list(copied.state_dict()) == list(model.state_dict())
    for module in own:
        assert set(modules_in(vars(module))) <= own
