"""Ranks of linears as planned kinds: factors, plans, error curves, sensitivities, checkpoints, refusals."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from factories import (
    MakeCheckpoint,
    MakeConfig,
    assert_cache_changes_nothing,
    build_model,
    calibration_tokens,
    problem_of,
    profiled_tokens,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from oneshot.architecture import RANKED_KINDS, ModelShape, RankedKind
from oneshot.architecture.stated_shapes import per_layer_shape
from oneshot.compression.ranks import FACTORS_EVERY, Inputs, Ranked
from oneshot.compression.statistics import shrinkage_of
from oneshot.errors import OneshotError
from oneshot.evaluation import load_model
from oneshot.export.per_layer import PerLayerForm
from oneshot.families import LLAMA
from oneshot.linalg.low_rank import ROOT_DAMPING
from oneshot.pipeline import compress, predict, profile
from oneshot.planning import Damages, LayerPlan, Plan, reduced
from oneshot.profiling.layer_profile import RANK_SHARE
from oneshot.profiling.probes import probe_size
from oneshot.report.terminal import print_report

CPU = torch.device("cpu")
IDS = torch.arange(3, 51).view(2, 24)
GROUPS, PER_GROUP, SIZE = 2, 2, 8  # of the tiny checkpoints
PLANNED: dict[str, Any] = {"form": "per-layer", "ranks": "sensitivity", "embedding": "none"}

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
    linear = Ranked(weight, Inputs(gram), weights)
    found = linear.nearest(rank)
    whole = found.whole(torch.float64).float()
    kept, others, order = found.columns()
    assert sorted(order.tolist()) == list(range(columns))
    assert kept.shape == (rows, rank)
    assert others.shape == (columns - rank, rank)
    largest = float(whole.abs().max())
    torch.testing.assert_close(whole[:, order[:rank]], kept.float(), rtol=1e-3, atol=1e-4 * largest)
    torch.testing.assert_close(whole[:, order[rank:]], (kept @ others.T).float(), rtol=1e-3, atol=1e-4 * largest)
    scale = weights.double().numpy()
    damped = gram.numpy() + ROOT_DAMPING * np.trace(gram.numpy()) / columns * np.eye(columns)
    left, singular, right = best_of_rank(weight.double().numpy(), damped, scale)
    best = (left[:, :rank] * singular[:rank]) @ right[:rank] / np.sqrt(scale)[:, None]
    np.testing.assert_allclose(whole.numpy(), best, rtol=2e-3, atol=2e-3 * np.abs(best).max())
    errors = linear.errors().numpy()
    assert len(errors) == min(rows, columns) + 1
    share = (singular[rank:] ** 2).sum() / (singular**2).sum()  # of float32 products
    np.testing.assert_allclose(errors[rank], share, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_ranks_from_few_tokens_for_an_input_are_also_right_on_text_of_another_kind(tokens: int) -> None:
    """They lose less there by the shrunk Gram than by the sums as they are, or by squares alone."""
    size = 48
    errors = dict.fromkeys((0.0, shrinkage_of(size, tokens * size), 1.0), 0.0)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        shared = torch.eye(size) + 0.15 * drawn(size, size)
        rows, others = (drawn(count, size) @ (shared + 0.1 * drawn(size, size)) for count in (tokens * size, 50 * size))
        weight = drawn(size, size)
        for share in errors:
            linear = Ranked(weight, Inputs(rows.T @ rows, share), torch.ones(size))
            missed = weight - linear.nearest(size // 2).whole(torch.float32)
            errors[share] += float((others @ missed.T).square().sum() / (others @ weight.T).square().sum())
    as_they_are, shrunk, squares = errors.values()
    assert shrunk < min(as_they_are, squares)


@given(
    seed=st.integers(0, 10**6),
    share=st.floats(0.02, 0.9),
    kinds=st.sampled_from([("query_key", "output"), ("gate", "up"), ("output", "gate")]),
)
@settings(max_examples=20)
def test_plans_are_the_best_of_all(seed: int, share: float, kinds: tuple[RankedKind, RankedKind]) -> None:
    """Compare with every combination of even widths and ranks, on curves that fall with the size."""
    shape = ModelShape(2, 8, 12, 4, 2, 4, vocab_size=80, tied=True)
    generator = np.random.default_rng(seed)

    def curves(*sizes: int) -> np.ndarray[Any, Any]:
        falling = np.sort(generator.random((2, *sizes)), axis=-1)[..., ::-1].copy()
        falling[..., -1] = 0
        return falling

    ffn, heads, ranks = curves(13), curves(3), curves(4, 9)
    damages: Damages = {"ffn": torch.from_numpy(ffn), "heads": torch.from_numpy(heads), "layers": torch.ones(2)}
    damages |= {f"{kind}_rank": torch.from_numpy(ranks[:, RANKED_KINDS.index(kind)]) for kind in kinds}

    def numbers(rows: int, columns: int, rank: int) -> int:
        return rows * columns if rank == 8 else rank * (rows + columns - rank) + columns

    options = []
    for width in range(2, 13, 2):
        for own in itertools.product(range(2, 9, 2), repeat=2):
            of_kinds = dict(zip(kinds, own, strict=True))
            query_key, output, gate, up = (of_kinds.get(kind, 8) for kind in RANKED_KINDS)
            stored = numbers(24, 8, query_key) + numbers(8, 16, output) + 8 * 8  # values are whole
            stored += numbers(width, 8, gate) + numbers(width, 8, up) + 8 * width + 16
            options.append((width, (query_key, output, gate, up), stored))
    lost = [
        [
            ffn[layer, width] + sum(ranks[layer, kind, rank] for kind, rank in enumerate(own))
            for width, own, _ in options
        ]
        for layer in range(2)
    ]
    outside = 80 * 8 + 8
    target = outside + share * (shape.stack().stored_parameters() - outside)
    fitting = [
        lost[0][first] + lost[1][second]
        for first, second in itertools.product(range(len(options)), repeat=2)
        if outside + options[first][2] + options[second][2] <= target
    ]
    assume(fitting)
    model: Any = SimpleNamespace(family=LLAMA, shape=shape)
    grid, whole = PerLayerForm().grid(model), Plan((LayerPlan(12, 4, 2),) * 2, "query-head")
    plan = reduced(problem_of(grid, target, damages, round_to=2, ranks="sensitivity"), whole)
    assert grid.stack(plan).stored_parameters() <= target
    found = sum(
        ffn[layer, kept.intermediate_size]
        + sum(ranks[layer, RANKED_KINDS.index(kind), rank] for kind, rank in kept.ranks.items())
        for layer, kept in enumerate(plan.layers)
    )
    assert found == pytest.approx(min(fitting), abs=1e-5)


LINEARS = {
    "query_key": ("self_attn.q_proj", "self_attn.k_proj"),
    "output": ("self_attn.o_proj",),
    "gate": ("mlp.gate_proj",),
    "up": ("mlp.up_proj",),
}


def test_curves_and_sensitivities_are_those_of_the_stock_model(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Compute curves in NumPy from what transformers' linears read, and reduce that model on the probe sequences."""
    config = make_config(make_checkpoint(tied=True, attention_bias=True), output=str(tmp_path / "profile"))
    found, (text, probes) = profile(config), profiled_tokens(config)
    model = AutoModelForCausalLM.from_pretrained(config.checkpoint).eval()
    seen: dict[str, tuple[Rows, Rows]] = {}

    def watch(name: str) -> None:
        def keep(_: Any, inputs: Any, output: Any) -> None:
            seen[name] = inputs[0].double().flatten(0, 1).numpy(), output.double().flatten(0, 1).numpy()

        model.get_submodule(name).register_forward_hook(keep)

    for layer in range(len(model.model.layers)):
        for linears in (*LINEARS.values(), ("mlp.down_proj",)):
            for linear in linears:
                watch(f"model.layers.{layer}.{linear}")
    with torch.no_grad():
        model(text, use_cache=False)
        statistics = dict(seen)
        model(probes, use_cache=False)
    probed, half = dict(seen), SIZE // 2
    for layer in range(len(model.model.layers)):
        prefix = f"model.layers.{layer}."
        read = {linear: statistics[prefix + linear] for linears in LINEARS.values() for linear in linears}
        gates, ups = (read[f"mlp.{name}_proj"][1][::FACTORS_EVERY] for name in ("gate", "up"))
        queries = (read["self_attn.q_proj"][1] ** 2).sum(0).reshape(GROUPS, PER_GROUP, 2, half).sum(2)
        keys = (read["self_attn.k_proj"][1] ** 2).sum(0).reshape(GROUPS, 2, half).sum(1)
        down = (model.get_submodule(prefix + "mlp.down_proj").weight.detach().double().numpy() ** 2).sum(0)
        of_queries = np.tile(keys[:, None, None], (1, PER_GROUP, 2, 1)).ravel()
        of_keys = np.tile(queries.sum(1)[:, None], (1, 2, 1)).ravel()
        row_weights = {
            "query_key": np.concatenate((of_queries, of_keys)),
            "output": np.ones(32),
            "gate": (ups**2).sum(0) * down,
            "up": ((gates / (1 + np.exp(-gates))) ** 2).sum(0) * down,
        }
        for number, kind in enumerate(RANKED_KINDS):
            weights = [
                model.get_submodule(prefix + linear).weight.detach().double().numpy() for linear in LINEARS[kind]
            ]
            inputs = read[LINEARS[kind][0]][0]
            gram = inputs.T @ inputs
            gram += ROOT_DAMPING * np.trace(gram) / len(gram) * np.eye(len(gram))
            left, singular, right = best_of_rank(np.concatenate(weights), gram, row_weights[kind])
            errors = found.rank_errors[layer, number].numpy()
            assert errors[-1] == 0
            shares = [(singular[rank:] ** 2).sum() / (singular**2).sum() for rank in range(len(errors))]
            np.testing.assert_allclose(errors / errors[0], shares, rtol=1e-3, atol=1e-7)
            # at one rank they are what the output of the sublayer loses on the probe sequences
            rank = probe_size(torch.tensor(shares), RANK_SHARE)
            reduced = (left[:, :rank] * singular[:rank]) @ right[:rank] / np.sqrt(row_weights[kind])[:, None]
            own = AutoModelForCausalLM.from_pretrained(config.checkpoint).eval()
            parts = np.split(reduced, np.cumsum([len(weight) for weight in weights])[:-1])
            writer = prefix + ("self_attn.o_proj" if number < 2 else "mlp.down_proj")
            outputs: list[Rows] = []
            own.get_submodule(writer).register_forward_hook(
                lambda _, inputs, output, outputs=outputs: outputs.append(output.double().flatten(0, 1).numpy())
            )
            with torch.no_grad():
                for linear, part in zip(LINEARS[kind], parts, strict=True):
                    own.get_submodule(prefix + linear).weight.copy_(torch.from_numpy(part))
                own(probes, use_cache=False)
            [output] = outputs
            lost = ((output - probed[writer][1]) ** 2).sum(1).mean()
            assert errors[rank] == pytest.approx(lost, rel=1e-2)
        assert float(found.stream_sensitivity[layer]) > 0


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_ranks_that_nothing_needs_go_and_nothing_else_changes(
    family: str, save_model: Callable[..., Path], make_config: MakeConfig
) -> None:
    """Give two linears of the first layer and two of the second low rank."""
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
        for layer, name, rank in ((0, "up_proj", 16), (1, "gate_proj", 18)):
            linear = getattr(model.model.layers[layer].mlp, name)
            inside = torch.linalg.qr(torch.randn(32, rank, generator=generator))[0]
            linear.weight.copy_(linear.weight @ inside @ inside.T)
    saved = sum(rows * 32 - rank * (rows + 32 - rank) - 32 for rows, rank in ((48, 12), (32, 10), (64, 16), (64, 18)))
    folder = save_model(model)
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parameters = predict(make_config(folder, form="per-layer", sparsity=0.0)).stored_parameters["compressed"]
    config = make_config(folder, **PLANNED, sparsity=None, parameters=parameters - saved, up_steps=0)
    report = compress(config)
    ranks = [[layer[f"{kind}_rank"] for kind in RANKED_KINDS] for layer in report.plan["layers"]]
    assert ranks == [[12, None, None, 16], [None, 10, 18, None], [None] * 4]
    assert {layer["intermediate_size"] for layer in report.plan["layers"]} == {64}
    assert report.stored_parameters["compressed"] == parameters - saved
    result = load_model(Path(config.output), device=CPU, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(result(IDS).logits, dense(IDS).logits, rtol=1e-3, atol=1e-3)
        assert_cache_changes_nothing(result, 8, input_ids=IDS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"recipe": "magnitude"},
        {"correction": "same-layer"},
        {"up_steps": 2},
        {"budget": "flops"},
        {"depth": "sensitivity"},
    ],
)
def test_a_plan_shares_the_target_between_all_kinds(
    options: dict[str, Any], make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(layers=3, tied=True), **PLANNED, **options, sparsity=0.2, round_to=4)
    assert predict(config).stored_parameters["compressed"] > 0
    report = compress(config)
    layers = report.plan["layers"]
    assert len({tuple(layer[f"{kind}_rank"] for kind in RANKED_KINDS) for layer in layers}) > 1
    assert report.sparsity["reached"] == pytest.approx(0.2, abs=0.03)
    with torch.no_grad():
        assert torch.isfinite(load_model(Path(config.output), device=CPU, dtype=torch.float32)(IDS).logits).all()


