"""Whole layers: the plan leaves out the right ones, and the result is the model without them."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, build_model, calibration_tokens, problem_of
from families.cases import CASES
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from oneshot import Target
from oneshot.architecture import ModelShape
from oneshot.checkpoint import open_model
from oneshot.cli.compress import main
from oneshot.errors import ConfigError, PlanError
from oneshot.evaluation import load_model
from oneshot.export import form_of
from oneshot.export.companions import empty_tensors
from oneshot.families import LLAMA
from oneshot.pipeline import compress, predict
from oneshot.planning import (
    LEFT_OUT,
    Budget,
    Grid,
    LayerPlan,
    Plan,
    make_plan,
    predicted_damage,
)
from oneshot.planning.equal_sizes import plans_without_layers
from oneshot.recipes import find_recipe

IDS = torch.arange(3, 51).view(2, 24)


def without_layers(folder: Path, left_out: list[int]) -> Any:
    """Return the dense model with some layers taken out of its module list."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    decoder = getattr(model.model, "decoder", model.model)
    decoder.layers = torch.nn.ModuleList(layer for number, layer in enumerate(decoder.layers) if number not in left_out)
    return model


def left_out(plan: dict[str, Any]) -> list[int]:
    return [number for number, layer in enumerate(plan["layers"]) if layer["intermediate_size"] == 0]


@pytest.fixture
def idle_layer(save_model: Callable[..., Path]) -> Path:
    """Save a model of four layers; the third adds nearly nothing to the residual stream."""
    model = build_model(layers=4)
    for linear in (model.model.layers[2].self_attn.o_proj, model.model.layers[2].mlp.down_proj):
        linear.weight.data *= 1e-3
    return save_model(model)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text"])
