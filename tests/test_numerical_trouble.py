"""Degenerate activations: every selector, correction and pivoting ends in finite weights."""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
from factories import MakeConfig, build_model
from safetensors.torch import load_file

from oneshot.architecture import ModelShape
from oneshot.errors import CheckpointError
from oneshot.families import LLAMA
from oneshot.linalg.elimination import eliminate
from oneshot.linalg.psd import RidgeFactor
from oneshot.method import Correction, Pivoting, SelectorName, Sketch
from oneshot.pipeline import compress
from oneshot.planning import Grid, Profile, profiled_damages

WIDTH = 64
MASSIVE_TOKENS = slice(60, 90)


def no_neurons(model: Any) -> None:
    """Make every neuron and every head dead."""
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.zero_()
        layer.self_attn.v_proj.weight.zero_()


def no_stream(model: Any) -> None:
    """Make the hidden states zero everywhere."""
    model.model.embed_tokens.weight.zero_()


def few_neurons(model: Any) -> None:
    """Make more neurons dead than are removed."""
    for layer in model.model.layers:
        layer.mlp.up_proj.weight[: 3 * WIDTH // 4] = 0


def duplicates(model: Any) -> None:
    """Make every neuron a pair of duplicates."""
    for layer in model.model.layers:
        for linear in (layer.mlp.up_proj, layer.mlp.gate_proj):
            linear.weight[WIDTH // 2 :] = linear.weight[: WIDTH // 2]


def one_neuron(model: Any) -> None:
    """Make all neurons equal: a Gram of rank 1."""
    for layer in model.model.layers:
        for linear in (layer.mlp.up_proj, layer.mlp.gate_proj):
            linear.weight[:] = linear.weight[:1]


def massive_tokens(model: Any) -> None:
    """Make some tokens' embeddings a million times larger."""
    model.model.embed_tokens.weight[MASSIVE_TOKENS] *= 1e6


def massive_neuron(model: Any) -> None:
    """Make one neuron ten thousand times larger."""
    for layer in model.model.layers:
        layer.mlp.up_proj.weight[5] *= 1e4


def few_tokens(model: Any) -> None:
    """Change nothing; the run reads 16 tokens for 64 columns."""


TROUBLES: tuple[Callable[[Any], None], ...] = (
    no_neurons,
    no_stream,
    few_neurons,
    duplicates,
    one_neuron,
    massive_tokens,
    massive_neuron,
    few_tokens,
)

METHODS: list[dict[str, Any]] = [
    *(
        {"ffn": selector, "heads": selector, "correction": "two-stream"}
        for selector in get_args(SelectorName)
        if selector != "none"
    ),
    *({"ffn": "id", "heads": "obs", "correction": correction} for correction in get_args(Correction)),
    *(
        {"ffn": "id", "correction": "same-layer", "pivoting": pivoting, "sketch": sketch}
        | ({"pivot_group_size": 16} if pivoting in ("grouped", "tournament") else {})
        for pivoting in get_args(Pivoting)
        for sketch in get_args(Sketch)
        if not (pivoting == "qr" and sketch == "none")
    ),
    {"ffn": "id", "correction": "same-layer", "pivoting": "qr", "sketch": "count", "sketch_size": 1},
    {"recipe": "tcsp"},
    {"recipe": "tcsp", "correction": "two-stream", "token_weighting": "raw"},
]


@pytest.fixture(scope="module")
def troubled(save_model: Callable[..., Path]) -> Callable[[Callable[[Any], None]], Path]:
    """Return `troubled(trouble)`, which makes a checkpoint with a trouble once."""
    made: dict[str, Path] = {}

    def make(trouble: Callable[[Any], None]) -> Path:
        if trouble.__name__ not in made:
            model = build_model(seed=1)
            with torch.no_grad():
                trouble(model)
            made[trouble.__name__] = save_model(model)
        return made[trouble.__name__]

    return make


CASES = [
    pytest.param(method, trouble, id="-".join([*map(str, method.values()), trouble.__name__]))
    for method in METHODS
    for trouble in TROUBLES
    if "pivoting" not in method or trouble in (no_neurons, no_stream, one_neuron, few_tokens)
]


@pytest.mark.parametrize(("method", "trouble"), CASES)
def test_every_method_ends_in_finite_weights(
    method: dict[str, Any],
    trouble: Callable[[Any], None],
    troubled: Callable[[Callable[[Any], None]], Path],
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without damping, which would hide a singular system."""
    monkeypatch.setattr("oneshot.job.result.write_report", lambda *_, **__: None)  # it takes half of the time
    few = trouble is few_tokens
    solves = method.get("correction") in ("same-layer", "two-stream")
    config = make_config(
        troubled(trouble),
        **({"damping": 0.0} if solves else {}),
        sparsity=0.25 if "heads" in method else 0.1,
        num_sequences=1 if few else 8,
        sequence_length=16,
        **method,
    )
    report = compress(config)
    for path in Path(config.output).glob("*.safetensors"):
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(path).values())
    json.dumps(report.to_dict(), allow_nan=False)
    errors = [sublayer.predicted_error for layer in report.layers for sublayer in layer.sublayers]
    assert all(error is None or 0 <= error < 10 for error in errors)


@pytest.mark.parametrize("method", [{"ffn": "id", "heads": "id"}, {"ffn": "obs", "heads": "obs"}])
def test_dead_neurons_are_reported_once_a_sublayer(
    method: dict[str, Any],
    troubled: Callable[[Callable[[Any], None]], Path],
    make_config: MakeConfig,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        compress(make_config(troubled(no_neurons), sparsity=0.25, **method))
    messages = [record.getMessage() for record in caplog.records if "are zero on the whole" in record.getMessage()]
    assert [message.split(":")[0] for message in messages] == [
        "Layer 0, heads",
        "Layer 0, ffn",
        "Layer 1, heads",
        "Layer 1, ffn",
    ]
    assert "64 of 64 columns" in messages[1]


def test_dead_neurons_that_are_all_removed_are_not_reported(
    save_model: Callable[..., Path], make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """They are the removed neurons, so the rest computes the same."""
    model = build_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight[3:6] = 0
    report = compress(make_config(save_model(model), sparsity=0.1, ffn="id", correction="same-layer"))
    assert "are zero on the whole" not in caplog.text
    assert report.layers[0].sublayers[0].kept_size < WIDTH - 3


def test_a_singular_gram_without_damping_is_reported(
    troubled: Callable[[Callable[[Any], None]], Path], make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    compress(make_config(troubled(one_neuron), damping=0.0, sparsity=0.1, ffn="id", correction="same-layer"))
    assert "Cholesky of a" in caplog.text or "singular to rounding" in caplog.text


def test_values_beyond_the_saved_dtype_are_clamped_and_reported(
    save_model: Callable[..., Path], make_config: MakeConfig
) -> None:
    model = build_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[7, 3] = 1e6
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = -1e5
    config = make_config(save_model(model), save_dtype="float16")
    report = compress(config)
    saved: dict[str, torch.Tensor] = {}
    for path in Path(config.output).glob("*.safetensors"):
        saved |= load_file(path)
    embedding = LLAMA.stack.embedding
    queries = f"{LLAMA.stack.layer_prefix(1)}{LLAMA.stack.attention.q}.weight"
    assert all(bool(torch.isfinite(tensor).all()) for tensor in saved.values())
    assert float(saved[embedding][7, 3]) == 65504
    assert float(saved[queries][0, 0]) == -65504
    assert any(f"{embedding} has 1 values beyond" in warning for warning in report.warnings)
    assert any(f"{queries} has 1 values beyond" in warning for warning in report.layers[1].warnings)


@pytest.mark.parametrize("gram", [np.zeros((5, 5)), -1e-20 * np.eye(5), np.diag([0.0, 0, 3, 2, 0]), np.ones((5, 5))])
@pytest.mark.parametrize("damping", [0.0, 1e-2])
def test_singular_systems_have_the_pseudo_inverse(gram: np.ndarray, damping: float) -> None:
    """NumPy's, of the ridged matrix; values that are not positive count as zero. The condition number is finite."""
    factor = RidgeFactor(torch.from_numpy(gram), damping)
    ridged = gram + damping * max(0.0, np.diag(gram).mean()) * np.eye(5)
    expected = np.linalg.pinv(ridged, hermitian=True) if ridged.max() > 0 else np.zeros((5, 5))
    solved = factor.solve(torch.eye(5, dtype=torch.float64)).numpy()
    np.testing.assert_allclose(solved, expected, atol=1e-10)
    assert np.isfinite(factor.condition_number)


@pytest.mark.parametrize("block_size", [1, 2])
def test_elimination_without_activations_keeps_the_largest_weights(block_size: int) -> None:
    weight = torch.tensor([[1.0, 1, 5, 5, 3, 3, 4, 4]])
    kept = eliminate(torch.zeros(8, 8), weight, kept=4 // block_size, block_size=block_size, damping=1e-2)
    assert kept.tolist() == ([2, 3, 6, 7] if block_size == 1 else [1, 3])


@pytest.mark.parametrize("form", ["stock", "per-layer"])
def test_errors_beyond_float32_are_told_with_the_largest_weight(form: str, save_model: Any, make_config: Any) -> None:
    model = build_model()
    model.model.layers[1].mlp.down_proj.weight.data *= 1e19
    report = compress(make_config(save_model(model), form=form, embedding="none", sparsity=0.1))
    errors = [one.predicted_error for layer in report.layers for one in layer.sublayers]
    assert any(error is not None and not math.isfinite(error) for error in errors)
    [told] = [warning for warning in report.layers[1].warnings if "beyond float32" in warning]
    assert told.endswith("e+18 in mlp.down_proj.weight.")


def test_a_profile_with_nan_plans_nothing() -> None:
    shape = ModelShape(2, 8, 12, 4, 2, 4)
    profile = SimpleNamespace(
        block_influence=torch.ones(2, dtype=torch.float64),
        ffn_errors=torch.tensor([[1.0] * 13, [math.nan] * 13]),
        head_errors=torch.ones(2, 3),
        layer_divergence=torch.ones(2),
    )
    with pytest.raises(CheckpointError, match="layer 1 the profile of ffn is not a number"):
        profiled_damages(cast(Profile, profile), "error", Grid(LLAMA, shape))
