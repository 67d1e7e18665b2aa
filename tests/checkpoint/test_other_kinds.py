"""Folders of other kinds than a model that predicts the next token, and configs that leave something out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, build_model
from families.cases import CASES
from safetensors.torch import save_file

from oneshot.checkpoint import open_model
from oneshot.errors import CheckpointError, PlanError
from oneshot.export.forms import form_of
from oneshot.export.llama_layers import reason_against_llama
from oneshot.export.resized import ResizedForm
from oneshot.pipeline import compress


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_a_model_without_a_head_may_state_the_class_with_one(family: str, save_model: Callable[..., Path]) -> None:
    """Embedding models do; their tensors lack the prefix. The result states what it is."""
    options: dict[str, Any] = {"head_dim": 8} if family == "qwen3" else {}
    built = build_model(family, model_class="AutoModel", **options)
    folder = save_model(built)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["SomethingForCausalLM"]}))
    model = open_model(str(folder), folder)
    assert model.checkpoint.config["architectures"] == [type(built).__name__]
    assert model.shape.stack().head == "none"
    assert model.shape.stack().stored_parameters() == sum(parameter.numel() for parameter in built.parameters())


def test_a_head_of_another_kind_is_refused(save_model: Callable[..., Path]) -> None:
    import transformers

    tiny = build_model()
    folder = save_model(transformers.LlamaForQuestionAnswering(tiny.config))
    with pytest.raises(CheckpointError, match="states the class LlamaForQuestionAnswering, which is not supported"):
        open_model(str(folder), folder)


@pytest.mark.parametrize(
    "name",
    ["AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoModelForTokenClassification"],
)
def test_heads_that_do_not_divide_the_hidden_size_of_a_llama(
    name: str, save_model: Callable[..., Path], make_config: MakeConfig
) -> None:
    """LlamaConfig refuses three heads beside 32, so the result is the Mistral of the same task. A silent head goes."""
    import transformers

    model, ids = build_model(groups=4, model_class=name), torch.arange(2, 40).unsqueeze(0)
    for parameter, values in model.named_parameters():
        if parameter.endswith("o_proj.weight"):
            values.data[:, 8:16] = 0
    stored = sum(values.numel() for values in model.parameters()) - 2 * 4 * 8 * 32  # layers × linears × rows × columns
    settings: dict[str, Any] = {"heads": "id", "ffn": "none", "correction": "none", "allocation": "uniform"}
    config = make_config(save_model(model), form="stock", parameters=stored, **settings)
    compress(config)
    result, loading = getattr(transformers, name).from_pretrained(config.output, output_loading_info=True)
    assert result.config.architectures == [type(model).__name__.replace("Llama", "Mistral")]
    assert result.config.num_attention_heads == 3
    assert not loading["missing_keys"] | loading["unexpected_keys"]
    with torch.inference_mode():
        torch.testing.assert_close(result.eval()(ids)[0], model.eval()(ids)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("form", "sparsity"), [("per-layer", 0.1), ("nemotron-nas", 0.1), ("gguf", 0.1)])
def test_forms_that_predict_tokens_are_refused(
    form: str, sparsity: float, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(model_class="AutoModelForSequenceClassification", num_labels=1)
    with pytest.raises(PlanError, match="decoders that predict tokens; use --form stock"):
        compress(make_config(folder, form=form, sparsity=sparsity))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"family": "mistral", "sliding_window": 4096}, "sliding_window"),
        ({"family": "mistral", "heads": 16, "groups": 8}, "num_key_value_heads"),
        ({"family": "qwen3", "head_dim": 128}, "head_dim"),
        ({"family": "gemma", "head_dim": 256, "tied": True}, "head_dim"),
    ],
)
def test_what_a_config_leaves_out_is_the_default_of_its_class(
    options: dict[str, Any], key: str, own_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """transformers reads it so: a Mistral that states no window has one of 4,096 tokens."""
    folder, complete = own_checkpoint(**options), tmp_path / "complete"
    shutil.copytree(folder, complete)
    config = json.loads((folder / "config.json").read_text())
    config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    stated = build_model(**options).config.to_dict()[key]
    (complete / "config.json").write_text(json.dumps(config | {key: stated}))
    left_out, with_it = (open_model(str(each), tmp_path) for each in (folder, complete))
    assert (left_out.family, left_out.shape) == (with_it.family, with_it.shape)
    for form in ("per-layer", "gguf", "nemotron-nas"):
        assert reason_against_llama(left_out, form) == reason_against_llama(with_it, form)
    if key == "sliding_window":
        assert "one of 4096 tokens" in str(reason_against_llama(left_out, "gguf"))
        assert isinstance(form_of("per-layer", left_out.family), ResizedForm)  # in the class that has windows


def test_an_adapter_alone(tmp_path: Path) -> None:
    """A folder of peft has no config.json."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="holds an adapter; merge it into the model"):
        open_model(str(tmp_path), tmp_path)


def test_a_folder_with_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"give .*model\.gguf itself"):
        open_model(str(tmp_path), tmp_path)


@pytest.mark.parametrize("name", ["minimax_m2", "granitemoe"])
def test_experts_under_the_names_of_their_class_are_read(name: str, save_model: Callable[..., Path]) -> None:
    """A model saved that was not loaded from files keeps them, and its class opens both."""
    built = CASES[name].build(**CASES[name].options)
    folder = save_model(built)
    usual = open_model(str(folder), folder).read_layer(0)
    save_file(built.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    again = open_model(str(folder), folder).read_layer(0)
    assert again.keys() == usual.keys()
    assert all(torch.equal(one, again[key]) for key, one in usual.items())
