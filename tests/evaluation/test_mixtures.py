"""benchmarks' mixtures: stock classes load what is trained and split, and corrections recover what they can."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

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
    narrow = by_engine(
        tmp_path / "it", tmp_path / "narrow", text, {"intermediate_size": 8}, {"correction": "same-layer"}, 0
    )
    assert type(narrow) is Qwen3MoeForCausalLM
    assert narrow.config.moe_intermediate_size == 8


@pytest.mark.parametrize("num_shared", [0, 16])
def test_a_split_model_with_all_experts_active_is_the_dense_model(
    benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, num_shared: int, ids: torch.Tensor
) -> None:
    module = benchmark_module("split_mixture")
    monkeypatch.setattr(module, "SPREAD", 1e-6)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=40, intermediate_size=32, initializer_range=0.3, tie_word_embeddings=True, **TINY)
    dense = LlamaForCausalLM(config).eval()
    with torch.inference_mode():
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
