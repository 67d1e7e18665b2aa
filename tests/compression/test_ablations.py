"""Variants of the papers that are there to be compared: each against NumPy, SciPy, or hooks in stock models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from factories import MakeCheckpoint, MakeConfig, calibration_tokens, cpu_machine
from transformers import AutoModelForCausalLM

from oneshot.checkpoint import open_model
from oneshot.compression import find_subspaces
from oneshot.compression.correction import correct_heads
from oneshot.compression.inner_heads import value_subspaces
from oneshot.compression.statistics import Statistics
from oneshot.config import Config
from oneshot.errors import ConfigError, PlanError
from oneshot.evaluation import load_model
from oneshot.pipeline import compress
from oneshot.selection import Evidence, select_heads, select_neurons
from oneshot.text import Text

TOKEN_IDS = torch.randint(0, 400, (2, 24), generator=torch.Generator().manual_seed(1))


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


# Pivots without the weights of the output linear (STAT A.3)


def test_pivots_without_weights_see_the_activations_alone() -> None:
    activations, weight = normal(60, 12) * np.linspace(1, 3, 12), normal(5, 12, seed=1) * np.linspace(4, 0.1, 12)
    evidence = Evidence(
        torch.from_numpy(weight),
        None,
        torch.from_numpy(activations.T @ activations),
        torch.Generator(),
        pivot_weights="none",
    )
    order = scipy.linalg.qr(activations, mode="r", pivoting=True)[1]
    assert select_neurons("id", 5, evidence).tolist() == sorted(order[:5].tolist())
    heads = activations.reshape(60, 4, 3).transpose(0, 2, 1).reshape(180, 4)
    order = scipy.linalg.qr(heads, mode="r", pivoting=True)[1]
    sizes = {"num_groups": 4, "heads_per_group": 1, "kept_groups": 2, "kept_heads_per_group": 1}
    assert select_heads("id", evidence, **sizes).tolist() == sorted(order[:2].tolist())


# Corrections of heads (STAT section 3.2, step 2b, and figure 3b)


@pytest.mark.parametrize("bias", [False, True])
def test_the_head_level_correction_has_one_number_for_each_pair_of_heads(bias: bool) -> None:
    heads, size, kept = 5, 3, np.array([0, 2, 3])
    rows = normal(80, 4) @ normal(4, heads * size, seed=1) + 0.2 * normal(80, heads * size, seed=2)
    consumed = np.column_stack([rows, np.ones(80)]) if bias else rows
    weight = normal(6, consumed.shape[1], seed=3)
    long = rows.reshape(80, heads, size).transpose(0, 2, 1).reshape(-1, heads)
    removed = np.setdiff1d(np.arange(heads), kept)
    numbers = np.linalg.lstsq(long[:, kept], long[:, removed], rcond=None)[0]
    columns = np.concatenate([np.arange(3 * head, 3 * head + 3) for head in kept])
    columns = np.append(columns, heads * size) if bias else columns
    statistics = Statistics(torch.from_numpy(consumed.T @ consumed), None, torch.zeros(()), 80)
    factors = correct_heads(
        torch.from_numpy(weight), torch.from_numpy(columns), statistics, head_dim=size, damping=1e-12
    )
    gone = np.concatenate([np.arange(3 * head, 3 * head + 3) for head in removed])
    expected = weight[:, columns].copy()
    expected[:, : 3 * len(kept)] += weight[:, gone] @ np.kron(numbers, np.eye(size)).T
    np.testing.assert_allclose(factors.weight.numpy(), expected, atol=1e-8)
    missed = consumed @ weight.T - consumed[:, columns] @ expected.T
    assert factors.predicted_error == pytest.approx(np.linalg.norm(missed) / np.linalg.norm(consumed @ weight.T))


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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"heads_correction": "two-stream", "correction": "same-layer"}, "needs correction=two-stream"),
        ({"heads_correction": "head-level", "correction": "none"}, "needs least squares"),
        ({"heads_correction": "head-level", "damping": "auto"}, "a number as damping"),
        ({"hidden": "coordinate"}, "pca, coordinates, random, none"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Config.of("model", "out", sparsity=0.2, **options)


def test_head_level_corrections_reach_the_checkpoint(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    checkpoint = make_checkpoint(heads=4, groups=4, layers=2)
    config = make_config(checkpoint, sparsity=0.06, ffn="none", heads="id", heads_correction="head-level", damping=1e-9)
    compress(config)
    rows = attention_rows(checkpoint, calibration_tokens(config), 0)  # both streams are equal before the first layer
    dense = AutoModelForCausalLM.from_pretrained(checkpoint).model.layers[0].self_attn
    result = AutoModelForCausalLM.from_pretrained(config.output).model.layers[0].self_attn
    size, queries = 8, dense.q_proj.weight.detach().view(4, 8, -1)
    heads = [
        next(head for head in range(4) if torch.equal(queries[head], kept))
        for kept in result.q_proj.weight.detach().view(-1, 8, queries.shape[2])
    ]
    long = rows["output input"].view(-1, 4, size).transpose(1, 2).reshape(-1, 4).numpy()
    removed = [head for head in range(4) if head not in heads]
    numbers = np.linalg.lstsq(long[:, heads], long[:, removed], rcond=None)[0]
    weight = dense.o_proj.weight.detach().double().numpy().reshape(-1, 4, size)
    expected = weight[:, heads] + np.einsum("kr,drh->dkh", numbers, weight[:, removed])
    np.testing.assert_allclose(result.o_proj.weight.detach().numpy(), expected.reshape(len(weight), -1), atol=1e-4)


# Directions of the hidden size (SP3 table 3, TCSP table 5)


def test_coordinates_are_those_of_most_energy(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = make_checkpoint()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    rows: list[torch.Tensor] = []
    norms = [norm for layer in model.model.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    for norm in [*norms, model.model.norm]:
        norm.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].flatten(0, -2).double()))
    with torch.inference_mode():
        model(TOKEN_IDS)
    stacked = torch.cat([row / row.square().mean(1, keepdim=True).sqrt() for row in rows])
    subspaces = find_subspaces(
        open_model(str(folder), tmp_path), Text(TOKEN_IDS, "text"), (0,) * 5, cpu_machine(tmp_path), kind="coordinates"
    )
    basis = subspaces.basis(0, 6)
    assert set(basis.abs().argmax(0).tolist()) == set(stacked.square().sum(0).topk(6).indices.tolist())
    assert torch.equal(basis.sum(0), torch.ones(6, dtype=torch.float64))
    assert torch.equal(basis.T @ basis, torch.eye(6, dtype=torch.float64))


def test_random_directions_are_orthonormal_and_of_the_seed(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    model, text = open_model(str(make_checkpoint()), tmp_path), Text(TOKEN_IDS, "text")

    def basis(seed: int) -> torch.Tensor:
        return find_subspaces(model, text, (0,) * 5, cpu_machine(tmp_path), kind="random", seed=seed).basis(0, 32)

    first = basis(3)
    torch.testing.assert_close(first.T @ first, torch.eye(32, dtype=torch.float64))
    assert torch.equal(first, basis(3))
    assert not torch.allclose(first, basis(4))


@pytest.mark.parametrize("hidden", ["pca", "coordinates", "random"])
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_hidden_size_of_full_width_only_rotates(
    hidden: str, family: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    checkpoint = make_checkpoint(family=family)
    options = {"recipe": "tcsp", "form": "per-layer", "hidden": hidden, "hidden_size": 32}
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
    """SP3 equation 10: the stored rows of `v_proj` are those of the values' principal directions."""
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
