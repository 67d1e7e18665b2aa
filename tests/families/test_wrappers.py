"""Models of images and text: the language model is compressed as its family is, and all else is kept bit for bit."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from factories import MakeConfig, assert_cache_changes_nothing, stored_numbers
from families.cases import GRANITE_FACTORS
from last_states import assert_passes, keep_last_states
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from wrapper_models import GEMMA_EXPERTS, MISTRAL4, WRAPPERS, build_wrapper

from oneshot.checkpoint import complete_text_config, open_model, resized_config
from oneshot.errors import CheckpointError, PlanError
from oneshot.evaluation import evaluate
from oneshot.families import FAMILIES
from oneshot.pipeline import compress

FAMILY_OF = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "glm4v": "glm4"}
IDS = torch.arange(3, 23).unsqueeze(0)


@pytest.fixture(scope="module")
def folder_of(save_model: Callable[..., Path]) -> Callable[[str], Path]:
    """`folder_of(name)`: a tiny wrapper with the file of its image processor; tests must not write there."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = save_model(build_wrapper(name))
            (made[name] / "preprocessor_config.json").write_text('{"size": 16}')
        return made[name]

    return make


def alone(wrapper: Any, name: str) -> Any:
    """Return the language model of a wrapper as a model of its own family, with plain rotary positions."""
    text = wrapper.config.text_config.to_dict()
    family = FAMILY_OF.get(name, text["model_type"])
    if name in FAMILY_OF:
        text["rope_parameters"].pop("mrope_section")
    text.pop("model_type")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **text)).eval()
    module = FAMILIES[name].text_module
    assert module is not None
    weights = {key.replace(module, "model."): value for key, value in wrapper.state_dict().items()}
    model.load_state_dict({key: weights[key] for key in model.state_dict()})
    return model


@pytest.mark.parametrize("name", WRAPPERS)
@torch.inference_mode()
def test_the_language_model_is_compressed_and_all_else_kept(
    name: str, folder_of: Callable[[str], Path], make_config: MakeConfig
) -> None:
    """The result opens in the wrapper's class. With text alone it has the logits of the language model by itself."""
    folder = folder_of(name)
    config = make_config(folder, sparsity=0.1)
    report = compress(config)
    output = Path(config.output)
    dense, result = (load_file(each / "model.safetensors") for each in (folder, output))
    assert dense.keys() == result.keys()
    changed = {key for key in dense if not torch.equal(dense[key], result[key])}
    assert changed
    assert all(
        ".layers." in key and any(part in key for part in ("mlp", "feed_forward", "self_attn")) for key in changed
    )
    assert not any("vision" in key or "visual" in key for key in changed)
    assert (output / "preprocessor_config.json").read_text() == '{"size": 16}'
    [stated] = FAMILIES[name].classes
    wrapper, info = getattr(transformers, stated).from_pretrained(output, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    stored = [*wrapper.parameters(), *(buffer for key, buffer in wrapper.named_buffers() if key in result)]
    assert sum(each.numel() for each in stored) == report.stored_parameters["compressed"]
    torch.testing.assert_close(wrapper.eval()(IDS).logits, alone(wrapper, name)(IDS).logits, rtol=1e-4, atol=1e-4)
    assert_cache_changes_nothing(wrapper, 6, input_ids=IDS[:, :5])


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "smolvlm"])
def test_nothing_removed_is_the_input_bit_for_bit(
    name: str, folder_of: Callable[[str], Path], make_config: MakeConfig, text_file: Path
) -> None:
    folder = folder_of(name)
    config = make_config(folder, sparsity=0)
    compress(config)
    dense, result = (load_file(each / "model.safetensors") for each in (folder, Path(config.output)))
    assert dense.keys() == result.keys()
    assert all(torch.equal(tensor, result[key]) for key, tensor in dense.items())
    ours, theirs = evaluate(
        [config.output], [str(text_file)], baseline=str(folder), sequence_length=16, max_windows=2, decode_tokens=0
    )
    assert ours.perplexity == theirs.perplexity


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("tied", [False, True])
def test_older_and_newer_names_of_tensors(prefix: str, tied: bool, tmp_path: Path) -> None:
    """Files have had the language model, and its head, at different places."""
    build_wrapper("llava", tied=tied).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name.replace("language_model.model.", prefix): tensor for name, tensor in load_file(path).items()}
    assert any(name.startswith(prefix) for name in tensors)
    save_file(tensors, path)
    model = open_model(str(tmp_path), tmp_path)
    assert model.shape.tied == tied
    assert model.shape.stack().stored_parameters() == sum(tensor.numel() for tensor in tensors.values())


