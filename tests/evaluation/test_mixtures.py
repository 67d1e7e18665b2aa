"""benchmarks' mixtures: stock classes load what is trained and split, and corrections recover what they can."""

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scipy.optimize import minimize
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

TINY: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids).logits


@pytest.fixture
def qwen3() -> Any:
    torch.manual_seed(0)
    sizes = {"moe_intermediate_size": 12, "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=40, initializer_range=0.3, **TINY, **sizes))
    return model.eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(40, (8, 64), generator=torch.Generator().manual_seed(1))


def test_a_trained_mixture_is_a_stock_checkpoint(
    benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = benchmark_module("train_mixture")
    tiny = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    monkeypatch.setattr(module, "SHAPE", TINY | tiny)
    monkeypatch.setattr(module, "VOCABULARY", 300)
    monkeypatch.setattr(module, "LENGTH", 32)
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "append_row", lambda _, row: rows.append(row))
    texts = [{"text": f"number {number} is {'even' if number % 2 == 0 else 'odd'}. " * 8} for number in range(30)]
    (tmp_path / "general.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    steps = ["--steps", "3", "--every", "2", "--threads", "1"]
    monkeypatch.setattr("sys.argv", ["", str(tmp_path / "it"), "--data-dir", str(tmp_path), *steps])
    module.main()
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "it", output_loading_info=True)
    assert type(model) is Qwen3MoeForCausalLM
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    known, left_out = (
        {json.loads(line)["text"] for line in (tmp_path / f"it-{part}.jsonl").read_text().splitlines()}
        for part in ("calibration", "evaluation")
    )
    assert known
    assert left_out
    assert not known & left_out
    assert [row.get("step") for row in rows] == [2, 3, None]
    assert all(sum(counts) == 2 * rows[-1]["held_out_tokens"] for counts in rows[-1]["expert_tokens"])
    text = torch.randint(model.config.vocab_size, (8, 32), generator=torch.Generator().manual_seed(0))
    by_engine = benchmark_module("mixtures").by_engine
    narrow, kept = by_engine(
        tmp_path / "it", tmp_path / "narrow", text, {"intermediate_size": 8}, {"correction": "same-layer"}, 0
    )
    assert type(narrow) is Qwen3MoeForCausalLM
    assert narrow.config.moe_intermediate_size == 8
    assert kept == sum(parameter.numel() for parameter in narrow.parameters())


@pytest.mark.parametrize(
    ("dense_class", "num_shared"), [(LlamaForCausalLM, 0), (LlamaForCausalLM, 16), (Qwen2ForCausalLM, 16)]
)
def test_a_split_model_with_all_experts_active_is_the_dense_model(
    benchmark_module: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    dense_class: type[Any],
    num_shared: int,
    ids: torch.Tensor,
) -> None:
    module = benchmark_module("split_mixture")
    monkeypatch.setattr(module, "SPREAD", 1e-6)
    torch.manual_seed(0)
    sizes = TINY | {"vocab_size": 40, "intermediate_size": 32, "initializer_range": 0.3, "tie_word_embeddings": True}
    dense = dense_class(dense_class.config_class(**sizes)).eval()
    with torch.inference_mode():
        for name, parameter in dense.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
        inputs = module.ffn_inputs(dense, ids)
        sizes = {"num_experts": 4, "num_shared": num_shared, "seed": 0}
        ffns = [
            module.split(layer.mlp, states, top_k=4, **sizes)
            for layer, states in zip(dense.model.layers, inputs, strict=True)
        ]
        whole = module.mixture(dense, ffns, 4)
    for ffn in ffns:
        assert sorted([*ffn.shared.tolist(), *ffn.experts.flatten().tolist()]) == list(range(32))
        assert ffn.captured == pytest.approx((1.0, 1.0))
        assert ffn.tokens == [ids.numel()] * 4
    assert torch.allclose(logits(whole, ids), logits(dense, ids), atol=1e-4)


def test_clusters_have_equal_sizes_and_find_columns_that_are_alike(
    benchmark_module: Callable[[str], ModuleType],
) -> None:
    module = benchmark_module("split_mixture")
    torch.manual_seed(0)
    kinds = torch.arange(3).repeat_interleave(5)[torch.randperm(15)]
    patterns = (torch.rand(200, 3) < 0.3).float()
    strong = (patterns[:, kinds] + (torch.rand(200, 15) < 0.05).float()).clamp_max(1)
    found = module.clusters(strong, 3, seed=0)
    assert found.shape == (3, 5)
    assert sorted(found.flatten().tolist()) == list(range(15))
    assert all(len(set(kinds[members].tolist())) == 1 for members in found)


def test_nothing_removed_is_the_same_model(
    benchmark_module: Callable[[str], ModuleType], qwen3: Any, ids: torch.Tensor
) -> None:
    module = benchmark_module("mixture_parts")
    same = module.without_parts(qwen3, [torch.arange(5)] * 2, [torch.arange(12).expand(5, -1)] * 2)
    assert torch.equal(logits(same, ids), logits(qwen3, ids))


def test_removed_experts_are_as_if_never_chosen(
    benchmark_module: Callable[[str], ModuleType], qwen3: Any, ids: torch.Tensor
) -> None:
    module = benchmark_module("mixture_parts")
    kept = [torch.tensor([0, 2, 4]), torch.tensor([1, 2, 3])]
    smaller = module.without_parts(qwen3, kept, None)
    assert smaller.config.num_experts == 3

    def never(experts: torch.Tensor) -> Callable[..., Any]:
        def hook(router: Any, given: Any, result: Any) -> Any:
            values = torch.full_like(result[0], -torch.inf)
            values[:, experts] = result[0][:, experts]
            gates, chosen = values.softmax(-1).topk(2)
            return values, gates / gates.sum(-1, keepdim=True), chosen

        return hook

    for layer, experts in zip(qwen3.model.layers, kept, strict=True):
        layer.mlp.gate.register_forward_hook(never(experts))
    assert torch.allclose(logits(smaller, ids), logits(qwen3, ids), atol=1e-5)


@pytest.mark.parametrize("how", ["separable", "joint"])
def test_what_others_can_do_is_recovered(
    benchmark_module: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    qwen3: Any,
    ids: torch.Tensor,
    how: str,
) -> None:
    """Four neurons of every expert are copies of others, which are enough; without the correction they are not."""
    module = benchmark_module("mixture_parts")
    monkeypatch.setattr(module, "DAMPING", 1e-9)
    with torch.inference_mode():
        for layer in qwen3.model.layers:
            gate, up = layer.mlp.experts.gate_up_proj.chunk(2, dim=1)
            gate[:, 8:], up[:, 8:] = gate[:, :4].clone(), up[:, :4].clone()
        whole = logits(qwen3, ids)
        smaller = module.without_parts(qwen3, None, [torch.arange(8).expand(5, -1)] * 2)
        assert not torch.allclose(logits(smaller, ids), whole, atol=0.1)
        module.correct_(smaller, qwen3, ids, how, 1.0, None)
        assert torch.allclose(logits(smaller, ids), whole, atol=1e-2)


def test_pairs_are_means_over_the_tokens_that_have_both(
    benchmark_module: Callable[[str], ModuleType], qwen3: Any, ids: torch.Tensor
) -> None:
    parts = benchmark_module("mixture_parts")
    with torch.inference_mode():
        first = parts.sums_of_layers(qwen3, ids)[0]
        states, others = parts.layer_inputs(qwen3, ids)
        layer = qwen3.model.layers[0]
        _, inputs = parts.with_input(layer, states, others[0])
        _, gates, chosen = layer.mlp.gate(inputs)
        of_one = parts.one_expert(layer.mlp)
        norms = torch.stack([of_one(expert, inputs).norm(dim=1) for expert in range(5)], 1)
    products: dict[tuple[int, int], list[float]] = {}
    for token, experts in enumerate(chosen.tolist()):
        sizes = {expert: float(gates[token, place] * norms[token, expert]) for place, expert in enumerate(experts)}
        for one, size in sizes.items():
            for other, its in sizes.items():
                products.setdefault((one, other), []).append(size * its)
    for one in range(5):
        for other in range(5):
            found = products.get((one, other), [0.0])
            assert float(first.pairs.interactions()[one, other]) == pytest.approx(sum(found) / len(found), rel=1e-4)


def test_the_set_that_goes_has_the_least_form(benchmark_module: Callable[[str], ModuleType]) -> None:
    """Experts 0 and 1 are the smallest by themselves, and serve the same tokens."""
    hope = benchmark_module("mixture_hope")
    form = torch.diag(torch.tensor([1.0, 1.1, 2.0, 9.0, 8.0, 7.0], dtype=torch.float64))
    form[0, 1] = form[1, 0] = 50.0
    costs = {pair: float(form[list(pair)][:, list(pair)].sum()) for pair in combinations(range(6), 2)}
    assert tuple(hope.removed_by_pairs(form, 2)) == min(costs, key=lambda pair: costs[pair]) == (0, 2)
    assert hope.removed_by_pairs(torch.diag(form.diagonal()), 2) == [0, 1]


@pytest.mark.parametrize("top_k", [2, 3])
def test_ideal_gates_are_the_least_squares_of_convex_combinations(
    top_k: int, benchmark_module: Callable[[str], ModuleType]
) -> None:
    router = benchmark_module("mixture_router")
    generator = torch.Generator().manual_seed(0)
    outputs, wanted = (torch.randn(4, *size, generator=generator).double() for size in ((5, 6), (6,)))
    gates = router.ideal_gates(outputs, wanted, top_k)
    assert torch.allclose(gates.sum(1), torch.ones(4, dtype=torch.float64))
    for token in range(4):
        errors = []
        for members in map(list, combinations(range(5), top_k)):
            own, y = outputs[token, members].numpy(), wanted[token].numpy()

            def error(g: Any, own: Any = own, y: Any = y) -> float:
                return float(((y - g @ own) ** 2).sum())

            found = minimize(
                error,
                [1 / top_k] * top_k,
                method="SLSQP",
                bounds=[(0, 1)] * top_k,
                constraints={"type": "eq", "fun": lambda g: g.sum() - 1},
                options={"ftol": 1e-12},
            )
            errors.append(found.fun)
        ours = float((wanted[token] - gates[token] @ outputs[token]).square().sum())
        assert (gates[token] >= 0).all()
        assert int((gates[token] > 0).sum()) <= top_k
        assert ours == pytest.approx(min(errors), rel=1e-4)


def test_the_router_s_step_solves_the_linearised_least_squares(
    benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, qwen3: Any
) -> None:
    """The Jacobian of the stock block in its router's rows is automatic differentiation's."""
    parts, router = benchmark_module("mixture_parts"), benchmark_module("mixture_router")
    monkeypatch.setattr(parts, "DAMPING", 1e-6)
    generator = torch.Generator().manual_seed(0)
    block, inputs, target = qwen3.model.layers[0].mlp, *(torch.randn(12, 16, generator=generator) for _ in range(2))
    weight = block.gate.weight

    def written(rows: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(block, {"gate.weight": rows}, (inputs[None],))[0].flatten()

    jacobian = torch.func.jacrev(written)(weight.detach()).flatten(1).detach().double()
    missing = (target.flatten() - written(weight)).detach().double()
    gram = jacobian.mT @ jacobian
    ridge = 1e-6 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    expected = torch.linalg.solve(gram + ridge, jacobian.mT @ missing).view(5, 16)
    with torch.inference_mode():
        change = router.newton_rows(block, qwen3.config, inputs, target)
        cheaper = router.kronecker_rows(block, qwen3.config, inputs, target)
    assert torch.allclose(jacobian @ change.flatten(), jacobian @ expected.flatten(), atol=1e-3)
    moved = jacobian @ cheaper.flatten()
    assert float(moved @ (missing - moved)) == pytest.approx(0, abs=1e-3), "its length is the best along its direction"
    left = [float((missing - each).square().sum()) for each in (jacobian @ change.flatten(), moved, 0 * moved)]
    assert left[0] < left[1] < left[2]


@pytest.mark.parametrize(("how", "less"), [("gain", 0.95), ("ideal", 0.95), ("newton", 0.98), ("kronecker", 0.98)])
def test_a_corrected_router_writes_what_is_asked_for_more_nearly(
    how: str, less: float, benchmark_module: Callable[[str], ModuleType], qwen3: Any
) -> None:
    """What is asked for is the block's own output with another router, or with other factors of its experts."""
    router = benchmark_module("mixture_router")
    generator = torch.Generator().manual_seed(0)
    inputs, block = torch.randn(400, 16, generator=generator), qwen3.model.layers[0].mlp
    with torch.inference_mode():
        before, rows = block(inputs[None])[0], block.gate.weight.clone()
        block.gate.weight += 0.1 * rows.abs().mean() * torch.randn(5, 16, generator=generator)
        downs = block.experts.down_proj.clone()
        block.experts.down_proj *= torch.tensor([1.5, 0.7, 1.0, 1.2, 0.9]).view(-1, 1, 1) if how == "gain" else 1.0
        target = block(inputs[None])[0]
        block.gate.weight.copy_(rows)
        block.experts.down_proj.copy_(downs)
        router.correct_router_(block, qwen3.config, inputs, target, how, 1.0)
        after = block(inputs[None])[0]
    assert float((after - target).norm()) < less * float((before - target).norm())