def test_the_last_layer_with_attention_stays(name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """The caches of transformers' hybrids ask it how long the text is. Here it has the least damage."""
    carried = "conv" if name == "lfm2" else "linear_attention"
    options = CASES[name].options | {"layers": 3, "layer_types": [carried, "full_attention", carried]}
    model = open_model(str(make_checkpoint(**options)), tmp_path)
    grid = form_of("stock", model.family).grid(model)
    plan = Plan((LayerPlan(grid.shape.intermediate_size, 4, 2),) * 3, "kv-group")
    problem = problem_of(grid, 0, {"layers": torch.tensor([2.0, 1.0, 3.0])}, depth="sensitivity")
    found = [option.kept_layers for option in plans_without_layers(problem, plan)]
    assert found == [[0, 1, 2], [1, 2], [1]]


@pytest.mark.parametrize("form", ["stock", "per-layer"])
def test_experts_move_to_the_number_of_a_layer_without_them(
    form: Any, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The first layer goes, which has one FFN."""
    model = open_model(str(make_checkpoint(**CASES["glm4_moe"].options)), tmp_path)
    chosen, whole = form_of(form, model.family), LayerPlan(32, 4, 2)
    config = chosen.config(model, Plan((LEFT_OUT, whole, whole), "kv-group"))
    assert (config["first_k_dense_replace"], config["num_hidden_layers"]) == (0, 2)
    tensors = model.read_layer(1)
    stored = chosen.layer(model, 0, tensors)
    wanted = {name: one.shape for name, one in empty_tensors(config).items() if name.startswith("model.layers.0.")}
    assert {name: one.shape for name, one in stored.items()} == wanted
    again = chosen.original(model, 0, stored)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(one, again[name]) for name, one in tensors.items())


@pytest.mark.parametrize("form", ["stock", "per-layer"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "opt"])
def test_the_result_is_the_model_without_the_layers(
    family: str, form: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(family=family, layers=4, groups=4 if family == "opt" else 2)
    sparsity = 0.2 if family == "opt" else 0.4  # embeddings are most of the tiny OPT
    report = compress(make_config(folder, depth="sensitivity", ffn="none", sparsity=sparsity, form=form))
    gone = left_out(report.plan)
    assert 0 < len(gone) < 4
    assert report.sparsity["reached"] == pytest.approx(sparsity, abs=0.15)
    output = Path(report.config["output"])
    assert AutoConfig.from_pretrained(output, trust_remote_code=True).num_hidden_layers == 4 - len(gone)
    compressed = load_model(output, device=torch.device("cpu"), dtype=torch.float32)
    with torch.no_grad():
        wanted = without_layers(folder, gone)(IDS).logits
        torch.testing.assert_close(compressed(IDS).logits, wanted, rtol=1e-4, atol=1e-4)
    kept_sizes = [[sublayer.kept_size for sublayer in layer.sublayers] for layer in report.layers]
    assert [number for number, sizes in enumerate(kept_sizes) if sizes == [0, 0]] == gone


@pytest.mark.parametrize(
    "settings", [{}, {"form": "per-layer"}, {"heads": "id"}, {"correction": "same-layer"}], ids=str
)
def test_the_layer_that_does_least_goes_first(
    settings: dict[str, Any], idle_layer: Path, make_config: MakeConfig
) -> None:
    options: dict[str, Any] = {"allocation": "sensitivity", "sparsity": 0.3, "round_to": 4, **settings}
    config = make_config(idle_layer, **options)
    report = compress(make_config(idle_layer, depth="sensitivity", **options))
    assert 2 in left_out(report.plan)
    assert report.sparsity["reached"] == pytest.approx(0.3, abs=0.03)
    shallow, all_layers = report.predicted_divergence, compress(replace(config, output=f"{config.output}-all"))
    assert shallow is not None
    assert all_layers.predicted_divergence is not None
    assert shallow["plan"] < all_layers.predicted_divergence["plan"]


def test_layers_around_a_left_out_one_are_corrected_towards_the_dense_stream(
    idle_layer: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Compare outputs with and without the residual: the dense stream passes every layer, also the left-out ones."""
    options: dict[str, Any] = {"depth": "sensitivity", "sparsity": 0.35, "round_to": 4, "num_sequences": 64}
    dense = AutoModelForCausalLM.from_pretrained(idle_layer).eval()
    errors = []
    for correction in ({"correction": "none"}, {"correction": "two-stream", "residual_weight": 1.0}):
        output = str(tmp_path / str(correction["correction"]))
        config = make_config(idle_layer, **options, **correction, output=output)
        report, text = compress(config), calibration_tokens(config)
        assert left_out(report.plan)
        model = load_model(Path(output), device=torch.device("cpu"), dtype=torch.float32)
        with torch.no_grad():
            errors.append(float((model(text).logits - dense(text).logits).norm()))
    assert errors[1] < errors[0]


@given(seed=st.integers(0, 10**6), share=st.floats(0.05, 0.6))
def test_the_plan_is_the_best_of_all_subsets(seed: int, share: float) -> None:
    """Compare with every subset of layers and every common width; a narrower FFN costs the same in all layers.

    Subsets that leave less than the budget count as they are.
    """
    layers, width = 4, 12
    shape = ModelShape(layers, 8, width, 4, 2, 4)
    grid = Grid(LLAMA, shape)
    generator = np.random.default_rng(seed)
    curve = np.sort(generator.random(width + 1))[::-1].copy()
    damages = {
        "ffn": torch.from_numpy(np.tile(curve, (layers, 1))),
        "heads": torch.zeros(layers, 3),
        "layers": torch.from_numpy(generator.random(layers) * 4),
    }
    dense = shape.stack().stored_parameters()
    budget = Budget(round(dense - share * shape.stack().all_layer_parameters()))
    method = grid.settle(find_recipe("oneshot", depth="sensitivity"), Target(sparsity=share))
    whole = LayerPlan(width, 4, 2)
    best = float("inf")
    for count in range(layers):
        for gone in itertools.combinations(range(layers), count):
            start = Plan(tuple(LEFT_OUT if layer in gone else whole for layer in range(layers)), "query-head")
            options = [
                replace(
                    start,
                    layers=tuple(
                        kept if kept.is_left_out else replace(kept, intermediate_size=size) for kept in start.layers
                    ),
                )
                for size in (4, 8, 12)
            ]
            distances = [abs(grid.stack(option).stored_parameters() - budget.target) for option in options]
            nearest = min(distances)
            smallest = shape.layer_parameters() - replace(shape, intermediate_size=8).layer_parameters()
            if grid.stack(options[0]).stored_parameters() - budget.target > smallest * (layers - count) / 2:
                continue  # out of reach
            chosen = options[distances.index(nearest)]
            best = min(best, predicted_damage(chosen, damages))
    assume(best < float("inf"))
    found = make_plan(grid, method, Target(sparsity=0.1, round_to=4), damages, budget)
    assert predicted_damage(found, damages) == pytest.approx(best)


def test_fewer_layers_reach_what_narrow_ones_do_not(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    folder = make_checkpoint(layers=2)
    with pytest.raises(PlanError, match="at best"):
        compress(make_config(folder, sparsity=0.3))
    report = compress(make_config(folder, sparsity=0.3, depth="sensitivity"))
    assert len(left_out(report.plan)) == 1
    assert report.sparsity["reached"] == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": "pca"}, "set hidden=none"),
        ({"allocation": "uniform"}, "needs allocation=sensitivity"),
        ({"allocation": "stat"}, "needs allocation=sensitivity"),
    ],
    ids=str,
)
def test_depth_with_contradicting_options_is_refused(
    settings: dict[str, Any], message: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=message):
        compress(make_config(make_checkpoint(layers=4), depth="sensitivity", **settings))


def test_one_layer_must_stay(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    with pytest.raises(PlanError, match="one layer alone has"):
        compress(make_config(make_checkpoint(layers=3), depth="sensitivity", ffn="none", sparsity=0.99))


@pytest.mark.parametrize("form", ["stock", "per-layer"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_as_many_layers_stay_as_a_pipeline_has_stages(
    form: str, stages: int, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Without stages all but one or two of these four layers would go."""
    options: dict[str, Any] = {"form": form, "depth": "sensitivity", "serve": f"pp={stages}", "sparsity": 0.5}
    folder = make_checkpoint(layers=4, width=160)
    report = compress(make_config(folder, **options))
    assert len(Plan.from_dict(report.plan).kept_layers) >= stages
    with pytest.raises(PlanError, match=f"but {stages} layers alone have .*; ask for a smaller --sparsity"):
        compress(make_config(folder, **options | {"ffn": "none", "sparsity": 0.99, "output": "out"}))


def test_a_pipeline_of_more_stages_than_layers_that_stay_is_no_matter_of_heads(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    with pytest.raises(PlanError, match=r"cannot share; give --serve a smaller pp\.$"):
        compress(make_config(make_checkpoint(layers=2), form="per-layer", serve="pp=3"))


def test_a_config_that_lists_its_layers_loses_some(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    folder = make_checkpoint(family="qwen2", layers=4)
    assert len(json.loads((folder / "config.json").read_text())["layer_types"]) == 4
    report = compress(make_config(folder, depth="sensitivity", ffn="none", sparsity=0.3))
    config = json.loads((Path(report.config["output"]) / "config.json").read_text())
    assert len(config["layer_types"]) == config["num_hidden_layers"] == 4 - len(left_out(report.plan))


def test_a_dry_run_and_the_command_line(idle_layer: Path, make_config: MakeConfig, capsys: Any) -> None:
    config = make_config(idle_layer, depth="sensitivity", ffn="none")
    assert predict(config).stored_parameters["compressed"] < predict(config).stored_parameters["dense"]
    arguments = [
        str(idle_layer),
        f"--output={config.output}",
        f"--calibration={config.text.calibration}",
        "--sparsity=0.2",
    ]
    arguments += ["--set=depth=sensitivity", "--num-sequences=8", "--sequence-length=32", "--device=cpu", "--verbose"]
    assert main(arguments) == 0
    assert "64 → 0" in capsys.readouterr().out
