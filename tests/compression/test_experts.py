"""Neurons inside experts: statistics, choice and correction against sums over all tokens in float64, and whole runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from arrivals import by_expert
from factories import MakeCheckpoint, MakeConfig, calibration_tokens, cpu_machine
from families.cases import CASES
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from oneshot.architecture import Experts
from oneshot.checkpoint import Model, open_model
from oneshot.compression.expert_correction import ExpertFactors
from oneshot.compression.expert_removal import add_effects_, warn_of_removed
from oneshot.compression.expert_scores import ExpertSelector, ExpertSums, Routed, outputs_of
from oneshot.compression.expert_statistics import ExpertAccumulator, ExpertStatistics
from oneshot.compression.experts import ExpertsTask, MeasuredExperts
from oneshot.errors import CheckpointError, OneshotError
from oneshot.pipeline import compress, predict
from oneshot.planning import dense_plan
from oneshot.recipes import find_recipe
from oneshot.stream import LayerBuilder, Placement, Routing

NAME = "qwen3_moe"
OPTIONS = CASES[NAME].options
EXPERTS, WIDTH, KEPT, HIDDEN = 4, 32, 24, 32
MIXER = Experts()


@pytest.fixture
def model(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Model:
    return open_model(str(make_checkpoint(**OPTIONS)), tmp_path)


@torch.inference_mode()
def routed(model: Model, tmp_path: Path, sequences: int, seed: int = 0) -> tuple[Routing, torch.Tensor]:
    """Return a batch on its way through the experts of the first layer, and a residual of it."""
    layer = LayerBuilder(model, cpu_machine(tmp_path), 24).layer(0, model.read_layer(0))
    generator = torch.Generator().manual_seed(seed)
    x, lost = (torch.randn(sequences, 24, HIDDEN, generator=generator) for _ in range(2))
    return layer.route(1, x), lost.flatten(0, 1)


def slowly(tensors: dict[str, torch.Tensor], routing: Routing, lost: torch.Tensor) -> tuple[Any, Any, Any]:
    """Return Grams, residuals and counts of the experts, token by token in float64, from the weights alone."""
    gate_up, down = tensors[MIXER.gate_up].double(), tensors[MIXER.down].double()
    grams = torch.zeros(EXPERTS, WIDTH, WIDTH, dtype=torch.float64)
    residuals = torch.zeros(EXPERTS, WIDTH, HIDDEN, dtype=torch.float64)
    counts = [0] * EXPERTS
    for token, x in enumerate(routing.inputs.double()):
        scores = (tensors[f"{MIXER.router}.weight"].double() @ x).softmax(0)
        chosen = scores.topk(2)
        for expert, gate in zip(chosen.indices.tolist(), chosen.values.tolist(), strict=True):
            both = gate_up[expert] @ x
            neurons = functional.silu(both[:WIDTH]) * both[WIDTH:]
            change = gate * lost[token].double() / chosen.values.square().sum()
            grams[expert] += gate**2 * torch.outer(neurons, neurons)
            residuals[expert] += gate**2 * torch.outer(neurons, change)
            counts[expert] += 1
        shares = [gate * gate * lost[token].double() / chosen.values.square().sum() for gate in chosen.values.tolist()]
        torch.testing.assert_close(sum(shares), lost[token].double())
    assert down.shape == (EXPERTS, HIDDEN, WIDTH)
    return grams, residuals, counts


def summed(*batches: tuple[Routing, torch.Tensor | None]) -> ExpertStatistics:
    accumulator = ExpertAccumulator(EXPERTS, WIDTH, output_size=HIDDEN, device=torch.device("cpu"))
    for routing, lost in batches:
        accumulator.update_(routing, lost)
    return accumulator.finish()


@torch.inference_mode()
def test_statistics_equal_sums_over_tokens(model: Model, tmp_path: Path) -> None:
    routing, lost = routed(model, tmp_path, 3)
    grams, residuals, counts = slowly(model.read_layer(0), routing, lost)
    found = summed((routing, lost))
    assert found.residuals is not None
    assert found.num_rows.tolist() == found.num_targets.tolist() == counts
    torch.testing.assert_close(found.grams.double(), grams, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.residuals.double(), residuals, rtol=1e-4, atol=1e-4)
    # a part of the text without a target: the residual stands for all tokens
    other, _ = routed(model, tmp_path, 3, seed=1)
    both = summed((routing, lost), (other, None))
    more = slowly(model.read_layer(0), other, lost)[2]
    assert both.residuals is not None
    assert both.num_rows.tolist() == [first + second for first, second in zip(counts, more, strict=True)]
    scales = both.num_rows / both.num_targets
    torch.testing.assert_close(both.residuals.double(), residuals * scales.view(-1, 1, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("active", "sequences", "together"), [((0, 1, 3), 40, 2), ((0, 1, 2, 3), 40, 4), ((1,), 2, 1)])
@torch.inference_mode()
def test_experts_taken_together_as_on_a_device_have_the_same_sums(
    active: tuple[int, ...],
    sequences: int,
    together: int,
    model: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padded rows add nothing, also with an expert without a token, and in a group that cuts a block."""
    routing, lost = routed(model, tmp_path, sequences)
    draws = torch.randint(len(active), (len(lost), 1), generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor(active)[draws]
    routing = replace(routing, chosen=chosen, gates=routing.gates[:, :1].contiguous())
    alone, inputs = summed((routing, lost)), torch.randn(len(chosen), HIDDEN)
    of_pairs = Routed(chosen, routing.gates, routing.gates, EXPERTS, None)
    outputs = outputs_of(of_pairs, inputs, routing.output)
    monkeypatch.setattr(Placement, "of", Placement.together)
    assert max(len(block.experts) for block in Placement.of(chosen, EXPERTS).blocks) == together
    at_once = summed((routing, lost))
    torch.testing.assert_close(outputs_of(of_pairs, inputs, routing.output), outputs)
    group = ExpertAccumulator(EXPERTS, WIDTH, output_size=HIDDEN, device=torch.device("cpu"), group=range(1, 4))
    group.update_(routing, lost)
    parts = group.finish()
    assert alone.residuals is not None
    for found, own in ((at_once, slice(None)), (parts, slice(1, 4))):
        torch.testing.assert_close(found.grams, alone.grams[own])
        torch.testing.assert_close(found.residuals, alone.residuals[own])
        torch.testing.assert_close(found.residual_energies, alone.residual_energies[own])
        assert torch.equal(found.num_rows, alone.num_rows)
    assert alone.num_rows.gt(0).nonzero().flatten().tolist() == list(active)


def solved(
    task: ExpertsTask, tensors: dict[str, torch.Tensor], statistics: ExpertStatistics
) -> tuple[torch.Tensor, ExpertFactors]:
    kept, factors, _ = task.solve(tensors, MeasuredExperts(statistics, (), torch.Generator()))
    return kept, factors


def task_of(model: Model, tmp_path: Path, **changes: Any) -> ExpertsTask:
    method = replace(find_recipe("oneshot"), **changes)
    plan = dense_plan(model.shape, method).with_sizes(intermediate_size=KEPT)
    return ExpertsTask(method, model.shape, plan, None, cpu_machine(tmp_path), model.family.stack, 0, 1, seed=0)


@pytest.mark.parametrize("correction", ["same-layer", "two-stream"])
@torch.inference_mode()
def test_downs_are_least_squares_over_the_tokens_of_their_expert(correction: str, model: Model, tmp_path: Path) -> None:
    """The normal equations of an augmented system, whose last rows are the ridge towards the dense columns."""
    task = task_of(model, tmp_path, correction=correction)
    routing, lost = routed(model, tmp_path, 60)
    tensors, statistics = model.read_layer(0), summed((routing, lost))
    kept, factors = solved(task, tensors, statistics)
    errors = energies = 0.0
    for one in by_expert(routing):
        columns, weight = kept[one.expert], tensors[MIXER.down][one.expert].double()
        rows = (one.gates.unsqueeze(1) * one.neurons).double()
        squares = routing.gates[one.tokens].square().sum(1)
        share = task.residual_weight(WIDTH, len(rows)) if correction == "two-stream" else 0.0
        change = lost[one.tokens].double() * (one.gates.square() / squares).double().unsqueeze(1)
        damping = task.method.expert_damping * max(1.0, 16 * WIDTH / len(rows))
        ridge = damping * rows[:, columns].square().sum(0).mean()
        system = torch.cat((rows[:, columns], ridge.sqrt() * torch.eye(KEPT, dtype=torch.float64)))
        target = torch.cat((rows @ weight.T + share * change, ridge.sqrt() * weight[:, columns].T))
        expected = torch.linalg.lstsq(system, target).solution.T
        torch.testing.assert_close(factors.weight[one.expert].double(), expected, rtol=1e-3, atol=1e-4)
        whole = rows @ weight.T + (0.0 if correction == "same-layer" else 1.0) * change
        errors += float((whole - rows[:, columns] @ expected.T).square().sum())
        energies += float(whole.square().sum())
    if correction == "two-stream":  # the statistics have a residual, which the error counts
        assert factors.predicted_error == pytest.approx((errors / energies) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("correction", ["same-layer", "two-stream"])
@pytest.mark.parametrize("trouble", ["", "a singular Gram", "a rare expert", "no target"])
@torch.inference_mode()
def test_experts_solved_together_are_those_solved_alone(
    trouble: str, correction: str, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, tensors = task_of(model, tmp_path, correction=correction, expert_damping=0.0), model.read_layer(0)
    statistics = summed(routed(model, tmp_path, 60))
    if trouble == "a singular Gram":
        statistics.grams[1] = torch.outer(statistics.grams[1, 0], statistics.grams[1, 0])
    elif trouble == "a rare expert":
        statistics.num_rows[1] = WIDTH - 1
    elif trouble == "no target":
        statistics.num_targets[1] = 0
        for sums in (statistics.residuals, statistics.residual_energies):
            assert sums is not None
            sums[1] = 0
    found = []
    for together in (1, 3):
        monkeypatch.setattr(
            "oneshot.compression.expert_correction.solved_together", lambda *_, together=together: together
        )
        found.append(solved(task, tensors, statistics)[1])
    alone, at_once = found
    assert torch.equal(alone.kept, at_once.kept)
    torch.testing.assert_close(at_once.weight, alone.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(at_once.energies, alone.energies, rtol=1e-6, atol=1e-6)
    for one in ("condition_number", "max_interpolation", "damping", "eigenvalue_fallback"):
        assert getattr(at_once, one) == pytest.approx(getattr(alone, one), rel=1e-3), one
    assert alone.eigenvalue_fallback == (trouble == "a singular Gram")


@torch.inference_mode()
def test_kept_neurons_keep_their_rows(model: Model, tmp_path: Path) -> None:
    task, tensors = task_of(model, tmp_path), model.read_layer(0)
    kept, factors = solved(task, tensors, summed(routed(model, tmp_path, 8)))
    folded = task.fold(tensors, factors)
    for expert, columns in enumerate(kept):
        assert columns.tolist() == sorted(set(columns.tolist()))
        expected = torch.cat((tensors[MIXER.gate_up][expert][columns], tensors[MIXER.gate_up][expert][columns + WIDTH]))
        assert torch.equal(folded[MIXER.gate_up][expert], expected)
    assert folded[MIXER.down].shape == (EXPERTS, HIDDEN, KEPT)
    assert torch.equal(folded[f"{MIXER.router}.weight"], tensors[f"{MIXER.router}.weight"])


@torch.inference_mode()
def test_an_expert_without_tokens_keeps_its_strongest_neurons(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task, tensors = task_of(model, tmp_path), model.read_layer(0)
    routing, lost = routed(model, tmp_path, 60)
    elsewhere = replace(routing, chosen=torch.tensor([[0, 1]]).expand(len(routing.inputs), 2))
    statistics = summed((elsewhere, lost))
    assert statistics.num_rows.tolist() == [len(lost), len(lost), 0, 0]
    kept, factors = solved(task, tensors, statistics)
    for expert in (2, 3):
        strongest = tensors[MIXER.down][expert].norm(dim=0).topk(KEPT).indices.sort().values
        assert torch.equal(kept[expert], strongest)
        assert torch.equal(factors.weight[expert], tensors[MIXER.down][expert][:, strongest])
    assert not torch.equal(factors.weight[0], tensors[MIXER.down][0][:, kept[0]])
    task.warn_of_rare(statistics)
    assert "Layer 0: 2 of 4 experts (2, 3) got no calibration token" in caplog.text
    assert "saw fewer" not in caplog.text


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [1, WIDTH // 4, WIDTH - 1])
def test_an_expert_with_few_tokens_is_corrected_by_a_ridge_that_grows(
    tokens: int, model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Against the normal equations in float64, without a share of the dense stream's residual."""
    task, tensors = task_of(model, tmp_path, correction="two-stream"), model.read_layer(0)
    routing, lost = routed(model, tmp_path, 60)
    chosen = torch.tensor([[0, 1]]).repeat(len(routing.inputs), 1)
    chosen[:tokens, 1] = 2
    statistics = summed((replace(routing, chosen=chosen), lost))
    assert statistics.num_rows.tolist() == [len(lost), len(lost) - tokens, tokens, 0]
    kept, factors = solved(task, tensors, statistics)
    gram, down, columns = statistics.grams[2].double(), tensors[MIXER.down][2].double(), kept[2]
    own = gram[columns][:, columns]
    ridge = task.method.expert_damping * 16 * WIDTH / tokens * own.diagonal().mean()
    change = torch.linalg.solve(own + ridge * torch.eye(KEPT), gram[columns] @ down.mT - own @ down[:, columns].mT)
    torch.testing.assert_close(factors.weight[2].double(), down[:, columns] + change.mT, rtol=1e-4, atol=1e-5)
    assert float(change.abs().max()) > 1e-3
    task.warn_of_rare(statistics)
    assert "Layer 0: 1 of 4 experts (3) got no calibration token" in caplog.text
    assert "Layer 0: 1 of 4 experts (2) saw fewer calibration tokens than their 32 neurons" in caplog.text


def test_removed_experts_that_the_text_does_not_know_are_told(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sums = ExpertSums(EXPERTS)
    sums.tokens += torch.tensor([400, 0, WIDTH - 1, WIDTH])
    task = task_of(model, tmp_path)
    warn_of_removed(task, torch.tensor([0]), sums)
    assert (
        "Layer 0: 2 of the 3 removed experts (1, 2) got fewer calibration tokens than their 32 neurons, and 1 none"
        in (caplog.text)
    )
    caplog.clear()
    warn_of_removed(task, torch.tensor([0, 1, 2]), sums)
    assert not caplog.text


@pytest.mark.parametrize("selector", ["id", "obs", "activation-norm", "wanda", "magnitude", "random"])
def test_every_selector_has_a_whole_run(
    selector: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    config = make_config(make_checkpoint(**OPTIONS), ffn=selector, correction="none", sparsity=0.2)
    report = compress(config)
    stored = load_file(Path(config.output) / "model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == report.stored_parameters["compressed"]
    assert stored["model.layers.1.mlp.experts.3.down_proj.weight"].shape[1] < WIDTH


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sketch": "count"}, "set sketch=none and pivoting=cholesky"),
        ({"ffn": "flap"}, "choose another selector"),
        ({"damping": "auto"}, "give a number"),
        ({"up_steps": 2}, "leave it out"),
        ({"allocation": "stat", "form": "per-layer"}, "choose another"),
        ({"budget": "latency"}, "another budget"),
        ({"form": "gguf"}, "use --form per-layer"),
        ({"hidden": "pca", "ffn": "none"}, "whose hidden size stays"),
        ({"correction": "bias"}, "choose another correction"),
        ({"round_to": 4}, "not a multiple of 8"),
        ({"experts": "effects"}, "Give --set num_experts="),
        ({"num_experts": 3}, "add --set experts=effects"),
        (
            {"experts": "effects", "expert_counts": "sensitivity"},
            "--set expert_counts=sensitivity needs --form per-layer",
        ),
        ({"experts": "reap", "expert_counts": "sensitivity", "form": "per-layer"}, "needs experts=effects"),
        (
            {"experts": "effects", "expert_counts": "sensitivity", "form": "per-layer", "num_experts": 3},
            "--set num_experts=3 is for all layers",
        ),
        ({"experts": "reap", "num_experts": 1}, "between the 2 experts of a token and the model's 4"),
        ({"experts": "reap", "ffn": "none", "sparsity": 0.9}, "ask for a smaller --sparsity"),
        ({"intermediate_size": 12, "sparsity": None}, "not a multiple of 8"),
    ],
    ids=str,
)
def test_what_a_mixture_cannot_have_is_one_sentence(
    changes: dict[str, Any], sentence: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    with pytest.raises(OneshotError, match=sentence) as refusal:
        compress(make_config(make_checkpoint(**OPTIONS), **changes))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("correction", ["same-layer", "two-stream"])
@torch.inference_mode()
def test_experts_that_stay_take_over_what_the_others_did(
    correction: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """The downs of the first layer solve its normal equations towards the whole mixture, from weights and text alone.

    The stream before the first mixture is the dense one, so both targets are what the whole mixture adds.
    """
    folder = make_checkpoint(**OPTIONS)
    options = {"experts": "frequency", "ffn": "none", "num_experts": 3, "sparsity": None, "num_sequences": 48}
    config = make_config(folder, correction=correction, batch_size=48, **options)
    compress(config)
    dense, smaller = (AutoModelForCausalLM.from_pretrained(place).eval() for place in (folder, config.output))
    text = calibration_tokens(config)
    read: list[torch.Tensor] = []
    block, new = (model.model.layers[0].mlp for model in (dense, smaller))
    block.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].flatten(0, 1)))
    dense(text)
    inputs = read[0]
    _, gates, chosen = block.gate(inputs)
    counts = chosen.flatten().bincount(minlength=EXPERTS)
    kept = [expert for expert in range(EXPERTS) if expert != int(counts.argmin())]
    assert torch.equal(new.gate.weight, block.gate.weight[kept])
    assert torch.equal(new.experts.gate_up_proj, block.experts.gate_up_proj[kept])
    _, gates, chosen = new.gate(inputs)
    uncorrected = torch.zeros_like(inputs)
    rows: list[tuple[torch.Tensor, torch.Tensor]] = []
    for place, expert in enumerate(kept):
        tokens, slots = (chosen == place).nonzero(as_tuple=True)
        gate, up = (inputs[tokens] @ block.experts.gate_up_proj[expert].T).chunk(2, dim=1)
        weighted = gates[tokens, slots].unsqueeze(1) * functional.silu(gate) * up
        uncorrected[tokens] += weighted @ block.experts.down_proj[expert].T
        rows.append((tokens, weighted.double()))
    lost = (block(inputs.unsqueeze(0))[0] - uncorrected).double()
    squares = gates.double().square().sum(1)
    for place, (tokens, weighted) in enumerate(rows):
        own = gates[tokens][chosen[tokens] == place].double()
        share = lost[tokens] * (own.square() / squares[tokens]).unsqueeze(1)
        damping = config.method.expert_damping * max(1.0, 16 * WIDTH / len(tokens))
        gram = weighted.T @ weighted
        gram += damping * gram.diagonal().mean() * torch.eye(WIDTH, dtype=torch.float64)
        step = torch.linalg.solve(gram, weighted.T @ share).T
        expected = block.experts.down_proj[kept[place]].double() + step
        torch.testing.assert_close(new.experts.down_proj[place].double(), expected, rtol=1e-3, atol=1e-4)
        assert float(step.norm()) > 1e-2


@pytest.mark.parametrize(
    ("selector", "correction"),
    [
        *((selector, "none") for selector in get_args(ExpertSelector)),
        ("effects", "two-stream"),
        ("random", "two-stream"),
    ],
)
def test_every_selector_of_experts_has_a_whole_run(
    selector: str, correction: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    folder = make_checkpoint(**OPTIONS)
    config = make_config(folder, experts=selector, ffn="none", correction=correction, sparsity=0.1)
    predicted, report = predict(config), compress(config)
    stored, dense = (load_file(place / "model.safetensors") for place in (Path(config.output), folder))
    total = sum(tensor.numel() for tensor in stored.values())
    assert total == report.stored_parameters["compressed"] == predicted.stored_parameters["compressed"]
    assert [one.kept_size for layer in report.layers for one in layer.sublayers if one.kind == "experts"] == [3, 3]
    for layer in (0, 1):
        rows, whole = (tensors[f"model.layers.{layer}.mlp.gate.weight"] for tensors in (stored, dense))
        numbers = [int((whole == row).all(1).nonzero()) for row in rows]
        assert numbers == sorted(set(numbers)), "rows of the router stay in their order"
        for number, old in enumerate(numbers):
            name = f"model.layers.{layer}.mlp.experts.{{}}.{{}}_proj.weight"
            assert torch.equal(stored[name.format(number, "up")], dense[name.format(old, "up")])
            same = torch.equal(stored[name.format(number, "down")], dense[name.format(old, "down")])
            assert same == (correction == "none")


@torch.inference_mode()
def test_a_router_that_weighs_otherwise_is_refused(model: Model, tmp_path: Path) -> None:
    routing, _ = routed(model, tmp_path, 2)
    task = task_of(model, tmp_path)
    layer = LayerBuilder(model, task.machine, 24).layer(0, model.read_layer(0))
    normed = replace(routing, gates=routing.gates / routing.gates.sum(1, keepdim=True))
    others = replace(routing, chosen=routing.chosen.roll(1, 0), gates=routing.gates.roll(1, 0))
    add_effects_(ExpertSums(EXPERTS), task, layer, routing)
    for wrong in (normed, others):
        with pytest.raises(CheckpointError, match="layer 0 weighs experts otherwise"):
            add_effects_(ExpertSums(EXPERTS), task, layer, wrong)


@pytest.mark.parametrize("offset", [0.0, 34.5])
@pytest.mark.parametrize("name", ["lfm2_moe", "minimax_m2"])
@torch.inference_mode()
def test_ties_of_a_rounding_router_are_its_own(
    name: str, offset: float, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """In bfloat16 one class rounds its scores, and the other its biases."""
    folder = make_checkpoint(**CASES[name].options)
    model, machine = open_model(str(folder), tmp_path), cpu_machine(tmp_path, dtype=torch.bfloat16)
    number = model.shape.num_hidden_layers - 1
    stack, mixer = model.family.stack_of(number), model.family.stack.experts
    assert mixer is not None
    assert mixer.chosen_by is not None
    spread = 0.01 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(0))
    tensors = model.read_layer(number) | {mixer.chosen_by: offset + spread}
    layer = LayerBuilder(model, machine, 512).layer(number, tensors)
    routing = layer.route(1, torch.randn(16, 512, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16())
    task = replace(task_of(model, tmp_path), stack=stack, layer=number)
    sums = ExpertSums(EXPERTS)
    add_effects_(sums, task, layer, routing)
    assert torch.equal(sums.tokens, routing.counts.double())
