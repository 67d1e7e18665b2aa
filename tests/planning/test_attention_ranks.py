"""Ranks of attention's linears as planned kinds: factors, plans, error curves, sensitivities, checkpoints, refusals."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, assert_cache_changes_nothing, build_model, calibration_tokens
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from oneshot import compress
from oneshot.compression.attention_ranks import of_rank, rank_errors
from oneshot.errors import OneshotError
from oneshot.evaluation import load_model
from oneshot.export.per_layer import PerLayerForm, per_layer_shape
from oneshot.families import LLAMA, ModelShape
from oneshot.linalg.low_rank import ROOT_DAMPING
from oneshot.pipeline import predict, profile
from oneshot.planning import Budget, Damages, LayerPlan, Plan
from oneshot.planning.widths import meet_budget
from oneshot.profiling.profiler import RANK_SHARE, probe_size

CPU = torch.device("cpu")
IDS = torch.arange(3, 51).view(2, 24)
GROUPS, PER_GROUP, SIZE = 2, 2, 8  # of the tiny checkpoints
PLANNED: dict[str, Any] = {"form": "per-layer", "attention_ranks": "sensitivity", "embedding": "none"}

Rows = np.ndarray[Any, Any]


def best_of_rank(weight: Rows, gram: Rows, row_weights: Rows) -> tuple[Rows, Rows, Rows]:
    """Return the factors of the singular value decomposition of `diag(w)^½ W H^½`, with `H^½` by eigenvalues."""
    values, vectors = np.linalg.eigh(gram)
    root = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
    left, singular, right = np.linalg.svd(np.sqrt(row_weights)[:, None] * weight @ root, full_matrices=False)
    return left, singular, right @ np.linalg.inv(root)


@given(
    seed=st.integers(0, 10**6), rows=st.integers(2, 12), columns=st.integers(2, 9), equal=st.booleans(), data=st.data()
)
def test_the_factors_are_the_best_of_their_rank(
    seed: int, rows: int, columns: int, equal: bool, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(1, min(rows, columns) - 1))
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    inputs = torch.randn(40, columns, generator=generator, dtype=torch.float64)
    weights = torch.ones(rows) if equal else torch.rand(rows, generator=generator) + 0.1
    gram = inputs.T @ inputs
    found = of_rank(weight, gram, rank, None if equal else weights.double())
    assert sorted(found.order.tolist()) == list(range(rows))
    assert found.read.shape == (rank, columns)
    assert found.others.shape == (rows - rank, rank)
    whole = found.whole()
    torch.testing.assert_close(
        whole[found.order[rank:]], found.others @ whole[found.order[:rank]], rtol=1e-4, atol=1e-4
    )
    scale = weights.double().numpy()
    damped = gram.numpy() + ROOT_DAMPING * np.trace(gram.numpy()) / columns * np.eye(columns)
    left, singular, right = best_of_rank(weight.double().numpy(), damped, scale)
    best = (left[:, :rank] * singular[:rank]) @ right[:rank] / np.sqrt(scale)[:, None]
    np.testing.assert_allclose(whole.numpy(), best, rtol=2e-3, atol=2e-3 * np.abs(best).max())
    errors = rank_errors(weight, gram, None if equal else weights.double()).numpy()
    assert len(errors) == min(rows, columns) + 1
    np.testing.assert_allclose(errors[rank], (singular[rank:] ** 2).sum() / (singular**2).sum(), rtol=1e-6, atol=1e-12)


@given(seed=st.integers(0, 10**6), share=st.floats(0.02, 0.9), has_widths=st.booleans())
def test_plans_are_the_best_of_all(seed: int, share: float, has_widths: bool) -> None:
    """Compare with every combination of widths and ranks, on curves that fall with the size."""
    shape = ModelShape(2, 8, 8, 4, 2, 4, vocab_size=80, tied=True)
    generator = np.random.default_rng(seed)

    def curves(size: int) -> np.ndarray:
        falling = np.sort(generator.random((2, size)), axis=1)[:, ::-1].copy()
        falling[:, -1] = 0
        return falling

    ffn, heads, scores, outputs = curves(9), curves(3), curves(9), curves(9)
    empty = np.empty(0)
    damages = Damages(*map(torch.from_numpy, (ffn, heads, np.ones(2), empty, empty, empty, scores, outputs)))
    widths = [4, 8] if has_widths else [8]
    layers = list(itertools.product(widths, range(2, 9), range(2, 9)))

    def numbers(rows: int, columns: int, rank: int) -> int:
        return rows * columns if rank == 8 else rank * (rows + columns - rank) + rows

    # values and two norms are whole
    stored = [
        3 * 8 * width + numbers(24, 8, score) + 8 * 8 + numbers(8, 16, output) + 16 for width, score, output in layers
    ]
    lost = [
        [ffn[layer, width] + scores[layer, score] + outputs[layer, output] for width, score, output in layers]
        for layer in range(2)
    ]
    outside = 80 * 8 + 8
    target = outside + share * (shape.stack().stored_parameters() - outside)
    fitting = [
        lost[0][first] + lost[1][second]
        for first, second in itertools.product(range(len(layers)), repeat=2)
        if outside + stored[first] + stored[second] <= target
    ]
    assume(fitting)
    model: Any = SimpleNamespace(family=LLAMA, shape=shape)
    grid, whole = PerLayerForm().grid(model), Plan((LayerPlan(8, 4, 2),) * 2, "query-head")
    plan = meet_budget(
        grid,
        whole,
        Budget(target),
        reduce_ffn=True,
        reduce_heads=False,
        round_to=4 if has_widths else 8,
        damages=damages,
        reduce_ranks=True,
    )
    assert grid.stack(plan).stored_parameters() <= target
    found = sum(
        ffn[layer, kept.intermediate_size]
        + (0 if kept.query_key_rank is None else scores[layer, kept.query_key_rank])
        + (0 if kept.output_rank is None else outputs[layer, kept.output_rank])
        for layer, kept in enumerate(plan.layers)
    )
    assert found == pytest.approx(min(fitting), abs=1e-5)


def test_curves_and_sensitivities_are_those_of_the_stock_model(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Compute curves in NumPy from what transformers' linears read, and reduce that model on the probe sequences."""
    config = make_config(make_checkpoint(tied=True, attention_bias=True), output=str(tmp_path / "profile"))
    found, text = profile(config), calibration_tokens(config)
    probes = found.origin.probe_tokens // config.text.sequence_length
    model = AutoModelForCausalLM.from_pretrained(config.checkpoint).eval()
    seen: list[dict[str, Rows]] = []
    for layer in model.model.layers:
        rows: dict[str, Rows] = {}
        seen.append(rows)
        for name in ("q_proj", "k_proj", "o_proj"):

            def keep(_: Any, inputs: Any, output: Any, name: str = name, rows: dict[str, Rows] = rows) -> None:
                rows[name] = output.double().flatten(0, 1).numpy()
                rows["read by " + name] = inputs[0].double().flatten(0, 1).numpy()

            getattr(layer.self_attn, name).register_forward_hook(keep)
    with torch.no_grad():
        model(text[:-probes], use_cache=False)
    rows_of = [dict(rows) for rows in seen]
    with torch.no_grad():
        dense = model(text[-probes:], use_cache=False).logits.double().log_softmax(-1)

    def divergence(layer: int, weights: dict[str, Rows]) -> float:
        own = AutoModelForCausalLM.from_pretrained(config.checkpoint).eval()
        with torch.no_grad():
            for name, weight in weights.items():
                getattr(own.model.layers[layer].self_attn, name).weight.copy_(torch.from_numpy(weight))
            reduced = own(text[-probes:], use_cache=False).logits.double().log_softmax(-1)
        return float((dense.exp() * (dense - reduced)).sum() / text[-probes:].numel())

    half = SIZE // 2
    for layer, rows in enumerate(rows_of):
        attention = model.model.layers[layer].self_attn
        weight = {
            name: getattr(attention, name).weight.detach().double().numpy() for name in ("q_proj", "k_proj", "o_proj")
        }
        queries = (rows["q_proj"] ** 2).sum(0).reshape(GROUPS, PER_GROUP, 2, half).sum(2)
        keys = (rows["k_proj"] ** 2).sum(0).reshape(GROUPS, 2, half).sum(1)
        of_queries = np.tile(keys[:, None, None], (1, PER_GROUP, 2, 1)).ravel()
        of_keys = np.tile(queries.sum(1)[:, None], (1, 2, 1)).ravel()
        cases = (
            (
                found.query_key_rank_errors[layer],
                found.query_key_rank_sensitivity[layer],
                np.concatenate((weight["q_proj"], weight["k_proj"])),
                rows["read by q_proj"],
                np.concatenate((of_queries, of_keys)),
            ),
            (
                found.output_rank_errors[layer],
                found.output_rank_sensitivity[layer],
                weight["o_proj"],
                rows["read by o_proj"],
                np.ones(32),
            ),
        )
        for errors, sensitivity, matrix, inputs, weights in cases:
            gram = inputs.T @ inputs
            gram += ROOT_DAMPING * np.trace(gram) / len(gram) * np.eye(len(gram))
            left, singular, right = best_of_rank(matrix, gram, weights)
            for rank in range(len(errors)):
                expected = (singular[rank:] ** 2).sum() / (singular**2).sum()
                assert float(errors[rank]) == pytest.approx(expected, rel=1e-3, abs=1e-7)
            rank = probe_size(errors, RANK_SHARE)
            reduced = (left[:, :rank] * singular[:rank]) @ right[:rank] / np.sqrt(weights)[:, None]
            split = {"q_proj": reduced[:32], "k_proj": reduced[32:]} if len(reduced) > 32 else {"o_proj": reduced}
            expected = divergence(layer, split) / float(errors[rank])
            assert float(sensitivity) == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_ranks_that_nothing_needs_go_and_nothing_else_changes(
    family: str, save_model: Callable[..., Path], make_config: MakeConfig
) -> None:
    """Give queries and keys of the first layer rank 12, and the output linear of the second rank 10."""
    extra = {"head_dim": SIZE} if family == "qwen3" else {}
    model = build_model(family, layers=3, **extra)
    generator = torch.Generator().manual_seed(0)
    first, second = (model.model.layers[layer].self_attn for layer in range(2))
    with torch.no_grad():
        inside = torch.linalg.qr(torch.randn(32, 12, generator=generator))[0]
        for linear in (first.q_proj, first.k_proj):
            linear.weight.copy_(linear.weight @ inside @ inside.T)
        inside = torch.linalg.qr(torch.randn(32, 10, generator=generator))[0]
        second.o_proj.weight.copy_(inside @ inside.T @ second.o_proj.weight)
    saved = 48 * 32 - 12 * (48 + 32 - 12) - 48 + 32 * 32 - 10 * (32 + 32 - 10) - 32
    folder = save_model(model)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parameters = predict(make_config(folder, form="per-layer", sparsity=0.0)).stored_parameters["compressed"]
    config = make_config(folder, **PLANNED, sparsity=None, parameters=parameters - saved, up_steps=0)
    report = compress(config)
    ranks = [(layer["query_key_rank"], layer["output_rank"]) for layer in report.plan["layers"]]
    assert ranks == [(12, None), (None, 10), (None, None)]
    assert {layer["intermediate_size"] for layer in report.plan["layers"]} == {64}
    assert report.stored_parameters["compressed"] == parameters - saved
    result = load_model(Path(config.output), device=CPU, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(result(IDS).logits, dense(IDS).logits, rtol=1e-3, atol=1e-3)
        assert_cache_changes_nothing(result, 8, input_ids=IDS)


@pytest.mark.parametrize(
    "options",
    [{}, {"recipe": "magnitude"}, {"correction": "same-layer"}, {"budget": "flops"}, {"depth": "sensitivity"}],
)
def test_a_plan_shares_the_target_between_all_kinds(
    options: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(layers=3, tied=True), **PLANNED, **options, sparsity=0.2, round_to=4)
    assert predict(config).stored_parameters["compressed"] > 0
    report = compress(config)
    layers = report.plan["layers"]
    assert len({(layer["query_key_rank"], layer["output_rank"]) for layer in layers}) > 1
    assert report.sparsity["reached"] == pytest.approx(0.2, abs=0.03)
    with torch.no_grad():
        assert torch.isfinite(load_model(Path(config.output), device=CPU, dtype=torch.float32)(IDS).logits).all()


def test_the_stored_numbers_are_those_of_the_plan(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint(tied=True, dtype=torch.bfloat16), **PLANNED, sparsity=0.3, round_to=4)
    report = compress(config)
    stored = load_file(Path(config.output) / "model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == report.stored_parameters["compressed"]
    assert {tensor.dtype for name, tensor in stored.items() if not name.endswith("columns")} == {torch.bfloat16}
    assert any(name.endswith("qk_proj.read.weight") for name in stored)
    assert any(name.endswith("o_proj.map.columns") for name in stored)


def test_a_config_without_ranks_is_of_whole_linears(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint(), form="per-layer", attention_ranks="none")
    report = compress(config)
    stated = json.loads((Path(config.output) / "config.json").read_text())
    for layer in stated["layers"]:
        assert layer.pop("query_key_rank") == layer.pop("output_rank") == 0
    assert per_layer_shape(stated).stored_parameters() == report.stored_parameters["compressed"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"form": "stock"}, "needs --form per-layer"),
        ({"allocation": "uniform"}, "needs allocation=sensitivity and whole heads"),
        ({"heads": "id"}, "needs allocation=sensitivity and whole heads"),
        ({"inner_sizes": "sensitivity"}, "needs allocation=sensitivity and whole heads"),
        ({"depth": "sublayers"}, "needs allocation=sensitivity and whole heads"),
    ],
    ids=str,
)
def test_what_cannot_have_ranks_is_refused(
    options: dict[str, Any], sentence: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    with pytest.raises(OneshotError, match=sentence):
        compress(make_config(make_checkpoint(), **PLANNED | options))


@pytest.mark.parametrize(
    "options",
    [
        {"form": "stock"},
        {"heads": "id"},
        {"depth": "sublayers"},
        {"value_size": 4},
    ],
    ids=str,
)
def test_the_default_has_ranks_only_where_they_are_possible(
    options: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(layers=3, tied=True), **{"form": "per-layer", "sparsity": 0.2} | options)
    report = compress(config)
    assert all(layer["query_key_rank"] is layer["output_rank"] is None for layer in report.plan["layers"])
