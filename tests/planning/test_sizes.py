"""Sizes: parameters as the stock classes count them, and targets that are met to within one rounding step."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, cpu_machine, problem_of
from families.cases import CASES
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from oneshot import Config
from oneshot.architecture import ModelShape, StackShape, read_shape
from oneshot.checkpoint import open_model
from oneshot.errors import ConfigError, PlanError
from oneshot.export import coordinates
from oneshot.families import LLAMA, find_family
from oneshot.parsing import parse_count, parse_size
from oneshot.pipeline import compress, predict
from oneshot.planning import Budget, Grid, LayerPlan, Plan, default_round_to, missed_target, reduced
from oneshot.planning.budget import OutOfReachError
from oneshot.profiling import measured_seconds

SHAPE = ModelShape(
    num_hidden_layers=4,
    hidden_size=64,
    intermediate_size=256,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
)


def plan_for(shape: ModelShape, surplus: int, **changes: Any) -> Plan:
    plan = whole(shape, changes.pop("head_unit", "auto"))
    return reduced(problem_of(Grid(LLAMA, shape), shape.stack().stored_parameters() - surplus, **changes), plan)


def alike(shape: ModelShape, width: int, heads: int, groups: int, unit: Any) -> Plan:
    return Plan((LayerPlan(width, heads, groups),) * shape.num_hidden_layers, unit)


def whole(shape: ModelShape, head_unit: str) -> Plan:
    unit = "query-head" if shape.heads_per_group > 1 else "kv-group"
    sizes = shape.intermediate_size, shape.num_attention_heads, shape.num_key_value_heads
    return alike(shape, *sizes, unit if head_unit == "auto" else head_unit)


def removed_parameters(shape: ModelShape, plan: Plan) -> int:
    return shape.stack().stored_parameters() - Grid(LLAMA, shape).stack(plan).stored_parameters()


@pytest.mark.parametrize(
    ("attention_bias", "mlp_bias", "groups", "head_dim"),
    list(itertools.product([False, True], [False, True], [1, 2, 4], [None, 16])),
)
def test_layer_parameters_equal_the_stock_class(
    attention_bias: bool, mlp_bias: bool, groups: int, head_dim: int | None
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=groups,
        num_hidden_layers=1,
        head_dim=head_dim,
        attention_bias=attention_bias,
        mlp_bias=mlp_bias,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    names = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shape = read_shape(find_family(config.to_dict()), config.to_dict(), names)
    assert shape.layer_parameters() == sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    head = model.lm_head.weight.numel()
    linears = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    biases = sum(parameter.numel() for name, parameter in model.named_parameters() if name.endswith("bias"))
    assert shape.stack().flops_per_token() == 2 * (linears + biases)
    assert linears > head
    assert shape.stack().kv_bytes_per_token() == 2 * 2 * groups * (head_dim or 8)


@given(
    width=st.integers(64, 2000),
    hidden=st.integers(8, 128),
    layers=st.integers(1, 6),
    mlp_bias=st.booleans(),
    round_to=st.sampled_from((None, 1, 8, 64)),
    share=st.floats(0.0, 0.6),
)
def test_ffn_plan_is_within_one_rounding_step(
    width: int, hidden: int, layers: int, mlp_bias: bool, round_to: int | None, share: float
) -> None:
    shape = ModelShape(layers, hidden, width, 4, 2, 16, mlp_bias=mlp_bias)
    step = round_to or default_round_to(width)
    assume(step * 4 <= width)
    per_neuron = layers * (3 * hidden + 2 * mlp_bias)
    surplus = round(share * per_neuron * width)
    plan = plan_for(shape, surplus, round_to=round_to)
    assert abs(removed_parameters(shape, plan) - surplus) <= per_neuron * step
    assert plan.layers[0].intermediate_size % step == 0 or plan.layers[0].intermediate_size == width
    assert plan.layers[0].num_attention_heads == 4


@settings(max_examples=300)
@given(
    heads_per_group=st.sampled_from((1, 2, 3, 4, 8)),
    groups=st.sampled_from((1, 2, 3, 8)),
    width=st.integers(64, 2000),
    hidden=st.sampled_from((48, 192, 384)),
    head_unit=st.sampled_from(("auto", "query-head", "kv-group")),
    share=st.floats(0.01, 0.5),
)
def test_ffn_and_heads_plan_is_within_one_rounding_step(
    heads_per_group: int, groups: int, width: int, hidden: int, head_unit: str, share: float
) -> None:
    heads = heads_per_group * groups
    shape = ModelShape(3, hidden, width, heads, groups, max(1, hidden // heads))
    surplus = round(share * 3 * shape.layer_parameters())
    try:
        plan = plan_for(shape, surplus, heads="id", head_unit=head_unit)
    except PlanError:
        # with the heads that the fraction leaves, the FFN alone could not reach it
        assert surplus > 3 * 3 * shape.hidden_size * (width - 64)
        return
    step = 3 * 3 * shape.hidden_size * default_round_to(width)
    assert abs(removed_parameters(shape, plan) - surplus) <= step


@given(
    heads_per_group=st.sampled_from((1, 2, 4)),
    groups=st.sampled_from((2, 3, 8)),
    head_unit=st.sampled_from(("query-head", "kv-group")),
    share=st.floats(0.0, 1.0),
)
def test_heads_alone_come_within_one_unit(heads_per_group: int, groups: int, head_unit: str, share: float) -> None:
    heads = heads_per_group * groups
    shape = ModelShape(3, 64, 256, heads, groups, 16)
    units = groups if head_unit == "kv-group" else heads_per_group
    smallest = alike(shape, 256, heads_per_group if head_unit == "kv-group" else groups, 1, head_unit)
    if head_unit == "query-head":
        smallest = alike(shape, 256, groups, groups, head_unit)
    most = removed_parameters(shape, smallest)
    plan = plan_for(shape, round(share * most), ffn="none", heads="id", head_unit=head_unit)
    assert abs(removed_parameters(shape, plan) - share * most) <= most / max(1, units - 1)
    assert plan.layers[0].intermediate_size == 256


@pytest.mark.parametrize(
    ("groups", "unit", "kept_heads", "kept_groups"),
    [(4, "query-head", 4, 4), (4, "auto", 4, 4), (4, "kv-group", 4, 2), (8, "auto", 4, 4), (8, "kv-group", 4, 4)],
)
def test_half_of_the_heads_in_either_unit(groups: int, unit: str, kept_heads: int, kept_groups: int) -> None:
    shape = ModelShape(1, 64, 256, 8, groups, 8)
    half = alike(shape, 256, kept_heads, kept_groups, unit)
    plan = plan_for(shape, removed_parameters(shape, half), ffn="none", heads="id", head_unit=unit)
    assert (plan.layers[0].num_attention_heads, plan.layers[0].num_key_value_heads) == (kept_heads, kept_groups)


def test_removing_nothing_is_the_identity_even_if_nothing_may_be_reduced() -> None:
    plan = plan_for(SHAPE, 0, ffn="none")
    assert plan.shape_of_layer(SHAPE, 0) == SHAPE
    assert not plan.reduces_sublayers(SHAPE)


@pytest.mark.parametrize(
    ("surplus", "changes", "message"),
    [
        (100, {"ffn": "none"}, "Nothing may be reduced"),
        (4 * 3 * 64 * 256, {}, "at best"),
        (4 * 3 * 64 * 256, {"ffn": "none", "heads": "id"}, "Heads alone"),
        (4 * SHAPE.layer_parameters(), {"heads": "id"}, "at best"),
    ],
)
def test_targets_out_of_reach(surplus: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_for(SHAPE, surplus, **changes)


@pytest.mark.parametrize(
    ("width", "step"),
    [(10, 1), (64, 4), (448, 16), (512, 32), (576, 32), (1000, 32), (1024, 64), (11008, 64)],
)
def test_default_rounding(width: int, step: int) -> None:
    assert default_round_to(width) == step


@pytest.mark.parametrize(("text", "value"), [("900M", 900_000_000), ("5.5b", 5_500_000_000), ("12", 12), ("3 K", 3000)])
def test_counts(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize(("text", "value"), [("8GiB", 8 * 2**30), ("5GB", 5 * 10**9), ("1.5kb", 1500), ("7", 7)])
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


def test_a_part_of_a_byte_is_refused_as_it_was_given() -> None:
    with pytest.raises(ConfigError, match=r"^'0\.1' is less than 1; give a size in bytes such as"):
        parse_size("0.1")
    with pytest.raises(ConfigError, match=r"^'0\.0004K' is less than 1; give a number of parameters such as"):
        parse_count("0.0004K")


@pytest.mark.parametrize("text", ["", "GB", "-1", "5 apples", "nan", "1e9"])
def test_invalid_sizes_and_counts(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)
    with pytest.raises(ConfigError):
        parse_count(text)


@pytest.mark.parametrize("form", ["stock", "per-layer"])
@pytest.mark.parametrize("budget", ["flops", "bytes", "latency"])
def test_other_budgets_than_parameters(
    form: str, budget: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the asked share of the quantity is gone, to within a step of the FFN width; seconds are invented."""
    monkeypatch.setattr(
        "oneshot.run.run.measured_seconds",
        lambda *_, **__: lambda stack: sum(1e-3 + 1e-5 * layer.intermediate_size for layer in stack.layers),
    )
    folder = make_checkpoint()
    sparsity = 0.55 if budget == "bytes" else 0.1  # bfloat16 removes half of the bytes
    config = make_config(folder, budget=budget, form=form, round_to=4, save_dtype="bfloat16", sparsity=sparsity)
    report = compress(config)
    sizes = [layer["intermediate_size"] for layer in report.plan["layers"]]
    if budget == "flops":
        kept = report.flops_per_token["compressed"] / report.flops_per_token["dense"]
        assert kept == pytest.approx(0.9, abs=0.02)
    elif budget == "bytes":
        weights = [
            sum(path.stat().st_size for path in Path(where).glob("*.safetensors")) for where in (config.output, folder)
        ]
        assert weights[0] / weights[1] == pytest.approx(0.45, abs=0.03)
    else:
        kept = sum(1e-3 + 1e-5 * size for size in sizes) / (len(sizes) * (1e-3 + 1e-5 * 64))
        assert kept == pytest.approx(0.9, abs=0.02)
    assert max(sizes) < 64 or form == "per-layer"