def test_the_stored_numbers_are_those_of_the_plan(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint(tied=True, dtype=torch.bfloat16), **PLANNED, sparsity=0.3, round_to=4)
    report = compress(config)
    stored = load_file(Path(config.output) / "model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == report.stored_parameters["compressed"]
    assert {tensor.dtype for name, tensor in stored.items() if not name.endswith("columns")} == {torch.bfloat16}
    linears = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")
    found = 0
    for number, layer in enumerate(report.plan["layers"]):
        for kind, linear in zip(RANKED_KINDS, linears, strict=True):
            rank, prefix = layer[f"{kind}_rank"], f"model.layers.{number}."
            read = {"query_key": "self_attn.qk", "output": "self_attn.o", "gate": "mlp.gate", "up": "mlp.up"}[kind]
            assert (f"{prefix}{read}_read.weight" in stored) == (rank is not None)
            found += rank is not None
            assert stored[f"{prefix}{linear}.weight"].shape[1] == (rank or 32)
    assert found > 1


@pytest.mark.parametrize(("num_sequences", "chance"), [(4, 5 * (1 - 4 / 16) / (5 + 4)), (16, 0.2)])
def test_a_rank_is_the_best_by_a_shrunk_gram(
    num_sequences: int, chance: float, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Compare the first queries and keys with NumPy, of 4 tokens for each of 32 inputs and of 16."""
    config = make_config(
        make_checkpoint(tied=True), **PLANNED, curvature="none", sparsity=0.3, round_to=4, num_sequences=num_sequences
    )
    compress(config)
    dense = AutoModelForCausalLM.from_pretrained(config.checkpoint).eval()
    attention, prefix, inputs = dense.model.layers[0].self_attn, "model.layers.0.self_attn.", list[Rows]()
    attention.q_proj.register_forward_hook(lambda _, read, __: inputs.append(read[0].double().flatten(0, 1).numpy()))
    with torch.no_grad():
        dense(calibration_tokens(config), use_cache=False)
    [rows] = inputs
    assert len(rows) == num_sequences * 32
    weight = torch.cat([attention.q_proj.weight, attention.k_proj.weight]).detach().double().numpy()
    queries, keys = np.split((rows @ weight.T) ** 2, [GROUPS * PER_GROUP * SIZE], axis=1)
    of_queries = queries.sum(0).reshape(GROUPS, PER_GROUP, 2, SIZE // 2).sum((1, 2))
    of_keys = keys.sum(0).reshape(GROUPS, 2, SIZE // 2).sum(1)
    row_weights = np.concatenate(
        (np.tile(of_keys[:, None, None], (1, PER_GROUP, 2, 1)).ravel(), np.tile(of_queries[:, None], (1, 2, 1)).ravel())
    )
    gram = rows.T @ rows
    gram += chance * (np.diag(gram.diagonal()) - gram)
    gram += ROOT_DAMPING * np.trace(gram) / len(gram) * np.eye(len(gram))
    stored = load_file(Path(config.output) / "model.safetensors")
    order, others = stored[f"{prefix}qk_read.columns"], stored[f"{prefix}qk_read.weight"].double()
    columns = torch.cat([stored[f"{prefix}{name}_proj.weight"] for name in "qk"]).double()
    rank, found = columns.shape[1], np.empty_like(weight)
    found[:, order.numpy()] = torch.cat((columns, columns @ others.T), 1).numpy()
    left, singular, right = best_of_rank(weight, gram, row_weights)
    best = (left[:, :rank] * singular[:rank]) @ right[:rank] / np.sqrt(row_weights)[:, None]
    np.testing.assert_allclose(found, best, rtol=1e-2, atol=1e-3 * np.abs(best).max())


def test_the_terminal_counts_them(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    report = compress(make_config(make_checkpoint(tied=True), **PLANNED, sparsity=0.3, round_to=4))
    count = sum(layer["query_key_rank"] is not None for layer in report.plan["layers"])
    print_report(report)
    assert f"linears of low rank: query and key in {count}" in capsys.readouterr().out


def test_a_config_without_ranks_is_of_whole_linears(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint(), form="per-layer", ranks="none")
    report = compress(config)
    stated = json.loads((Path(config.output) / "config.json").read_text())
    for layer in stated["layers"]:
        assert [layer.pop(f"{kind}_rank") for kind in RANKED_KINDS] == [0] * 4
    assert per_layer_shape(stated).stored_parameters() == report.stored_parameters["compressed"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"form": "stock"}, "needs --form per-layer"),
        ({"allocation": "uniform"}, "needs a selector for ffn, allocation=sensitivity, whole heads"),
        ({"heads": "id"}, "needs a selector for ffn, allocation=sensitivity, whole heads"),
        ({"inner_sizes": "sensitivity"}, "needs a selector for ffn, allocation=sensitivity, whole heads"),
        ({"depth": "sublayers"}, "needs a selector for ffn, allocation=sensitivity, whole heads"),
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
    assert all(layer[f"{kind}_rank"] is None for layer in report.plan["layers"] for kind in RANKED_KINDS)
