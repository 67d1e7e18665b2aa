"""The two targets of the two-stream correction, against least squares on activations hooked in stock models."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, calibration_tokens, topics
from transformers import AutoModelForCausalLM

from oneshot.config import Config
from oneshot.errors import ConfigError
from oneshot.pipeline import compress

LAYER = 1  # in the first layer both streams are still equal


@torch.inference_mode()
def hooked(folder: Path, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the rows that enter and leave the FFN of a stock model's layer, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: dict[str, torch.Tensor] = {}
    layer = model.model.layers[LAYER]

    def keep(name: str, value: torch.Tensor) -> None:
        found[name] = value.flatten(0, -2).double()

    layer.mlp.down_proj.register_forward_pre_hook(lambda _, inputs: keep("neurons", inputs[0]))
    layer.mlp.register_forward_hook(lambda _, inputs, output: keep("output", output))
    layer.post_attention_layernorm.register_forward_pre_hook(lambda _, inputs: keep("before", inputs[0]))
    model(token_ids)
    return found


@pytest.mark.parametrize("target", ["stream", "sublayer"])
def test_the_corrected_writer_equals_least_squares_towards_its_target(
    target: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    checkpoint = make_checkpoint(width=64, layers=2)
    settings = {"correction": "two-stream", "residual_target": target, "residual_weight": 1.0, "damping": 1e-7}
    config = make_config(checkpoint, num_sequences=64, sparsity=0.15, **settings)
    report = compress(config)
    kept = report.plan["layers"][LAYER]["intermediate_size"]
    assert kept < 64
    token_ids = calibration_tokens(config)
    dense, compressed = hooked(checkpoint, token_ids), hooked(Path(config.output), token_ids)
    wanted = dense["output"]
    share = 1.0
    if target == "stream":
        wanted = dense["before"] + dense["output"] - compressed["before"]
        share = max(0.0, 1 - 4 * 64 / token_ids.numel())  # of the residual, for so few tokens
        own = compressed_output_of_all_neurons(checkpoint, compressed["before"])
        wanted = own + share * (wanted - own)
    expected = torch.linalg.lstsq(compressed["neurons"], wanted).solution.T
    result = AutoModelForCausalLM.from_pretrained(config.output, dtype=torch.float32)
    weight = result.model.layers[LAYER].mlp.down_proj.weight.detach().double()
    torch.testing.assert_close(weight, expected, rtol=2e-3, atol=2e-3)


def test_with_much_text_every_other_batch_stands_for_the_residual(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The Gram and the dense output have all tokens; the residual has the tokens of two of four batches, twice."""
    checkpoint = make_checkpoint(width=64, layers=2)
    settings = {"correction": "two-stream", "residual_weight": 1.0, "damping": 1e-7, "batch_size": 64}
    text = tmp_path / "long.txt"
    text.write_text(topics(0, 10))
    config = make_config(checkpoint, calibration=f"{text}+{text}", num_sequences=256, sparsity=0.15, **settings)
    compress(config)
    token_ids = calibration_tokens(replace(config, text=replace(config.text, calibration=str(text))))
    assert len(token_ids) == 256
    assert token_ids.numel() >= 64 * 64
    dense, compressed = hooked(checkpoint, token_ids), hooked(Path(config.output), token_ids)
    own = compressed_output_of_all_neurons(checkpoint, compressed["before"])
    residual = dense["before"] + dense["output"] - compressed["before"] - own
    has_dense = (torch.arange(256) // 64 % 2 == 0).repeat_interleave(token_ids.shape[1]).double().unsqueeze(1)
    share = 1 - 4 * 64 / (token_ids.numel() / 2)
    neurons = compressed["neurons"]
    expected = torch.linalg.solve(neurons.T @ neurons, neurons.T @ (own + 2 * share * has_dense * residual)).T
    result = AutoModelForCausalLM.from_pretrained(config.output, dtype=torch.float32)
    weight = result.model.layers[LAYER].mlp.down_proj.weight.detach().double()
    torch.testing.assert_close(weight, expected, rtol=2e-3, atol=2e-3)


@torch.inference_mode()
def compressed_output_of_all_neurons(checkpoint: Path, before: torch.Tensor) -> torch.Tensor:
    """Return what the dense FFN gives on the compressed stream."""
    layer = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).double().model.layers[LAYER]
    return layer.mlp(layer.post_attention_layernorm(before))


def test_up_steps_refuse_the_target_of_the_sublayer() -> None:
    with pytest.raises(ConfigError, match="residual_target=stream"):
        Config.of("model", "out", sparsity=0.2, up_steps=2, residual_target="sublayer")
