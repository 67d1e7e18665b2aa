"""TCSP{a %, b %}: sizes by rates, their combination, and filters by the paper's score without a correction."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, calibration_tokens
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from oneshot.cli.compress import main
from oneshot.config import Config, Target, tcsp_options
from oneshot.errors import ConfigError, PlanError
from oneshot.evaluation import load_model
from oneshot.pipeline import compress

TEXT = ["--num-sequences=16", "--sequence-length=32", "--device=cpu", "--dtype=float32", "--quiet"]


def linears(folder: Path) -> int:
    """Count the weights of all matrices in the layers."""
    tensors = load_file(folder / "model.safetensors")
    return sum(
        tensor.numel() for name, tensor in tensors.items() if ".layers." in name and name.endswith("proj.weight")
    )


@pytest.mark.parametrize(("hidden", "inner"), [(25, 25), (12.5, 0), (25, 50), (0, 25)])
def test_the_preset_removes_a_plus_b_minus_ab(
    hidden: float, inner: float, make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path
) -> None:
    checkpoint, output = make_checkpoint(groups=4), tmp_path / "out"
    command = [str(checkpoint), f"--output={output}", f"--calibration={text_file}", *TEXT]
    assert main([*command, "--tcsp", str(hidden), str(inner)]) == 0
    a, b = hidden / 100, inner / 100
    assert linears(output) / linears(checkpoint) == pytest.approx(1 - (a + b - a * b))
    config = load_model(output, device=torch.device("cpu"), dtype=torch.float32).config
    assert config.model_type == ("oneshot" if inner else "mistral" if hidden == 12.5 and 28 % 4 else "llama")
    if inner:
        assert config.hidden_size == 32 * (1 - a)
        for layer in config.layers:
            assert layer["intermediate_size"] == 64 * (1 - b)
            assert layer["value_size"] == layer["query_key_size"] == 8 * (1 - b)
            assert layer["num_attention_heads"] == 4


@pytest.mark.parametrize("rates", [{"hidden_rate": 0.0}, {"inner_rate": 0.0}, {"hidden_rate": 0.0, "inner_rate": 0.0}])
def test_rates_of_zero_remove_nothing(
    rates: dict[str, float], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(), **rates)
    compress(config)
    stored = [load_file(folder / "model.safetensors") for folder in (make_checkpoint(), Path(config.output))]
    assert stored[0].keys() == stored[1].keys()
    assert all(torch.equal(tensor, stored[1][name]) for name, tensor in stored[0].items())


def test_filters_are_those_of_the_score_and_stay_as_they_are(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Equation 25 on what the first FFN reads behind the smaller heads; no weight of a kept filter changes."""
    checkpoint = make_checkpoint()
    config = make_config(checkpoint, **(tcsp_options(0, 25) | {"hidden_rate": 0.0}))
    compress(config)
    result = load_model(Path(config.output), device=torch.device("cpu"), dtype=torch.float32)
    seen: list[torch.Tensor] = []
    result.model.layers[0].mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, -2)))
    with torch.inference_mode():
        result(calibration_tokens(config))
        dense = AutoModelForCausalLM.from_pretrained(checkpoint).model.layers[0].mlp
        activations = (dense.act_fn(dense.gate_proj(seen[0])) * dense.up_proj(seen[0])).double().numpy()
    down = dense.down_proj.weight.detach().double().numpy()
    score = np.linalg.norm(down, axis=0) * (activations.mean(0) + activations.std(0))
    kept = np.sort(np.argsort(-score)[:48])
    own = result.model.layers[0].mlp
    for name in ("gate_proj", "up_proj"):
        assert torch.equal(getattr(own, name).weight, getattr(dense, name).weight[kept])
    assert torch.equal(own.down_proj.weight, dense.down_proj.weight[:, kept])


def test_the_paper_uses_no_correction() -> None:
    config = Config.of("model", "out", **tcsp_options(25, 25))
    assert (config.method.correction, config.method.hidden, config.method.group_size) == ("none", "pca", 0)
    assert (config.method.ffn, config.method.heads) == ("tcsp-score", "none")
    assert (config.method.value_features, config.method.value_weights) == ("values", "output")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"hidden_rate": 1.0}, "out of range"),
        ({"inner_rate": 0.2, "sparsity": 0.2}, "Give either a target"),
        ({"intermediate_size": 8, "parameters": 100}, "Give either a target"),
        ({"hidden_rate": 0.2, "hidden_size": 8}, "hidden_rate= or --set hidden_size="),
        ({"inner_rate": 0.2, "value_size": 8}, "sizes that it stands for"),
    ],
)
def test_contradictory_rates_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Target(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"recipe": "tcsp", "hidden_rate": 0.25, "inner_rate": 0.25}, "--set inner_rate=0.25 needs a selector of neu"),
        ({"recipe": "tcsp", "hidden_rate": 0.25, "intermediate_size": 40}, "--set intermediate_size=40 needs a selec"),
        ({"hidden_rate": 0.25}, "--set hidden_rate= needs a method"),
        ({"inner_rate": 0.25, "form": "stock"}, "--set inner_rate=0.25 needs --form per-layer"),
    ],
)
def test_a_refusal_names_the_rate_that_was_given(
    options: dict[str, Any], named: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """And not the size that it stands for."""
    with pytest.raises((ConfigError, PlanError), match=named) as refused:
        compress(make_config(make_checkpoint(), **{"sparsity": None, "form": "auto", **options}))
    given = [name for name in vars(Target(sparsity=0.0)) if f"{name}=" in str(refused.value)]
    assert [name for name in given if name not in options] == []


def test_an_ffn_width_is_kept_to(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    checkpoint = make_checkpoint()
    report = compress(make_config(checkpoint, sparsity=None, intermediate_size=40))
    assert {layer["intermediate_size"] for layer in report.plan["layers"]} == {40}
    other = {"output": report.config["output"] + "-other", "sparsity": None}
    with pytest.raises(PlanError, match="above the model's 64"):
        compress(make_config(checkpoint, intermediate_size=65, **other))
    with pytest.raises(ConfigError, match="add --set ffn=id"):
        compress(make_config(checkpoint, intermediate_size=40, ffn="none", **other))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [(["--tcsp", "much", "25"], "is not two numbers"), (["--tcsp", "25", "25", "--recipe=flap"], "leave out --recipe")],
)
def test_a_wrong_preset_is_one_sentence(
    options: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", f"--output={tmp_path / 'out'}", *TEXT, *options]) == 1
    assert sentence in capsys.readouterr().err
