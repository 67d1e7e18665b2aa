"""Experts that write through norms of their own (Gemma 4), against float64, derivatives and whole runs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, cpu_machine
from families.cases import variants
from last_states import assert_passes, keep_last_states
from torch.nn import functional
from transformers import AutoModelForCausalLM

from oneshot.architecture import cut
from oneshot.checkpoint import Model, open_model
from oneshot.compression.branch_norm import MixtureNorms
from oneshot.pipeline import compress
from oneshot.profiling.expert_profile import MixtureSums, experts_task
from oneshot.stream import Layer, LayerBuilder

OPTIONS = variants()["gemma4_text-experts"]
BRANCHES = ("mlp.", "post_feedforward_layernorm_1.", "pre_feedforward_layernorm.")


@pytest.fixture
def model(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Model:
    return open_model(str(make_checkpoint(**OPTIONS)), tmp_path)


def layer_of(model: Model, tmp_path: Path, tensors: dict[str, torch.Tensor]) -> tuple[Layer, torch.Tensor]:
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
    return LayerBuilder(model, cpu_machine(tmp_path), 12).layer(0, tensors), x


def without(rows: torch.Tensor, *directions: torch.Tensor) -> torch.Tensor:
    """Return rows without their parts along each of the directions `(tokens, D)`."""
    bases = torch.linalg.qr(torch.stack(directions, 2)).Q
    return rows - (bases @ (bases.mT @ rows.unsqueeze(2))).squeeze(2)


def moved(layer: Layer, model: Model, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return how the stream moves to first order with changes of what the experts write."""
    mixer, routing = model.family.stack.experts, layer.route(1, x)
    assert mixer is not None
    beside = routing.written - layer.after_experts(mixer, routing.mixed)

    def added(mixed: torch.Tensor) -> torch.Tensor:
        return layer.added(1, beside + layer.after_experts(mixer, mixed))

    return lambda change: torch.func.jvp(added, (routing.mixed,), (change,))[1]


def test_tokens_and_outputs_count_as_the_stream_gets_them(model: Model, tmp_path: Path) -> None:
    tensors = model.read_layer(0)
    layer, x = layer_of(model, tmp_path, tensors)
    routing, norms = layer.route(1, x), MixtureNorms.of(model.family.stack_of(0), tensors, torch.device("cpu"))
    assert norms is not None
    gain = tensors["post_feedforward_layernorm_2.weight"]
    change = without(torch.flip(routing.mixed, (0,)), routing.mixed, gain * routing.written)
    expected = moved(layer, model, x)(change)
    assert expected.norm() > 0.1 * change.norm()
    torch.testing.assert_close(
        norms.scales(layer, routing.mixed, routing.written) * change * norms.gain.float(), expected
    )


