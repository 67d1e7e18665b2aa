"""A family that is described wrongly is refused at once: Llama's description under the names of other families."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeConfig, build_model, cpu_machine, randomise
from families.cases import CASES

from oneshot.checkpoint import open_model
from oneshot.errors import CheckpointError
from oneshot.families import FAMILIES, LLAMA
from oneshot.pipeline import compress, profile
from oneshot.stream import check_family

SIZES = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
# what the sentence names: a part that computes something else, or a tensor that is not there
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "gemma3_text": ({"head_dim": 8}, "post_feedforward_layernorm|k_norm"),
    "gemma": ({"head_dim": 8}, "The embedding of this gemma computes something else here than in GemmaForCausalLM"),
    "granite": ({"embedding_multiplier": 3.0}, "The embedding of this granite"),
    "granite-of-residual": ({"residual_multiplier": 0.2}, "The attention in layer 0 of this granite"),
    "granite-of-head": ({"logits_scaling": 8.0}, "The output head of this granite"),
    "phi3": ({}, "mlp.down_proj.weight|mlp.gate_proj.weight|mlp.gate_up_proj.weight"),
    "olmo2": ({}, "input_layernorm"),
    "cohere": ({"logit_scale": 0.5}, "post_attention_layernorm"),
    "stablelm": ({}, "input_layernorm.bias"),
    "nemotron": ({}, "input_layernorm.bias"),
    "arcee": ({}, "gate_proj"),
}


def save(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", WRONG)
@torch.inference_mode()
def test_the_description_of_another_family_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    (options, sentence), model_type = WRONG[name], name.partition("-")[0]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | options))
    folder = save(randomise(model, 0), tmp_path / "wrong")
    monkeypatch.setitem(FAMILIES, model_type, replace(LLAMA, model_type=model_type))
    with pytest.raises(CheckpointError, match=sentence) as refusal:
        check_family(open_model(folder, tmp_path), cpu_machine(tmp_path))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("run", [compress, profile])
def test_a_run_checks_the_family_before_any_work(
    run: Callable[..., Any], make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("granite", residual_multiplier=0.2, **SIZES)
    folder = tmp_path / "granite"
    save(randomise(AutoModelForCausalLM.from_config(config), 0), folder)
    monkeypatch.setitem(FAMILIES, "granite", replace(LLAMA, model_type="granite"))
    with pytest.raises(CheckpointError, match="attention in layer 0 of this granite"):
        run(make_config(folder))
    assert not (tmp_path / "out.incomplete").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_every_family_passes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    case = CASES[name]
    folder = save(case.build(**case.options), tmp_path / "model")
    check_family(open_model(folder, tmp_path), cpu_machine(tmp_path, dtype=dtype))


@pytest.mark.parametrize(
    ("family", "entry"), [("llama", {"return_dict": False}), ("bert", {"chunk_size_feed_forward": 4})]
)
@torch.inference_mode()
def test_a_config_that_asks_for_tuples_or_for_parts_passes(family: str, entry: dict[str, Any], tmp_path: Path) -> None:
    """Today's classes fail by tuples, which older configs ask for; parts of the tokens are not all of them."""
    config = Path(save(CASES[family].build(**CASES[family].options), tmp_path / "model")) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | entry))
    check_family(open_model(str(config.parent), tmp_path), cpu_machine(tmp_path))


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.01), (torch.bfloat16, 1.2)])
@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ("model.layers.0.self_attn", "attention in layer 0"),
        ("model.layers.0.mlp", "FFN in layer 0"),
        ("model.norm", "final norm"),
        ("model.embed_tokens", "embedding"),
        ("lm_head", "output head"),
    ],
)
@torch.inference_mode()
def test_a_class_that_computes_something_else_is_noticed(
    part: str, sentence: str, dtype: torch.dtype, factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook scales what one part of the stock model returns, as a changed class would."""
    import oneshot.stream.check as check

    def scaled(_: Any, __: Any, output: Any) -> Any:
        return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

    def changed(*arguments: Any) -> Any:
        model = make(*arguments)
        model.get_submodule(part).register_forward_hook(scaled)
        return model

    make = check.sample_model
    monkeypatch.setattr(check, "sample_model", changed)
    model = open_model(save(build_model(), tmp_path / "model"), tmp_path)
    with pytest.raises(CheckpointError, match=f"The {sentence} of this llama computes something else"):
        check_family(model, cpu_machine(tmp_path, dtype=dtype))
