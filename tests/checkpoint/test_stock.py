"""Configs and models of stock classes that are made from a config.json: asked for again, they are as new."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from damage import edit_config
from factories import MakeCheckpoint, MakeConfig, build_model
from families.cases import CASES
from last_states import assert_passes, keep_last_states
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, MistralForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import oneshot
from oneshot.checkpoint import as_opened, copy_modules, open_model, per_layer_lists, sample_model, stock_config
from oneshot.checkpoint.stock import under_own_names
from oneshot.errors import CheckpointError
from oneshot.evaluation.models import load_model
from oneshot.families import FAMILIES, LLAMA
from oneshot.pipeline import compress

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


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_config_is_what_transformers_opens(model_type: str, tmp_path: Path) -> None:
    """`AutoConfig` takes some configs for another type than they state, by entries beside the type."""
    plain = CONFIG_MAPPING[model_type]().to_dict() | {"model_type": model_type}
    for config in (plain, plain | {"layer_types": None}, plain | {"auto_map": {"AutoConfig": "code.Config"}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            expected = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False).model_type
        except AttributeError:  # kinds of layers that a class makes of other entries
            expected = model_type
        assert as_opened(config)["model_type"] == expected


@pytest.mark.parametrize("model_type", FAMILIES)
def test_sizes_under_other_names_of_the_class(model_type: str) -> None:
    """transformers reads a size under either name, and prefers the one that a resized config would not change."""
    family, config_class = FAMILIES[model_type], CONFIG_MAPPING[model_type]
    plain = config_class().to_dict() | {"model_type": model_type}
    for other, own in config_class.attribute_map.items():
        if own in vars(family.sizes).values() and other not in vars(family.sizes).values():
            assert under_own_names(family, plain | {other: plain[own]}) == plain
            without_own = {name: value for name, value in plain.items() if name != own}
            assert under_own_names(family, without_own | {other: plain[own]}) == plain
            with pytest.raises(CheckpointError, match=f"states {own} .* and {other} 7, which are two names of one"):
                under_own_names(family, plain | {other: 7})


@pytest.mark.parametrize("name", ["gpt2", "distilbert", "t5"])
def test_a_number_of_layers_under_two_names(name: str, save_model: Callable[..., Path], tmp_path: Path) -> None:
    case = CASES[name]
    folder = save_model(case.build(**case.options))
    plain = open_model(str(folder), tmp_path)
    edit_config(folder, num_hidden_layers=plain.checkpoint.config[plain.family.sizes.num_hidden_layers])
    again = open_model(str(folder), tmp_path)
    assert (again.checkpoint.config, again.shape) == (plain.checkpoint.config, plain.shape)


@pytest.mark.parametrize("name", ["llama", "bert", "distilbert", "t5", "gpt2", "gemma3_text", "gpt_neox"])
def test_an_epsilon_that_a_config_does_not_state(name: str, save_model: Callable[..., Path], tmp_path: Path) -> None:
    """The first BERTs state none; one that is null is no epsilon."""
    case = CASES[name]
    folder = save_model(case.build(**case.options))
    key = open_model(str(folder), tmp_path).family.sizes.norm_epsilon
    if key is not None:
        edit_config(folder, **{key: "removed"})
        assert open_model(str(folder), tmp_path)
        edit_config(folder, **{key: None})
        with pytest.raises(CheckpointError, match=f"states {key} None, which is not a small number"):
            open_model(str(folder), tmp_path)


@pytest.mark.parametrize("both", [True, False])
@torch.inference_mode()
def test_kinds_of_layers_under_another_name_of_the_class(
    both: bool, own_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class of Granite 4 prefers `layers_block_type` to `layer_types`; a removed layer is in neither."""
    folder = own_checkpoint(**CASES["granitemoehybrid"].options)
    kinds = json.loads((folder / "config.json").read_text())["layer_types"]
    edit_config(folder, layers_block_type=kinds, **({} if both else {"layer_types": "removed"}))
    last, run = keep_last_states(monkeypatch), make_config(folder, form="stock", depth="sensitivity", sparsity=0.4)
    compress(run)
    result = AutoModelForCausalLM.from_pretrained(run.output)
    assert result.config.num_hidden_layers == len(result.config.layer_types) < len(kinds)
    assert_passes(result, "model.layers", run, last[0])


def mistral_by_layers(own_checkpoint: MakeCheckpoint, **options: Any) -> Path:
    """Return a checkpoint that states the type of Mistral and `layer_types`: transformers opens it as a Ministral."""
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    folder = own_checkpoint(
        family="ministral", layers=4, head_dim=8, sliding_window=7, tied=True, layer_types=kinds, **options
    )
    stated = json.loads((folder / "config.json").read_text())["architectures"][0].replace("Ministral", "Mistral")
    edit_config(folder, model_type="mistral", architectures=[stated])
    return folder


@pytest.mark.parametrize("form", ["stock", "per-layer"])
def test_windows_of_a_mistral_with_kinds_of_layers(
    form: str, own_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = mistral_by_layers(own_checkpoint)
    output = Path(compress(make_config(folder, form=form, sparsity=0.0)).config["output"])
    ids = torch.arange(3, 60).unsqueeze(0)
    expected = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    opened = AutoModelForCausalLM.from_pretrained(output, trust_remote_code=True)
    torch.testing.assert_close(opened(ids).logits, expected)
    for one in (folder, output):
        loaded = load_model(one, device=torch.device("cpu"), dtype=torch.float32)
        torch.testing.assert_close(loaded(ids).logits, expected)


def test_a_mistral_with_kinds_of_layers_and_no_head(own_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    folder = mistral_by_layers(own_checkpoint, model_class="AutoModel")
    output = compress(make_config(folder, form="stock", sparsity=0.0)).config["output"]
    ids = torch.arange(3, 60).unsqueeze(0)
    expected, found = (AutoModel.from_pretrained(one)(ids).last_hidden_state for one in (folder, output))
    torch.testing.assert_close(found, expected)


def test_a_model_in_memory_that_opens_as_another_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before its weights are written."""
    model: MistralForCausalLM = build_model("mistral", sliding_window=7, layer_types=["full_attention"] * 2)
    saved: list[Any] = []
    monkeypatch.setattr(MistralForCausalLM, "save_pretrained", lambda *given: saved.append(given))
    with pytest.raises(CheckpointError, match=r"MistralForCausalLM, but .* as ministral; load it with an Auto class"):
        oneshot.compress(model, tmp_path / "out", calibration="builtin", sparsity=0.2)
    assert not saved


def test_another_config_by_transformers_version_is_refused(own_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = own_checkpoint()
    edit_config(folder, configuration_files=["config.4.0.0.json"])
    with pytest.raises(CheckpointError, match=r"states configuration_files, .*; put the content of that file into"):
        open_model(str(folder), tmp_path)
