"""Scores and effects of experts, beside stock mixtures that lack an expert."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from oneshot.compression.expert_scores import (
    EXPERT_SCORES,
    ExpertSums,
    GateRule,
    Routed,
    outputs_of,
    removed_experts,
    route,
    super_experts,
)

HIDDEN, WIDTH, EXPERTS, TOKENS = 6, 5, 7, 40


def qwen3(num_experts: int, top_k: int, normalised: bool) -> nn.Module:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=normalised,
    )
    return Qwen3MoeSparseMoeBlock(config).double()


def mixtral(num_experts: int, top_k: int, normalised: bool) -> nn.Module:
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=num_experts, num_experts_per_tok=top_k
    )
    return MixtralSparseMoeBlock(config).double()


def random_block(make: Callable[..., nn.Module], top_k: int, normalised: bool) -> nn.Module:
    block = make(EXPERTS, top_k, normalised)
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    return block


def without(make: Callable[..., nn.Module], block: nn.Module, top_k: int, normalised: bool, expert: int) -> nn.Module:
    """Return the stock block whose tensors lack an expert."""
    smaller = make(EXPERTS - 1, top_k, normalised)
    others = [other for other in range(EXPERTS) if other != expert]
    smaller.load_state_dict({name: tensor[others] for name, tensor in block.state_dict().items()})
    return smaller


def output(block: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the block's output of `(t, d)`."""
    return block(inputs[None])[0]


def expert_output(block: nn.Module) -> Callable[[range, torch.Tensor], torch.Tensor]:
    """Return a function that calls the stock experts with one expert for every row, at a gate of 1."""

    def call(experts: range, rows: torch.Tensor) -> torch.Tensor:
        count, length, size = rows.shape
        numbers = torch.tensor(experts).repeat_interleave(length).unsqueeze(1)
        ones = torch.ones(count * length, 1, dtype=rows.dtype)
        return block.experts(rows.flatten(0, 1), numbers, ones).view(count, length, size)  # type: ignore[operator]

    return call


@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize(("make", "rule"), [(qwen3, "normalised"), (qwen3, "softmax"), (mixtral, "normalised")])
def test_effects_are_the_differences_from_stock_mixtures_without_the_expert(
    make: Callable[..., nn.Module], rule: GateRule, top_k: int
) -> None:
    torch.manual_seed(0)
    block = random_block(make, top_k, rule == "normalised")
    inputs = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    with torch.inference_mode():
        scores = (inputs @ block.gate.weight.mT).softmax(-1)  # type: ignore[union-attr, operator]
        whole = output(block, inputs)
        effects = torch.stack(
            [whole - output(without(make, block, top_k, rule == "normalised", e), inputs) for e in range(EXPERTS)]
        )
        expected = torch.einsum("itd,jtd->ij", effects, effects)
        sums = ExpertSums(EXPERTS)
        for part in (slice(0, 17), slice(17, 18), slice(18, TOKENS)):
            routed = route(scores[part], top_k, rule)
            sums.add_(routed, outputs_of(routed, inputs[part], expert_output(block)))
    assert torch.allclose(sums.effects, expected, rtol=1e-4, atol=1e-5 * float(expected.max()))
    assert float(sums.tokens.sum()) == TOKENS * top_k


def test_independent_gates_and_a_preference() -> None:
    """Sigmoid gates, chosen with a bias: without an expert, one that has no bias for it would be chosen."""
    torch.manual_seed(1)
    scores, bias = torch.rand(TOKENS, EXPERTS, dtype=torch.float64), torch.randn(EXPERTS, dtype=torch.float64)
    outputs = torch.randn(EXPERTS, TOKENS, HIDDEN, dtype=torch.float64)

    def mixture(experts: list[int]) -> torch.Tensor:
        rows = []
        for token in range(TOKENS):
            best = sorted(experts, key=lambda e: -float(scores[token, e] + bias[e]))[:2]
            rows.append(sum(scores[token, e] * outputs[e, token] for e in best))
        return torch.stack(rows)  # type: ignore[arg-type]

    everyone = list(range(EXPERTS))
    effects = torch.stack([mixture(everyone) - mixture([e for e in everyone if e != one]) for one in everyone])
    routed = route(scores, 2, "independent", scores + bias)
    sums = ExpertSums(EXPERTS)
    sums.add_(routed, outputs[routed.experts, torch.arange(TOKENS)[:, None]].float())
    expected = torch.einsum("itd,jtd->ij", effects, effects)
    assert torch.allclose(sums.effects, expected, rtol=1e-4, atol=1e-5 * float(expected.max()))


