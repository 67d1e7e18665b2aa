"""What fewer experts cost: the curve of their joint effects, its sensitivity, and plans of counts beside widths."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, cpu_machine, problem_of, profiled_tokens
from families.cases import CASES
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers import AutoModelForCausalLM

from oneshot.architecture import ExpertSizes
from oneshot.checkpoint import open_model
from oneshot.compression.expert_scores import ExpertSums, removed_experts
from oneshot.export.resized import ResizedForm
from oneshot.pipeline import compress, profile
from oneshot.planning import LayerPlan, Plan, expert_counts, profiled_damages, reduced
from oneshot.planning.damages import CORRECTED_SHARE
from oneshot.profiling.expert_counts import count_curve, probed_count
from oneshot.profiling.expert_profile import MixtureSums, experts_task
from oneshot.stream import LayerBuilder

OPTIONS = CASES["qwen3_moe"].options | {"num_experts": 6}


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), count=st.sampled_from([5, 8, 40]), rank=st.integers(1, 12))
def test_a_curve_has_the_effects_of_the_sets_that_go(seed: int, count: int, rank: int) -> None:
    """It falls from one to zero, and is exact where one expert goes; below what a token needs it is one."""
    experts = ExpertSizes(count=count, per_token=2)
    rows = torch.randn(count, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sums = ExpertSums(count)
    sums.effects, sums.peaks = rows @ rows.T, torch.ones(count)
    (curve, most), counts = count_curve(sums, experts), expert_counts(experts)
    assert curve.shape == (count + 1,)
    assert float(curve[counts[0]]) == 1
    assert (curve[: counts[0]] == 1).all()
    assert float(curve[-1]) == 0
    assert (curve.diff() <= 1e-12).all()
    assert counts[-1] == count
    assert counts[0] - experts.per_token < counts[1] - counts[0]

    def change(kept: int) -> float:
        gone = removed_experts("effects", sums, count - kept, torch.Generator())
        return float(rows[gone].sum(0).square().sum())

    changes = np.maximum.accumulate([change(kept) for kept in counts[::-1]])[::-1]
    np.testing.assert_allclose(curve[counts].numpy(), changes / changes[0], rtol=1e-9, atol=1e-12)
    assert most == pytest.approx(changes[0], rel=1e-9)
    if count == 5:
        smallest = float(sums.effects.diagonal().min())
        assert float(curve[count - 1]) == pytest.approx(smallest / changes[0], abs=1e-12)


def without(folder: Path, layer: int, kept: list[int]) -> Any:
    """Return the stock model whose layer has these experts alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    block = model.model.layers[layer].mlp
    for holder, name in ((block.gate, "weight"), (block.experts, "gate_up_proj"), (block.experts, "down_proj")):
        setattr(holder, name, torch.nn.Parameter(getattr(holder, name)[kept]))
    block.gate.num_experts = block.experts.num_experts = len(kept)
    return model


