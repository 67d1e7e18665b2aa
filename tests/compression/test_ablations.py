"""Variants of the papers that are there to be compared: each against NumPy, SciPy, or hooks in stock models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, calibration_tokens
from transformers import AutoModelForCausalLM

from oneshot.compression.inner_heads import value_subspaces
from oneshot.config import Config
from oneshot.errors import ConfigError, PlanError
from oneshot.evaluation import load_model
from oneshot.pipeline import compress

TOKEN_IDS = torch.randint(0, 400, (2, 24), generator=torch.Generator().manual_seed(1))


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


# Corrections of heads (STAT section 3.2, step 2b)


@torch.inference_mode()
def attention_rows(folder: Path, token_ids: torch.Tensor, layer: int) -> dict[str, torch.Tensor]:
    """Return what enters and leaves `o_proj`, and the values, of a layer of a stock model, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    attention, found = model.model.layers[layer].self_attn, {}
    for name, linear in (("output", attention.o_proj), ("values", attention.v_proj)):

        def keep(_: Any, inputs: Any, output: torch.Tensor, name: str = name) -> None:
            found[name] = output.flatten(0, -2).double()
            found[f"{name} input"] = inputs[0].flatten(0, -2).double()

        linear.register_forward_hook(keep)
    model(token_ids)
    return found


def test_heads_following_need_a_dense_stream() -> None:
    with pytest.raises(ConfigError, match="needs correction=two-stream"):
        Config.of("model", "out", sparsity=0.2, heads_correction="two-stream", correction="same-layer")


def test_heads_can_follow_the_dense_stream(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    """STAT section 3.2, step 2b: least squares from the compressed stream's heads to the dense attention's output."""
    checkpoint = make_checkpoint(heads=4, groups=4, layers=2)
    settings = {"residual_target": "sublayer", "residual_weight": 1.0, "damping": 1e-7, "correction": "two-stream"}
    config = make_config(
        checkpoint, num_sequences=64, sparsity=0.06, ffn="none", heads="id", heads_correction="two-stream", **settings
    )
    report = compress(config)
    assert report.plan["layers"][1]["num_attention_heads"] < 4
    token_ids = calibration_tokens(config)
    dense = attention_rows(checkpoint, token_ids, 1)
    compressed = attention_rows(Path(config.output), token_ids, 1)
    expected = torch.linalg.lstsq(compressed["output input"], dense["output"]).solution.T
    result = AutoModelForCausalLM.from_pretrained(config.output, dtype=torch.float32)
    weight = result.model.layers[1].self_attn.o_proj.weight.detach().double()
    torch.testing.assert_close(weight, expected, rtol=2e-3, atol=2e-3)


# Directions of the hidden size


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_hidden_size_of_full_width_only_rotates(
    family: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    checkpoint = make_checkpoint(family=family)
    options = {"recipe": "tcsp", "form": "per-layer", "hidden_size": 32}
    config = make_config(checkpoint, **options)
    compress(config)
    cpu = torch.device("cpu")
    with torch.inference_mode():
        dense, rotated = (
            load_model(Path(folder), device=cpu, dtype=torch.float32).double()(TOKEN_IDS).logits
            for folder in (checkpoint, config.output)
        )
    assert float((rotated - dense).abs().max() / dense.abs().max()) < 2e-5
    with pytest.raises(PlanError, match="is above the model's 32"):
        compress(make_config(checkpoint, **options | {"hidden_size": 33, "output": config.output + "-more"}))


# Smaller values: whose features, and whether the output linear weighs them (SP3 10, TCSP 27, DA-WID 9 and 21)


@pytest.mark.parametrize("features", ["heads", "values"])
@pytest.mark.parametrize("weighted", [False, True])
def test_subspaces_of_values_are_the_best_for_their_features(features: str, weighted: bool) -> None:
    """Compare the error of `Z (I − M) W` with the tail of the singular values, head by head (Eckart–Young)."""
    heads, size, rank = 3, 6, 2
    outputs, values, weight = normal(200, 18), normal(150, 18, seed=1) * np.linspace(1, 4, 18), normal(10, 18, seed=2)
    grams = torch.stack([torch.from_numpy(part.T @ part) for part in np.split(values, heads, axis=1)])
    bases, folded = value_subspaces(
        torch.from_numpy(weight),
        torch.from_numpy(outputs.T @ outputs),
        num_groups=heads,
        head_dim=size,
        size=rank,
        correct=False,
        damping=0.0,
        value_grams=grams if features == "values" else None,
        weighted=weighted,
    )
    rows = values if features == "values" else outputs
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        dense = weight[:, part]
        if not weighted:  # M is an orthogonal projection, so the writer is only restricted to its range
            directions = np.linalg.svd(rows[:, part], full_matrices=False)[2][:rank]
            np.testing.assert_allclose(folded[:, part], dense @ directions.T @ directions, atol=1e-6)
            continue
        tail = np.linalg.svd(rows[:, part] @ dense.T, compute_uv=False)[rank:]
        missed = rows[:, part] @ (dense - folded[:, part].numpy()).T
        assert np.linalg.norm(missed) == pytest.approx(np.linalg.norm(tail), rel=1e-5)
        np.testing.assert_allclose(bases[head].T @ bases[head], np.eye(rank), atol=1e-9)


def test_values_of_the_stock_model_give_the_subspaces(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    """SP3 equation 10: the values' principal directions give the stored rows of `v_proj`."""
    checkpoint = make_checkpoint()
    settings = {"ffn": "none", "correction": "none", "value_features": "values", "value_weights": "none"}
    config = make_config(checkpoint, form="per-layer", value_size=3, **settings)
    compress(config)
    values = attention_rows(checkpoint, calibration_tokens(config), 0)["values"]
    dense = AutoModelForCausalLM.from_pretrained(checkpoint).model.layers[0].self_attn.v_proj.weight.detach().double()
    stored = load_model(Path(config.output), device=torch.device("cpu"), dtype=torch.float32)
    rows = stored.model.layers[0].self_attn.v_proj.weight.detach().double()
    for group in range(2):
        part = slice(8 * group, 8 * group + 8)
        directions = torch.linalg.svd(values[:, part], full_matrices=False).Vh[:3]
        expected = directions @ dense[part]
        own = rows[3 * group : 3 * group + 3]
        torch.testing.assert_close(own.T @ own, expected.T @ expected, rtol=1e-3, atol=1e-4)
