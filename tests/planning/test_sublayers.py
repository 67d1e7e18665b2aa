"""Attention or the FFN of a layer left out by itself: sizes, plans, checkpoints, caches, and their profile."""

import itertools
from collections.abc import Callable
from dataclasses import asdict, replace
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
    problem_of,
    profiled_tokens,
    silence,
)
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from oneshot.architecture import ModelShape
from oneshot.checkpoint import open_model
from oneshot.errors import ConfigError, PlanError
from oneshot.evaluation import load_model
from oneshot.export.modeling_oneshot import OneshotConfig, OneshotDecoderLayer
from oneshot.export.per_layer import PerLayerForm
from oneshot.families import LLAMA
from oneshot.pipeline import compress, predict, profile
from oneshot.planning import LayerPlan, Plan, dense_plan, reduced
from oneshot.recipes import find_recipe

CPU = torch.device("cpu")
IDS = torch.arange(3, 51).view(2, 24)
NO_HEADS, NO_FFN = {"num_attention_heads": 0, "num_key_value_heads": 0}, {"intermediate_size": 0}


@pytest.mark.parametrize("gone", [NO_HEADS, NO_FFN, NO_HEADS | NO_FFN, {}], ids=str)
@pytest.mark.parametrize(
    "flags",
    [{}, {"attention_bias": True, "output_bias": True, "mlp_bias": True}, {"query_key_norms": True}, {"gated": False}],
    ids=str,
)
def test_parameters_are_those_of_the_class(gone: dict[str, int], flags: dict[str, bool]) -> None:
    layer = replace(ModelShape(1, 32, 48, 4, 2, 8, **flags).layer(), **gone)
    config = OneshotConfig(layers=[asdict(layer)], norm_width=32, head_dim=8, hidden_size=32, num_hidden_layers=1)
    module = OneshotDecoderLayer(config, 0)
    assert layer.parameters() == sum(parameter.numel() for parameter in module.parameters())
    matrices = sum(value.numel() for name, value in module.named_parameters() if name.endswith("proj.weight"))
    biases = sum(value.numel() for name, value in module.named_parameters() if name.endswith("bias"))
    assert layer.linear_parameters() == matrices + biases