@torch.no_grad()
def test_the_sensitivity_equals_the_divergence_of_the_whole_model(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Against transformers' model with these experts alone in one layer, on the sequences of the probes."""
    folder = make_checkpoint(**OPTIONS)
    config = make_config(folder, form="per-layer", curvature="none", output=str(tmp_path / "profile"))
    found, (rest, probes) = profile(config), profiled_tokens(config)
    assert found.expert_errors.shape == (2, 7)
    model, machine = open_model(str(folder), tmp_path), cpu_machine(tmp_path)
    assert model.shape.experts is not None
    stock = without(folder, 0, list(range(6)))
    states = stock.model(rest, output_hidden_states=True).hidden_states
    dense = stock(probes).logits.double().log_softmax(-1)
    for number in range(2):
        tensors = model.read_layer(number)
        layer = LayerBuilder(model, machine, rest.shape[1]).layer(number, tensors)
        sums = MixtureSums(experts_task(model, machine, number, 16), tensors, ("experts",))
        sums.update_(layer, layer.run(0, states[number]))
        effects = sums.effects(machine.workers)
        assert effects is not None
        assert sums.statistics(machine.workers) is None, "only whole experts are measured"
        torch.testing.assert_close(
            found.expert_errors[number], count_curve(effects, model.shape.experts)[0], rtol=1e-4, atol=1e-6
        )
        kept_count = probed_count(model.shape.experts)
        assert kept_count is not None
        gone = removed_experts("effects", effects, 6 - kept_count, torch.Generator())
        reduced = without(folder, number, [expert for expert in range(6) if expert not in gone])
        found_logits = reduced(probes).logits.double().log_softmax(-1)
        divergence = functional.kl_div(found_logits, dense, log_target=True, reduction="sum") / probes.numel()
        predicted = found.expert_sensitivity[number] * found.expert_errors[number, kept_count]
        assert float(predicted) == pytest.approx(float(divergence), rel=1e-3)
    damages = profiled_damages(found, "sensitivity", ResizedForm().grid(model))
    expected = CORRECTED_SHARE * found.expert_sensitivity[:, None] * found.expert_errors
    torch.testing.assert_close(damages["num_experts"], expected)


def best_of_all(lost: Sequence[np.ndarray], sizes: Sequence[int], most: float) -> float:
    """Return the least sum of damages of two layers whose sizes are together at most `most`."""
    pairs = itertools.product(range(len(sizes)), repeat=2)
    return min((lost[0][a] + lost[1][b] for a, b in pairs if sizes[a] + sizes[b] <= most), default=np.inf)


@pytest.fixture(scope="module")
def mixture(make_checkpoint: MakeCheckpoint) -> Any:
    folder = make_checkpoint(**OPTIONS)
    return open_model(str(folder), folder)


@given(seed=st.integers(0, 10**6), share=st.floats(0.3, 0.98), narrows=st.booleans())
@settings(max_examples=20)
def test_plans_are_the_best_of_all(mixture: Any, seed: int, share: float, narrows: bool) -> None:
    """Compare with every pair of counts and widths, on curves that fall with the size."""
    shape, generator = mixture.shape, np.random.default_rng(seed)

    def curves(size: int) -> np.ndarray:
        falling = np.sort(generator.random((2, size)), axis=-1)[..., ::-1].copy()
        falling[..., -1] = 0
        return falling

    ffn, experts = curves(33), curves(7)
    known = {"ffn": ffn, "heads": curves(3), "layers": np.ones(2), "num_experts": experts}
    damages = {name: torch.from_numpy(one) for name, one in known.items()}
    widths = (8, 16, 24, 32) if narrows else (32,)
    options = list(itertools.product(widths, range(2, 7)))
    sizes = [count * (3 * width * 32 + 32) for width, count in options]
    lost = [np.array([ffn[layer, width] + experts[layer, count] for width, count in options]) for layer in range(2)]
    dense = shape.stack().stored_parameters()
    outside = dense - 2 * max(sizes)
    target = outside + share * 2 * max(sizes)
    wanted = best_of_all(lost, sizes, target - outside)
    assume(np.isfinite(wanted))
    grid = ResizedForm().grid(mixture)
    options: dict[str, Any] = {"ffn": "id" if narrows else "none", "experts": "effects"}
    problem = problem_of(grid, target, damages, round_to=8, expert_counts="sensitivity", **options)
    whole = LayerPlan(32, shape.num_attention_heads, shape.num_key_value_heads)
    plan = reduced(problem, Plan((whole,) * 2, "query-head"))
    assert grid.stack(plan).stored_parameters() <= target
    found = sum(
        ffn[layer, kept.intermediate_size] + experts[layer, kept.num_experts] for layer, kept in enumerate(plan.layers)
    )
    assert found == pytest.approx(wanted, abs=1e-9)


def test_a_stated_number_is_kept_in_every_layer(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    """Without one, experts alone meet the target, each layer with its own number; with one, only widths differ."""
    folder = make_checkpoint(**OPTIONS)
    own = compress(make_config(folder, form="per-layer", experts="effects", ffn="none", sparsity=0.3))
    counts = [layer["num_experts"] for layer in own.plan["layers"]]
    assert min(counts) < 6
    assert own.sparsity["reached"] == pytest.approx(0.3, abs=0.06)
    config = make_config(folder, form="per-layer", experts="effects", num_experts=5, sparsity=0.3, overwrite=True)
    assert {layer["num_experts"] for layer in compress(config).plan["layers"]} == {5}
