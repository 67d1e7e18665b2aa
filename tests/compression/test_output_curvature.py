"""Output curvature in ranks, neurons and prices: against brute force over tokens, and SciPy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from factories import MakeCheckpoint, MakeConfig
from families.cases import CASES
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from oneshot.compression.curvature import column_costs, mean_cost, root_of, shrunk
from oneshot.compression.ranks import Inputs, Ranked
from oneshot.errors import ConfigError, OneshotError
from oneshot.linalg.low_rank import ROOT_DAMPING
from oneshot.pipeline import compress, predict
from oneshot.selection import SELECTORS, Evidence
from oneshot.selection.evidence import neuron_gram

Rows = np.ndarray[Any, Any]


def positive(size: int, generator: np.random.Generator) -> Rows:
    """Return a random positive definite matrix of very different directions."""
    rows = generator.standard_normal((3 * size, size)) * np.logspace(0, -2, size)
    return rows.T @ rows / (3 * size) + 1e-4 * np.eye(size)


@given(seed=st.integers(0, 10**6), rows=st.integers(2, 12), columns=st.integers(2, 9), data=st.data())
def test_ranks_are_the_best_in_a_metric_of_the_outputs(seed: int, rows: int, columns: int, data: st.DataObject) -> None:
    """With square roots of matrices and the singular value decomposition instead of one eigendecomposition."""
    rank, generator = data.draw(st.integers(1, min(rows, columns) - 1)), np.random.default_rng(seed)
    weight, gram, metric = (
        generator.standard_normal((rows, columns)),
        positive(columns, generator),
        positive(rows, generator),
    )
    damped = gram + ROOT_DAMPING * np.trace(gram) / columns * np.eye(columns)
    left, right = (scipy.linalg.sqrtm(matrix).real for matrix in (metric, damped))
    u, singular, vt = scipy.linalg.svd(left @ weight @ right, full_matrices=False)
    best = np.linalg.inv(left) @ (u[:, :rank] * singular[:rank]) @ vt[:rank] @ np.linalg.inv(right)
    linear = Ranked(torch.from_numpy(weight).float(), Inputs(torch.from_numpy(gram)), torch.from_numpy(metric))

    def missed(matrix: np.ndarray) -> float:
        return float(((left @ (weight - matrix) @ right) ** 2).sum())

    energy = (singular**2).sum()
    assert missed(linear.nearest(rank).whole(torch.float32).numpy()) <= missed(best) + 1e-6 * energy
    shares = [(singular[kept:] ** 2).sum() / energy for kept in range(len(singular) + 1)]
    np.testing.assert_allclose(linear.errors().numpy(), shares, rtol=1e-3, atol=1e-6)


@given(seed=st.integers(0, 10**6), size=st.integers(1, 6), width=st.integers(1, 9))
def test_costs_are_sums_over_tokens_and_gradients(seed: int, size: int, width: int) -> None:
    """A change costs half the mean square of its product with every gradient."""
    generator = np.random.default_rng(seed)
    gradients, activations = generator.standard_normal((30, size)), generator.standard_normal((20, width))
    changes, down = generator.standard_normal((5, 4, size)), generator.standard_normal((size, width))
    curvature, weight = torch.from_numpy(gradients.T @ gradients / 30), torch.from_numpy(down)
    expected = ((changes.reshape(-1, size) @ gradients.T) ** 2).mean() / 2
    assert float(mean_cost(torch.from_numpy(changes), curvature)) == pytest.approx(expected)
    of_neurons = gradients @ down  # what a gradient says of every neuron
    np.testing.assert_allclose(column_costs(weight, curvature), (of_neurons**2).mean(0), rtol=1e-9)
    # a neuron for each pair of a token and a gradient
    pairs = np.einsum("tn,gn->tgn", activations, of_neurons).reshape(-1, width) / np.sqrt(30)
    gram = neuron_gram(torch.from_numpy(activations.T @ activations), weight, curvature)
    np.testing.assert_allclose(gram, pairs.T @ pairs, rtol=1e-9, atol=1e-9)
    definite = shrunk(curvature)
    seen = root_of(definite) @ weight.double()
    np.testing.assert_allclose(seen.T @ seen, down.T @ definite.numpy() @ down, rtol=1e-9, atol=1e-12)


def test_the_kept_neurons_are_those_that_the_output_sees() -> None:
    """Two strong neurons write where nothing is read, two weak ones where everything is."""
    activations = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    consumer = torch.tensor([[9.0, 1.0, 8.0, 0.9], [0.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    plain = Evidence(consumer, None, activations.T @ activations, torch.Generator())
    assert SELECTORS["id"].neurons(plain, 2).tolist() == [0, 2]
    curvature = torch.diag(torch.tensor([1e-6, 1.0], dtype=torch.float64))
    weighed = Evidence(consumer, None, activations.T @ activations, torch.Generator(), curvature=curvature)
    assert SELECTORS["id"].neurons(weighed, 2).tolist() == [1, 3]


def test_a_curvature_of_nothing_is_still_a_metric() -> None:
    found = shrunk(torch.zeros(3, 3))
    assert torch.isfinite(root_of(found)).all()
    assert Ranked(torch.eye(3), Inputs(torch.eye(3)), found).errors().isfinite().all()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "cohere"])
def test_a_run_reaches_its_target_with_curvature(
    family: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(**{"family": family} | CASES[family].options | {"tied": True})
    stored = []
    for curvature in ("none", "fisher"):
        options: dict[str, Any] = {"form": "per-layer", "round_to": 4, "curvature": curvature, "overwrite": True}
        config = make_config(folder, **options)
        report = compress(config)
        assert report.sparsity["reached"] == pytest.approx(0.2, abs=0.03)
        assert ("curvature" in report.seconds) == (curvature == "fisher")
        stored.append(load_file(Path(config.output) / "model.safetensors"))
    plain, weighed = stored
    assert any(name not in weighed or not torch.equal(tensor, weighed[name]) for name, tensor in plain.items())
    assert "curvature" in predict(make_config(folder, **options)).seconds


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({}, {}),  # the stock form
        (CASES["deepseek_v3"].options, {}),
        (CASES["bert"].options, {"form": "per-layer"}),  # predicts no tokens
        ({}, {"form": "per-layer", "ffn": "obs"}),
        ({}, {"form": "per-layer", "sketch": "count"}),
        ({}, {"form": "per-layer", "hidden": "pca", "ranks": "none", "embedding": "none"}),
    ],
)
def test_where_it_cannot_be_used_it_is_refused_before_any_work(
    model: dict[str, Any], options: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    with pytest.raises(OneshotError, match="curvature=fisher"):
        predict(make_config(make_checkpoint(**model), curvature="fisher", **options))


def test_an_unknown_curvature_is_refused(make_config: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="curvature"):
        make_config(tmp_path, curvature="hessian")