def test_a_residual_is_taken_back_through_both_norms_to_first_order(model: Model, tmp_path: Path) -> None:
    """With equal gains the stream moves along the residual, but for the radial parts."""
    gains = {"post_feedforward_layernorm.weight": 1.5, "post_feedforward_layernorm_2.weight": 0.7}
    tensors = model.read_layer(0) | {name: torch.full((32,), gain) for name, gain in gains.items()}
    layer, x = layer_of(model, tmp_path, tensors)
    routing, norms = layer.route(1, x), MixtureNorms.of(model.family.stack_of(0), tensors, torch.device("cpu"))
    assert norms is not None
    residual = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
    change = norms.taken_back(residual, routing) / norms.scales(layer, routing.mixed, routing.written)
    tangent = without(without(residual, routing.written), routing.mixed)
    expected = without(tangent, routing.written) / 1.1**2  # SOFT_GAIN takes an eleventh in each
    torch.testing.assert_close(moved(layer, model, x)(change), expected, rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def test_statistics_and_effects_are_those_behind_the_norms(model: Model, tmp_path: Path) -> None:
    """All from the weights, in float64; an effect is what the stream loses without the expert."""
    machine, tensors = cpu_machine(tmp_path), model.read_layer(0)
    task, (layer, x) = experts_task(model, machine, 0, 16), layer_of(model, tmp_path, tensors)
    sums = MixtureSums(task, tensors, ("ffn", "experts"))
    sums.update_(layer, x)
    found, effects = sums.statistics(machine.workers), sums.effects(machine.workers)
    assert found is not None
    assert effects is not None
    weights = {name: tensor.double() for name, tensor in tensors.items()}

    def normed(rows: torch.Tensor) -> torch.Tensor:
        return rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    def linear(rows: torch.Tensor, name: str) -> torch.Tensor:
        return rows @ weights[f"{name}.weight"].T

    rows, norm = x.double().flatten(0, 1), "{}_feedforward_layernorm{}.weight"
    read = normed(rows) * weights[norm.format("pre", "_2")]
    scores = linear(normed(rows) * weights["router.scale"] * 32**-0.5, "router.proj").softmax(1)
    gates, chosen = scores.topk(2)
    gates = gates / gates.sum(1, keepdim=True) * weights["router.per_expert_scale"][chosen]
    mixed, parts = torch.zeros_like(rows), {}
    for expert in range(4):
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (read[tokens] @ weights["experts.gate_up_proj"][expert].T).chunk(2, 1)
        own = gates[tokens, slots].unsqueeze(1) * functional.gelu(gate, approximate="tanh") * up
        parts[expert] = tokens, own, own @ weights["experts.down_proj"][expert].T
        mixed[tokens] += parts[expert][2]
    dense = normed(rows) * weights[norm.format("pre", "")]
    hidden = functional.gelu(linear(dense, "mlp.gate_proj"), approximate="tanh") * linear(dense, "mlp.up_proj")
    beside = normed(linear(hidden, "mlp.down_proj")) * weights[norm.format("post", "_1")]
    both = beside + normed(mixed) * weights[norm.format("post", "_2")]
    scale = ((both.square().mean(1) + 1e-6) * (mixed.square().mean(1) + 1e-6)).rsqrt().unsqueeze(1)
    for expert, (tokens, own, output) in parts.items():
        weighted = scale[tokens] * own
        torch.testing.assert_close(found.grams[expert].double(), weighted.T @ weighted, rtol=1e-3, atol=1e-4)
        assert float(effects.energies[expert]) == pytest.approx(float(output.square().sum()), rel=1e-4)
        kept = torch.tensor([other for other in range(4) if other != expert])
        reduced = cut(tensors, task.mixer.axes(task.shape), {"experts": kept})
        change = layer.sum(1, x) - layer_of(model, tmp_path, reduced)[0].sum(1, x)
        assert float(effects.effects[expert, expert]) == pytest.approx(float(change.square().sum()), rel=1e-3)


@pytest.mark.parametrize("form", ["stock", "per-layer"])
@torch.inference_mode()
def test_whole_experts_go_with_their_numbers_in_the_router(
    form: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, folder = keep_last_states(monkeypatch), make_checkpoint(**OPTIONS)
    config = make_config(folder, form=form, experts="effects", num_experts=3, sparsity=0.2)
    compress(config)
    dense, result = (
        AutoModelForCausalLM.from_pretrained(place, trust_remote_code=form == "per-layer").eval()
        for place in (folder, config.output)
    )
    assert_passes(result, "model.layers", config, last[0])
    assert min(layer.experts.down_proj.shape[2] for layer in result.model.layers) < 32
    for old, new in zip(dense.model.layers, result.model.layers, strict=True):
        assert new.experts.gate_up_proj.shape[:1] == (3,)
        rows = (new.router.proj.weight.unsqueeze(1) == old.router.proj.weight).all(-1).int().argmax(1)
        assert torch.equal(new.router.per_expert_scale, old.router.per_expert_scale[rows])
        stored, whole = new.state_dict(), old.state_dict()
        assert all(torch.equal(stored[name], whole[name]) for name in whole if name.startswith(BRANCHES))