@given(seed=st.integers(0, 10**6), share=st.floats(0.1, 0.9), reduce_heads=st.booleans(), first_attends=st.booleans())
def test_plans_are_the_best_of_all(seed: int, share: float, reduce_heads: bool, first_attends: bool) -> None:
    """Compare with every combination of widths and heads, zero also, on curves that fall with the size."""
    shape = ModelShape(2, 8, 12, 4, 2, 4, vocab_size=80, tied=True)
    generator = np.random.default_rng(seed)

    def curves(size: int) -> torch.Tensor:
        return torch.from_numpy(np.sort(generator.random((2, size)), axis=1)[:, ::-1].copy())

    ffn, heads_lost = curves(13), curves(3)
    damages = {"ffn": ffn, "heads": heads_lost, "layers": torch.ones(2)}
    model: Any = SimpleNamespace(family=LLAMA, shape=shape)
    grid = replace(PerLayerForm().grid(model), first_layer_attends=first_attends)
    whole = Plan((LayerPlan(12, 4, 2),) * 2, "query-head")
    target = shape.stack().stored_parameters() - share * shape.stack().all_layer_parameters()
    heads = [(0, 0), (2, 2), (4, 2)] if reduce_heads else [(0, 0), (4, 2)]
    best = float("inf")
    for widths in itertools.product((0, 4, 8, 12), repeat=2):
        for kept in itertools.product(heads, repeat=2):
            plan = Plan(
                tuple(LayerPlan(width, *sizes) for width, sizes in zip(widths, kept, strict=True)), "query-head"
            )
            if not any(width + sum(sizes) for width, sizes in zip(widths, kept, strict=True)):
                continue
            if first_attends and kept[0] == (0, 0):
                continue
            parts = [(layer.intermediate_size, layer.num_attention_heads // 2) for layer in plan.layers]
            damage = sum(
                float(damages["ffn"][i, width] + damages["heads"][i, unit]) for i, (width, unit) in enumerate(parts)
            )
            if grid.stack(plan).stored_parameters() <= target:
                best = min(best, damage)
    assume(best < float("inf"))
    kept_heads = "id" if reduce_heads else "none"
    problem = problem_of(grid, target, damages, round_to=4, depth="sublayers", heads=kept_heads)
    try:
        found = reduced(problem, whole)
    except PlanError:  # the best plan has no attention at all
        assume(False)
    parts = [(layer.intermediate_size, layer.num_attention_heads // 2) for layer in found.layers]
    damage = sum(float(ffn[i, width] + heads_lost[i, unit]) for i, (width, unit) in enumerate(parts))
    assert damage == pytest.approx(best, abs=1e-5)
    assert found.layers[0].num_attention_heads or not first_attends
    assert grid.stack(found).stored_parameters() <= target


@pytest.fixture
def idle(save_model: Callable[..., Path]) -> Callable[..., Path]:
    """Save a model of three layers whose first attention and last FFN add nothing to the residual stream."""

    def save(family: str, **options: Any) -> Path:
        model = build_model(family, layers=3, groups=4 if family == "opt" else 2, **options)
        silence(model, attention=[0], ffn=[2])
        return save_model(model)

    return save


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_idle_sublayers_go_and_nothing_else_changes(
    family: str, idle: Callable[..., Path], make_config: MakeConfig, tmp_path: Path
) -> None:
    folder = idle(family)
    model = open_model(str(folder), tmp_path)
    grid, method = PerLayerForm().grid(model), find_recipe("oneshot")
    plan = dense_plan(model.shape, method)
    first, middle, last = plan.layers
    wanted = replace(plan, layers=(replace(first, **NO_HEADS), middle, replace(last, **NO_FFN)))
    options: dict[str, Any] = {"depth": "sublayers", "ffn": "none", "form": "per-layer", "correction": "none"}
    target = grid.stack(wanted).stored_parameters()
    report = compress(make_config(folder, parameters=target, **options))
    assert list(report.plan["layers"]) == [asdict(layer) for layer in wanted.layers]
    assert report.stored_parameters["compressed"] == target
    assert [[one.kept_size for one in layer.sublayers if one.kept_size == 0] for layer in report.layers] == [
        [0],
        [],
        [0],
    ]
    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    result = load_model(Path(report.config["output"]), device=CPU, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(result(IDS).logits, dense(IDS).logits, rtol=1e-4, atol=1e-4)
        assert_cache_changes_nothing(result, 8, input_ids=IDS)


@pytest.mark.parametrize("heads", ["none", "id"])
def test_the_rest_is_narrowed_and_corrected(heads: str, idle: Callable[..., Path], make_config: MakeConfig) -> None:
    folder = idle("llama", tied=True)
    config = make_config(folder, depth="sublayers", form="per-layer", heads=heads, sparsity=0.35, round_to=4)
    assert predict(config).stored_parameters["compressed"] > 0
    report = compress(config)
    layers = report.plan["layers"]
    assert layers[0]["num_attention_heads"] == 0
    assert layers[2]["intermediate_size"] == 0
    assert report.sparsity["reached"] == pytest.approx(0.35, abs=0.02)
    assert report.predicted_divergence is not None
    with torch.no_grad():
        assert torch.isfinite(load_model(Path(config.output), device=CPU, dtype=torch.float32)(IDS).logits).all()


def test_divergences_are_those_of_the_stock_model(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    """Compare with transformers' model whose sublayer returns zeros, on the probe sequences."""
    config = make_config(make_checkpoint(tied=True))
    found = profile(config)
    _, probes = profiled_tokens(config)
    model = AutoModelForCausalLM.from_pretrained(config.checkpoint).eval()
    with torch.no_grad():
        dense = model(probes, use_cache=False).logits.double().log_softmax(-1)
        for layer, parts in enumerate(model.model.layers):
            for linear, measured in (
                (parts.self_attn.o_proj, found.head_divergence),
                (parts.mlp.down_proj, found.ffn_divergence),
            ):
                handle = linear.register_forward_hook(lambda _, inputs, output: torch.zeros_like(output))
                reduced = model(probes, use_cache=False).logits.double().log_softmax(-1)
                handle.remove()
                expected = (dense.exp() * (dense - reduced)).sum() / probes.numel()
                assert float(measured[layer]) == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"form": "stock"}, "needs --form per-layer"),
        ({"form": "per-layer", "budget": "latency"}, "no measured latencies"),
        ({"form": "per-layer", "allocation": "uniform"}, "needs allocation=sensitivity"),
    ],
    ids=str,
)
def test_what_is_not_possible_is_refused(
    options: dict[str, Any], sentence: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        compress(make_config(make_checkpoint(), depth="sublayers", **options))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_as_many_layers_stay_as_a_pipeline_has_stages(
    stages: int, save_model: Callable[..., Path], make_config: MakeConfig
) -> None:
    """Two of these four layers add nothing, and would go."""
    model = build_model(layers=4, width=160)
    silence(model, attention=[1, 2], ffn=[1, 2])
    config = make_config(save_model(model), form="per-layer", depth="sublayers", sparsity=0.4, serve=f"pp={stages}")
    report = compress(config)
    assert len(Plan.from_dict(report.plan).kept_layers) == stages
    assert report.sparsity["reached"] == pytest.approx(0.4, abs=0.03)