def test_a_flat_config(tmp_path: Path, save_model: Callable[..., Path], make_config: MakeConfig) -> None:
    """The first Qwen2-VL models state the sizes of the language model beside the images'; they also write text."""
    folder = save_model(build_wrapper("qwen2_5_vl"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    text.pop("model_type")
    path.write_text(json.dumps(text | config))
    run = make_config(folder, sparsity=0.1, calibration="self")
    compress(run)
    stated = json.loads((Path(run.output) / "config.json").read_text())
    assert "text_config" not in stated
    assert stated["intermediate_size"] < 64
    model, info = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(run.output, output_loading_info=True)
    assert not info["missing_keys"]
    assert model.config.text_config.intermediate_size == stated["intermediate_size"]


@pytest.mark.parametrize(("name", "inner"), [("mistral3", MISTRAL4), ("gemma4", GEMMA_EXPERTS)])
@torch.inference_mode()
def test_a_mixture_inside_a_wrapper_that_may_be_dense(
    name: str, inner: dict[str, Any], save_model: Callable[..., Path], make_config: MakeConfig
) -> None:
    """Mistral 4 has DeepSeek's attention and experts, and only the class of images and text reads it."""
    folder = save_model(build_wrapper(name, **inner))
    same, smaller = (make_config(folder, sparsity=share, output=f"{folder}-{share}") for share in (0, 0.2))
    for run in (same, smaller):
        report = compress(run)
    dense, result = (load_file(each / "model.safetensors") for each in (folder, Path(same.output)))
    assert dense.keys() == result.keys()
    assert all(torch.equal(tensor, result[key]) for key, tensor in dense.items())
    [stated] = FAMILIES[name].classes
    opened, info = getattr(transformers, stated).from_pretrained(smaller.output, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert opened.config.text_config.moe_intermediate_size < 32
    assert stored_numbers(opened) == report.stored_parameters["compressed"]
    assert_cache_changes_nothing(opened.eval(), 6, input_ids=IDS[:, :5])


def stating(folder: Path, changes: dict[str, Any]) -> Path:
    """Let the language model's part of a config.json state other values; None: it does not state the entry."""
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"] | changes
    config["text_config"] = {name: value for name, value in text.items() if changes.get(name, "") is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def block_ff_dim(width: int) -> dict[str, Any]:
    """Return what files of LFM2-VL on the hub state of the FFN's width; the class reads no other entry then."""
    return {"block_ff_dim": width, "intermediate_size": width}


OTHER_STATEMENTS = [
    *((name, {"head_dim": None}) for name, (_, inner) in WRAPPERS.items() if "head_dim" not in inner),
    ("lfm2_vl", block_ff_dim(64)),
    ("lfm2_vl", block_ff_dim(96) | {"block_auto_adjust_ff_dim": True, "block_multiple_of": 16}),
]


@pytest.mark.parametrize(("name", "stated"), OTHER_STATEMENTS)
def test_a_resized_config_is_read_with_its_sizes(
    name: str, stated: dict[str, Any], folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """The class makes some sizes of others, and reads a size under several names."""
    folder = stating(shutil.copytree(folder_of(name), tmp_path / name), stated)
    model = open_model(str(folder), tmp_path)
    fewer: dict[str, Any] = (
        {} if model.family.reason_against("heads") else {"num_attention_heads": 2, "num_key_value_heads": 1}
    )
    shape = replace(model.shape, intermediate_size=24, **fewer)
    config = resized_config(model.family, model.checkpoint.config, shape)
    text = complete_text_config(model.family, config)
    sizes = model.family.sizes
    assert model.family.stated_width(text) in (24, None)
    assert text[sizes.intermediate_size] == 24
    assert text["num_attention_heads"] == shape.num_attention_heads
    assert text["num_key_value_heads"] == shape.num_key_value_heads
    if fewer and sizes.head_dim is not None:
        assert text[sizes.head_dim] == 8


@pytest.mark.parametrize(("name", "stated"), [("llava", {"head_dim": None}), OTHER_STATEMENTS[-1]])
@torch.inference_mode()
def test_sizes_that_a_class_makes_of_others(
    name: str, stated: dict[str, Any], folder_of: Callable[[str], Path], make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = stating(shutil.copytree(folder_of(name), tmp_path / name), stated)
    report = compress(make_config(folder, form="stock", heads="id"))
    [model_class] = FAMILIES[name].classes
    opened, info = getattr(transformers, model_class).from_pretrained(report.config["output"], output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert stored_numbers(opened) == report.stored_parameters["compressed"] < report.stored_parameters["dense"]


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("llava_next", {"model_type": "granite", "sliding_window": None, **GRANITE_FACTORS}),
        ("internvl", {"model_type": "gpt_oss", "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("llava", {"model_type": "gemma", "head_dim": 8}),
        ("llava", {"model_type": "gemma2", "head_dim": 8, "sliding_window": 7, "final_logit_softcapping": 5.0}),
        ("gemma3", {"final_logit_softcapping": 5.0}),
        ("gemma4", {"final_logit_softcapping": 5.0}),
    ],
)
@torch.inference_mode()
def test_what_a_wrapper_leaves_out_of_its_language_model(
    name: str,
    inner: dict[str, Any],
    save_model: Callable[..., Path],
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrapper has its own output head, without factors and bounds. Not every language model has its attention."""
    last = keep_last_states(monkeypatch)
    folder = save_model(build_wrapper(name, **inner))
    run = make_config(folder, form="stock", sparsity=0.1)
    report = compress(run)
    [stated] = FAMILIES[name].classes
    opened, info = getattr(transformers, stated).from_pretrained(run.output, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert stored_numbers(opened) == report.stored_parameters["compressed"] < report.stored_parameters["dense"]
    assert_passes(opened.eval(), f"{FAMILIES[name].text_module}layers", run, last[0])
    assert_cache_changes_nothing(opened, 6, input_ids=IDS[:, :5])


def test_what_wrappers_cannot_do_is_refused(folder_of: Callable[[str], Path], make_config: MakeConfig) -> None:
    folder = folder_of("gemma3")
    with pytest.raises(PlanError, match="use --form stock"):
        compress(make_config(folder, form="per-layer"))
    with pytest.raises(PlanError, match="features of images"):
        compress(make_config(folder_of("llava"), depth="sensitivity"))


def test_an_unknown_language_model_is_refused(save_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = save_model(build_wrapper("llava"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"text_config": config["text_config"] | {"model_type": "opt"}}))
    with pytest.raises(CheckpointError, match="The language model of this llava is of the type opt"):
        open_model(str(folder), tmp_path)


@pytest.mark.parametrize("flag", ["output_attentions", "output_hidden_states"])
def test_what_a_wrapper_says_of_outputs(
    flag: str, folder_of: Callable[[str], Path], make_config: MakeConfig, tmp_path: Path
) -> None:
    own_folder = shutil.copytree(folder_of("llava"), tmp_path / "llava")
    config = json.loads((own_folder / "config.json").read_text())
    config["text_config"][flag] = config[flag] = True
    (own_folder / "config.json").write_text(json.dumps(config))
    output = compress(make_config(own_folder, form="stock")).config["output"]
    assert json.loads((Path(output) / "config.json").read_text())["text_config"][flag]