def test_scores_are_sums_over_routed_tokens() -> None:
    """Compare with loops over tokens; the expert that steps in does not count, and an expert may have no token."""
    torch.manual_seed(2)
    scores = torch.rand(TOKENS, EXPERTS)
    scores[:, 3] = 0
    outputs = torch.randn(TOKENS, 3, HIDDEN)
    routed = route(scores, 2, "normalised")
    sums = ExpertSums(EXPERTS)
    sums.add_(routed, outputs)
    norms: list[list[tuple[float, float]]] = [[] for _ in range(EXPERTS)]
    peaks = [0.0] * EXPERTS
    for token in range(TOKENS):
        first, second = scores[token].argsort(descending=True)[:2].tolist()
        total = float(scores[token, first] + scores[token, second])
        for place, expert in enumerate((first, second)):
            one = outputs[token, place]
            norms[expert].append((float(scores[token, expert]) / total, float(one.norm())))
            peaks[expert] = max(peaks[expert], float(one.abs().max()))

    def loop(score: Callable[[list[tuple[float, float]]], float]) -> torch.Tensor:
        return torch.tensor([score(rows) if rows else 0.0 for rows in norms], dtype=torch.float64)

    generator = torch.Generator()
    for selector, expected in (
        ("frequency", loop(len)),
        ("reap", loop(lambda rows: sum(gate * norm for gate, norm in rows) / len(rows))),
        ("man", loop(lambda rows: sum(norm for _, norm in rows) / len(rows))),
        ("energy", loop(lambda rows: sum((gate * norm) ** 2 for gate, norm in rows))),
    ):
        assert torch.allclose(EXPERT_SCORES[selector](sums, generator), expected), selector  # type: ignore[index]
        assert removed_experts(selector, sums, 1, generator, keep_super=False) == [3]  # type: ignore[arg-type]
    assert sums.peaks.tolist() == pytest.approx(peaks)


def test_super_experts_are_kept_as_far_as_others_are_enough() -> None:
    sums = ExpertSums(5)
    sums.peaks = torch.tensor([1.0, 0.0, 50.0, 2.0, 3.0])
    sums.effects = torch.diag(torch.tensor([4.0, 1.0, 0.5, 3.0, 2.0], dtype=torch.float64))
    generator = torch.Generator()
    assert super_experts(sums.peaks).tolist() == [False, False, True, False, False]
    assert not super_experts(torch.zeros(3)).any()
    assert removed_experts("effects", sums, 2, generator) == [1, 4]
    assert removed_experts("effects", sums, 2, generator, keep_super=False) == [1, 2]
    assert removed_experts("energy", sums, 2, generator) == [0, 1]
    assert removed_experts("effects", sums, 5, generator) == [0, 1, 2, 3, 4]
    draws = [removed_experts("random", sums, 3, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1, 2, 3)]
    assert draws[0] == draws[1]
    assert len({tuple(draw) for draw in draws}) > 1


def test_a_mixture_with_all_experts_active_has_no_effects() -> None:
    with pytest.raises(ValueError, match="no expert can be removed if all 4 are active"):
        route(torch.rand(2, 4), 4, "normalised")


def test_routed_is_what_the_stock_router_gives() -> None:
    block = random_block(qwen3, 3, True)
    inputs = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    with torch.inference_mode():
        logits, gates, experts = block.gate(inputs)  # type: ignore[operator]
        routed: Routed = route(logits.softmax(-1), 3, "normalised")
    assert torch.equal(routed.experts[:, :3], experts)
    assert torch.allclose(routed.gates.double(), gates, atol=1e-6)