def test_seconds_of_every_size_are_measured(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    model = open_model(str(make_checkpoint()), tmp_path)
    seconds = measured_seconds(model, cpu_machine(tmp_path), sequence_length=16)
    grid, stack = Grid(model.family, model.shape), model.shape.stack()
    assert seconds(stack) > 0
    half = replace(stack, layers=stack.layers[:1])
    assert seconds(stack) == pytest.approx(len(stack.layers) * seconds(half))
    for unit in ("query-head", "kv-group"):
        dense = whole(model.shape, unit)
        for kept in (1, 2):
            heads = (kept * 2, 2) if unit == "query-head" else (2 * kept, kept)
            smaller = alike(model.shape, 17, *heads, unit)
            if heads[0] <= model.shape.num_attention_heads:
                assert math.isfinite(seconds(grid.stack(smaller)))
        assert seconds(grid.stack(dense)) == pytest.approx(seconds(stack))


def test_a_rank_that_takes_more_time_is_not_chosen(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invent seconds in which low rank makes gates faster and everything else slower."""

    def seconds(stack: StackShape) -> float:
        slower = sum(bool(rank) for layer in stack.layers for rank in (layer.query_key_rank, layer.output_rank))
        faster = sum(32 - layer.gate_rank for layer in stack.layers if layer.gate_rank)
        return 1.0 + sum(1e-2 * layer.intermediate_size for layer in stack.layers) + slower - 2e-2 * faster

    monkeypatch.setattr("oneshot.run.run.measured_seconds", lambda *_, **__: seconds)
    config = make_config(make_checkpoint(), form="per-layer", budget="latency", round_to=8, sparsity=0.2)
    layers = compress(config).plan["layers"]
    assert any(layer["gate_rank"] for layer in layers)
    assert {layer[f"{kind}_rank"] for layer in layers for kind in ("query_key", "output", "up")} == {None}


@pytest.mark.parametrize("head_dim", [8, 12])
def test_seconds_of_ranks_follow_what_was_measured(
    head_dim: int, make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invent a machine that takes 5 µs a call of low rank, and 1 ns a multiplication."""

    def linear(x: torch.Tensor, weight: torch.Tensor, rank: int, _: Any) -> Callable[[], float]:
        rows, inputs = weight.shape
        if rank == inputs:
            return lambda: 1e-9 * rows * inputs
        return lambda: 5e-6 + 1e-9 * rank * (rows + inputs - rank)

    monkeypatch.setattr("oneshot.profiling.latency._linear", linear)
    monkeypatch.setattr(
        "oneshot.profiling.latency._least",
        lambda calls, device: [done if isinstance(done := call(), float) else 1e-3 for call in calls],
    )
    model = open_model(str(make_checkpoint(head_dim=head_dim)), tmp_path)
    seconds = measured_seconds(model, cpu_machine(tmp_path), sequence_length=16, coordinates=coordinates)
    stack = model.shape.stack()
    values = 4 * head_dim
    for ranks, rows, inputs in (
        ({"query_key_rank": 11}, 6 * head_dim, 32),
        ({"output_rank": 7}, 32, values),
        ({"gate_rank": 20}, 40, 32),
        ({"up_rank": 3}, 40, 32),
    ):
        smaller = replace(stack.layers[0], intermediate_size=40)
        layers = {name: replace(smaller, **changes) for name, changes in (("whole", {}), ("low", ranks))}
        taken = {name: seconds(replace(stack, layers=(layer,))) for name, layer in layers.items()}
        (rank,) = ranks.values()
        expected = 5e-6 + 1e-9 * (rank * (rows + inputs - rank) - rows * inputs)
        assert taken["low"] - taken["whole"] == pytest.approx(expected, rel=1e-6)


def test_ranks_are_timed_for_every_linear(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    model = open_model(str(make_checkpoint()), tmp_path)
    seconds = measured_seconds(model, cpu_machine(tmp_path), sequence_length=16, coordinates=coordinates)
    stack = model.shape.stack()
    ranked = replace(stack.layers[0], query_key_rank=8, output_rank=8, gate_rank=8, up_rank=8)
    assert math.isfinite(seconds(replace(stack, layers=(ranked,))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": 1000, "budget": "flops"}, "is a budget of its own"),
        ({"sparsity": 0.2, "budget": "money"}, "not one of"),
    ],
)
def test_invalid_budgets(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.of("in", "out", **changes)


@pytest.mark.parametrize("layers_differ", [False, True])
def test_heads_that_cost_nothing_go_though_they_are_more_than_was_asked_for(layers_differ: bool) -> None:
    """An FFN that shrinks to the target would do damage; so would one more head unit."""
    costs = torch.arange(SHAPE.intermediate_size, -1, -1, dtype=torch.float64).expand(4, -1)
    heads = torch.tensor([9.0, 5, 0, 0, 0], dtype=torch.float64).expand(4, -1)
    damages = {"ffn": costs, "heads": heads, "layers": torch.full((4,), 99.0)}
    start = whole(SHAPE, "kv-group")
    grid = Grid(LLAMA, SHAPE, layers_differ=layers_differ)
    wanted = start.with_sizes(num_attention_heads=4, num_key_value_heads=2)
    assert reduced(problem_of(grid, grid.stack(wanted).stored_parameters() + 10, damages, heads="id"), start) == wanted


def test_plans_for_several_targets_measure_an_option_once() -> None:
    asked: list[StackShape] = []

    def measure(stack: StackShape) -> float:
        asked.append(stack)
        return stack.stored_parameters()

    costs = torch.arange(SHAPE.intermediate_size, -1, -1, dtype=torch.float64).expand(4, -1)
    damages = {"ffn": costs, "heads": torch.zeros(4, 5), "layers": torch.full((4,), 99.0)}
    start, grid, counts = whole(SHAPE, "kv-group"), Grid(LLAMA, SHAPE, layers_differ=True), []
    for share in (0.9, 0.8):
        target = share * grid.stack(start).stored_parameters()
        asked.clear()
        problem = problem_of(grid, target, damages, round_to=4)
        planned = reduced(replace(problem, budget=Budget(target, measure)), start)
        counts.append(len(asked))
        assert planned == reduced(replace(problem, grid=Grid(LLAMA, SHAPE, layers_differ=True)), start)
    assert counts[0] > SHAPE.intermediate_size / 4
    assert counts[1] < counts[0] / 10


@pytest.mark.parametrize(("planned", "is_told"), [(80, False), (81, False), (82, True), (78, True), (100, True)])
def test_a_plan_that_clearly_misses_its_target_is_told(planned: float, is_told: bool) -> None:
    assert (missed_target(Budget(80), 100, planned) is not None) == is_told


def test_a_missed_target_is_in_the_report_the_card_and_the_dry_run(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(make_checkpoint(**CASES["qwen3_moe"].options), sparsity=0.07, recipe="magnitude")
    predict(config)
    [told] = [message for message in caplog.messages if "where 7.00% was asked for" in message]
    report = compress(config)
    assert told in report.warnings
    assert "7.00% was asked for" in (Path(config.output) / "README.md").read_text()


def test_a_stated_size_misses_no_target(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    config = make_config(make_checkpoint(), sparsity=None, intermediate_size=41, form="stock", round_to=1)
    report = compress(config)
    assert {layer["intermediate_size"] for layer in report.plan["layers"]} == {41}
    assert not [told for told in report.warnings if "was asked for" in told]


def test_a_share_of_bytes_that_the_dtype_alone_removes_is_answered_with_the_least(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    options = {"budget": "bytes", "save_dtype": "bfloat16", "form": "stock", "round_to": 1}
    folder = make_checkpoint()
    with pytest.raises(PlanError, match=r"above the dense model's .* ask for --sparsity 0.500 or more.$"):
        predict(make_config(folder, sparsity=0.2, **options))
    predict(make_config(folder, sparsity=0.5, **options))


@pytest.mark.parametrize("unit", [2.0, 1e-9])
def test_heads_take_their_share_in_any_unit(unit: float) -> None:
    """A share of bytes, or of seconds proportional to parameters, asks for the same plan."""
    start, grid = whole(SHAPE, "kv-group"), Grid(LLAMA, SHAPE)
    problem = problem_of(grid, 0.7 * SHAPE.stack().stored_parameters(), heads="id", round_to=8)
    other = Budget(unit * problem.budget.target, lambda stack: unit * stack.stored_parameters())
    planned = reduced(problem, start)
    assert 1 < planned.layers[0].num_key_value_heads < SHAPE.num_key_value_heads
    assert reduced(replace(problem, budget=other), start) == planned


def test_fewer_heads_stay_where_ffns_cannot_lose_their_fraction() -> None:
    """Half of the neurons and of the heads are too few to remove, and FFNs of a quarter are no multiple of 128."""
    start, grid = whole(SHAPE, "kv-group"), Grid(LLAMA, SHAPE)
    ceiling = SHAPE.stack().stored_parameters() - 0.53 * SHAPE.stack().all_layer_parameters()
    problem = replace(problem_of(grid, ceiling, heads="id", round_to=128), budget=Budget(ceiling, is_ceiling=True))
    assert grid.stack(alike(SHAPE, 128, 4, 2, "kv-group")).stored_parameters() > ceiling
    assert reduced(problem, start) == alike(SHAPE, 128, 2, 1, "kv-group")


@pytest.mark.parametrize("layers_differ", [False, True])
def test_heads_out_of_reach_say_what_the_fewest_get_down_to(layers_differ: bool) -> None:
    start, step = whole(SHAPE, "kv-group"), default_round_to(SHAPE.intermediate_size)
    costs = torch.linspace(1, 0, SHAPE.intermediate_size + 1, dtype=torch.float64).expand(4, -1)
    damages = {"ffn": costs, "heads": torch.linspace(1, 0, 5).expand(4, -1), "layers": torch.ones(4)}
    grid = Grid(LLAMA, SHAPE, layers_differ=layers_differ)
    least = grid.stack(alike(SHAPE, step, 2, 1, "kv-group")).stored_parameters()
    with pytest.raises(OutOfReachError) as refused:
        reduced(problem_of(grid, least / 2, damages, heads="id"), start)
    assert refused.value.least == least
