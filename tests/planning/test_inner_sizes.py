"""Sizes inside heads as planned kinds: plans, error curves, sensitivities, checkpoints, refusals."""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from factories import (
    MakeCheckpoint,
    MakeConfig,
    assert_cache_changes_nothing,
    build_model,
    problem_of,
    profiled_tokens,
)
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from oneshot.architecture import ModelShape
from oneshot.errors import ConfigError, OneshotError
from oneshot.evaluation import load_model
from oneshot.export.per_layer import PerLayerForm
from oneshot.families import LLAMA
from oneshot.method import DAMPING
from oneshot.pipeline import compress, predict, profile
from oneshot.planning import LayerPlan, Plan, reduced
from oneshot.profiling.probes import MIN_PROBE_ERROR, probe_size

CPU = torch.device("cpu")
IDS = torch.arange(3, 51).view(2, 24)
GROUPS, PER_GROUP, SIZE = 2, 2, 8  # of the tiny checkpoints
PLANNED: dict[str, Any] = {"form": "per-layer", "inner_sizes": "sensitivity"}


@given(seed=st.integers(0, 10**6), share=st.floats(0.02, 0.9), has_heads=st.booleans(), leaves_out=st.booleans())
def test_plans_are_the_best_of_all(seed: int, share: float, has_heads: bool, leaves_out: bool) -> None:
    """Compare with every combination of widths, heads and sizes inside them, on curves that fall with the size."""
    shape = ModelShape(2, 8, 8, 4, 2, 4, vocab_size=80, tied=True)
    generator = np.random.default_rng(seed)

    def curves(size: int) -> np.ndarray:
        falling = np.sort(generator.random((2, size)), axis=1)[:, ::-1].copy()
        falling[:, -1] = 0
        return falling

    ffn, heads, scores, values = curves(9), curves(3), curves(5), curves(5)
    known = {"ffn": ffn, "heads": heads, "layers": np.ones(2), "query_key_size": scores, "value_size": values}
    damages = {name: torch.from_numpy(one) for name, one in known.items()}
    widths, units = [0] * leaves_out + [4, 8], [1, 2] if has_heads else [2]
    attentions = [(unit, *sizes) for unit in units for sizes in itertools.product((2, 4), (2, 3, 4))]
    attentions += [(0, 4, 4)] * leaves_out
    layers = list(itertools.product(widths, attentions))
    stored = [
        3 * 8 * width + 8 * (2 * unit + 2) * (score + value) * (unit > 0) for width, (unit, score, value) in layers
    ]
    stored = [
        # rotary pairs that are chosen are stored; a sublayer that is left out has no norm
        total + 8 * (unit > 0) + 8 * (width > 0) + 2 * score // 2 * (score < 4)
        for total, (width, (unit, score, _)) in zip(stored, layers, strict=True)
    ]
    lost = [
        [ffn[layer, width] + heads[layer, unit] + (scores[layer, score] + values[layer, value]) * (unit > 0)
         for width, (unit, score, value) in layers]
        for layer in range(2)
    ]  # fmt: skip
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
    options: dict[str, Any] = {"heads": "id" if has_heads else "none", "depth": "sublayers" if leaves_out else "none"}
    problem = problem_of(grid, target, damages, round_to=4, inner_sizes="sensitivity", **options)
    try:
        plan = reduced(problem, whole)
    except OneshotError:
        assume(False)  # the best plan has no attention at all
    assert grid.stack(plan).stored_parameters() <= target
    found = sum(
        ffn[layer, kept.intermediate_size]
        + heads[layer, kept.num_attention_heads // 2]
        + (0 if kept.query_key_size is None else scores[layer, kept.query_key_size])
        + (0 if kept.value_size is None else values[layer, kept.value_size])
        for layer, kept in enumerate(plan.layers)
    )
    assert found == pytest.approx(min(fitting), abs=1e-5)


def read_by(model: Any, names: tuple[str, ...], ids: torch.Tensor) -> list[dict[str, np.ndarray]]:
    """Return for every layer what these linears of attention give, and what `o_proj` reads, as rows."""
    seen: list[dict[str, np.ndarray]] = []
    handles = []
    for layer in model.model.layers:
        rows: dict[str, np.ndarray] = {}
        seen.append(rows)
        for name in names:

            def keep(_: Any, inputs: Any, output: Any, name: str = name, rows: dict[str, np.ndarray] = rows) -> None:
                taken = inputs[0] if name == "o_proj" else output
                rows[name] = taken.double().flatten(0, 1).numpy()

            handles.append(getattr(layer.self_attn, name).register_forward_hook(keep))
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def pair_energies(rows: dict[str, np.ndarray], group: int) -> np.ndarray:
    """Return E‖q‖² E‖k‖² of every rotary pair of a KV group, summed over its query heads."""
    half = SIZE // 2
    queries = rows["q_proj"].reshape(-1, GROUPS, PER_GROUP, 2, half)[:, group]
    keys = rows["k_proj"].reshape(-1, GROUPS, 2, half)[:, group]
    return (queries**2).sum((0, 1, 2)) * (keys**2).sum((0, 1))


def value_maps(rows: np.ndarray, weight: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the projection of every head's values `(H·h, H·h)`, and the squared singular values of each group."""
    maps, energies = [], []
    for group in range(GROUPS):
        heads = range(group * PER_GROUP, (group + 1) * PER_GROUP)
        pooled = np.concatenate([rows[:, SIZE * head : SIZE * (head + 1)] for head in heads])
        outputs = np.concatenate([weight[:, SIZE * head : SIZE * (head + 1)] for head in heads])
        left, right = (scipy.linalg.qr(matrix, mode="r")[0][:SIZE] for matrix in (pooled, outputs))
        u, values, _ = np.linalg.svd(left @ right.T)  # of pooled @ outputs.T
        best = np.linalg.solve(left, u[:, :size]) @ u[:, :size].T @ left
        maps += [best] * PER_GROUP
        energies.append(values**2)
    return scipy.linalg.block_diag(*maps), np.stack(energies)


def test_curves_and_sensitivities_are_those_of_the_stock_model(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Compute curves in NumPy from what transformers' linears give, and reduce that model on the probe sequences."""
    config = make_config(make_checkpoint(tied=True, attention_bias=True), output=str(tmp_path / "profile"))
    found, (text, probes) = profile(config), profiled_tokens(config)
    model = AutoModelForCausalLM.from_pretrained(config.checkpoint).eval()
    read = read_by(model, ("q_proj", "k_proj", "o_proj"), text)
    with torch.no_grad():
        dense = model(probes, use_cache=False).logits.double().log_softmax(-1)

    def divergence(name: str, weights: dict[str, torch.Tensor]) -> float:
        own = AutoModelForCausalLM.from_pretrained(config.checkpoint).eval()
        own.get_submodule(name).load_state_dict(own.get_submodule(name).state_dict() | weights)
        with torch.no_grad():
            reduced = own(probes, use_cache=False).logits.double().log_softmax(-1)
        return float((dense.exp() * (dense - reduced)).sum() / probes.numel())

    for layer, rows in enumerate(read):
        energies = np.stack([pair_energies(rows, group) for group in range(GROUPS)])
        falling = np.sort(energies, axis=1)[:, ::-1]
        errors = found.query_key_errors[layer]
        for size in range(SIZE + 1):
            assert float(errors[size]) == pytest.approx(falling[:, size // 2 :].sum() / energies.sum(), rel=1e-4)
        pairs = probe_size(errors[::2])
        gone = torch.from_numpy(energies.argsort(axis=1)[:, : SIZE // 2 - pairs].copy())
        attention = model.model.layers[layer].self_attn
        keys = {name: value.clone() for name, value in attention.k_proj.state_dict().items()}
        for group, own in enumerate(gone):
            for value in keys.values():
                value[torch.cat((own, own + SIZE // 2)) + SIZE * group] = 0
        expected = divergence(f"model.layers.{layer}.self_attn.k_proj", keys) / float(errors[2 * pairs])
        assert float(found.query_key_sensitivity[layer]) == pytest.approx(expected, rel=1e-3)

        heads, weight = rows["o_proj"], attention.o_proj.weight.detach().double().numpy()
        errors = found.value_errors[layer]
        size = probe_size(errors)
        best, energies = value_maps(heads, weight, size)
        for kept in range(SIZE + 1):
            lost = energies[:, kept:].sum() / energies.sum()
            assert float(errors[kept]) == pytest.approx(lost, rel=1e-3, abs=1e-7)
        # least squares inside the subspaces, with a ridge towards W M, in an orthonormal basis of each
        basis = scipy.linalg.orth(best, rcond=1e-6)
        gram = basis.T @ heads.T @ heads @ basis
        ridge = DAMPING * np.trace(gram) / len(gram) * np.eye(len(gram))
        start = basis.T @ best @ weight.T
        solved = np.linalg.solve(gram + ridge, basis.T @ heads.T @ heads @ weight.T + ridge @ start)
        writer = torch.from_numpy((basis @ solved).T.copy()).float()
        expected = divergence(f"model.layers.{layer}.self_attn.o_proj", {"weight": writer}) / float(errors[size])
        assert float(errors[size]) >= MIN_PROBE_ERROR
        assert float(found.value_sensitivity[layer]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_sizes_that_nothing_needs_go_and_nothing_else_changes(
    family: str, save_model: Callable[..., Path], make_config: MakeConfig
) -> None:
    """Give the second layer values of rank 5, and the first one idle coordinates of queries and keys if it can."""
    groups = 4 if family == "opt" else 2
    extra = {"head_dim": SIZE} if family == "qwen3" else {}
    model = build_model(family, layers=3, groups=groups, **extra)
    layers = getattr(model.model, "decoder", model.model).layers
    generator = torch.Generator().manual_seed(0)
    saved = 0
    with torch.no_grad():
        per_head = layers[1].self_attn.v_proj.weight.view(groups, SIZE, 32)
        for group, rows in enumerate(per_head):
            inside = torch.linalg.qr(torch.randn(SIZE, 5, generator=generator))[0]
            per_head[group] = inside @ inside.T @ rows
            if family == "opt":
                layers[1].self_attn.v_proj.bias[SIZE * group : SIZE * (group + 1)] = 0
        saved += 3 * (32 * (4 + groups) + groups * (family == "opt"))
        if family != "qwen3":
            idle = torch.tensor([0, 3, 4, 7]) if family == "llama" else torch.tensor([1, 2, 6])
            for group in range(groups):
                for parameter in layers[0].self_attn.k_proj.parameters():
                    parameter[SIZE * group + idle] = 0
            kept = SIZE - len(idle)
            saved += len(idle) * (32 * (4 + groups) + (4 + groups) * (family == "opt"))
            saved -= groups * kept // 2 * (family == "llama")  # the chosen pairs are stored
    folder = save_model(model)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parameters = predict(make_config(folder, form="per-layer", sparsity=0.0)).stored_parameters["compressed"]
    config = make_config(folder, **PLANNED, sparsity=None, parameters=parameters - saved, correction="same-layer")
    report = compress(config)
    sizes = [(layer["query_key_size"], layer["value_size"]) for layer in report.plan["layers"]]
    assert sizes == [(None if family == "qwen3" else kept, None), (None, 5), (None, None)]
    assert {layer["intermediate_size"] for layer in report.plan["layers"]} == {64}
    assert report.stored_parameters["compressed"] == parameters - saved
    result = load_model(Path(config.output), device=CPU, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(result(IDS).logits, dense(IDS).logits, rtol=1e-3, atol=1e-3)
        assert_cache_changes_nothing(result, 8, input_ids=IDS)


@pytest.mark.parametrize(
    "options",
    [{}, {"heads": "id"}, {"depth": "sublayers"}, {"recipe": "magnitude"}, {"recipe": "flap"}, {"budget": "flops"}],
    ids=str,
)
def test_a_plan_shares_the_target_between_all_kinds(
    options: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(layers=3, tied=True), **PLANNED, **options, sparsity=0.2, round_to=4)
    assert predict(config).stored_parameters["compressed"] > 0
    report = compress(config)
    layers = report.plan["layers"]
    assert len({(layer["query_key_size"], layer["value_size"]) for layer in layers}) > 1
    assert {layer["query_key_size"] for layer in layers} <= {None, 4, 6}
    assert report.sparsity["reached"] == pytest.approx(0.2, abs=0.03)
    assert report.predicted_divergence is not None
    with torch.no_grad():
        assert torch.isfinite(load_model(Path(config.output), device=CPU, dtype=torch.float32)(IDS).logits).all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"form": "stock"}, "needs --form per-layer"),
        ({"budget": "latency"}, "no measured latencies"),
        ({"allocation": "uniform"}, "needs hidden=none and allocation=sensitivity"),
        ({"hidden": "pca"}, "needs hidden=none and allocation=sensitivity"),
        ({"value_size": 4}, "either --set inner_sizes=sensitivity or the sizes"),
    ],
    ids=str,
)
def test_what_is_not_possible_is_refused(
    options: dict[str, Any], sentence: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        compress(make_config(make_checkpoint(), **PLANNED | options))
