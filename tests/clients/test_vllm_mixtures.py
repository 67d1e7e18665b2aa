"""Mixtures of experts in the stock form: vLLM's own layers beside transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ask_vllm_together
from engines import NEW_TOKENS, SIZES, Expected
from factories import build_model

from oneshot import Config
from oneshot.pipeline import compress

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
QWEN3 = {"family": "qwen3_moe", "head_dim": 32, "num_experts": 8, "norm_topk_prob": True, **EXPERTS}
GLM4 = {"family": "glm4_moe", "head_dim": 32, "n_routed_experts": 8, "first_k_dense_replace": 1, **EXPERTS}
NEURONS = {"intermediate_size": 64}
# a random model, and how it is compressed
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_moe, neurons": (QWEN3, NEURONS),
    "qwen3_moe, experts": (QWEN3, {"experts": "effects", "num_experts": 6, "ffn": "none"}),
    "qwen3_moe, a dense layer": (QWEN3 | {"mlp_only_layers": [1]}, NEURONS),
    "mixtral, neurons": ({"family": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}, NEURONS),
    "gpt_oss, both": (
        {"family": "gpt_oss", "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
        NEURONS | {"experts": "reap", "num_experts": 6},
    ),
    "glm4_moe, both": (GLM4, NEURONS | {"experts": "reap", "num_experts": 6}),
}


@pytest.fixture(scope="module")
def answered(
    save_model: Callable[..., Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Expected, Any]]:
    """All cases in one process of vLLM, whose start takes longer than all answers."""
    folder, expected, requests = tmp_path_factory.mktemp("results"), {}, {}
    text = {"calibration": str(text_file), "num_sequences": 64, "sequence_length": 32}
    for name, (options, settings) in CASES.items():
        source, output = save_model(build_model(**SIZES | options)), folder / name.replace(" ", "-")
        compress(Config.of(str(source), str(output), device="cpu", sparsity=None, **text | settings))
        expected[name] = Expected(output, source)
        request = {"folder": str(output), "prompts": expected[name].prompts, "max_tokens": NEW_TOKENS}
        requests[name] = request | {"implementation": "vllm"}
    answers = ask_vllm_together([*requests.values()], folder)
    return {name: (expected[name], answer) for name, answer in zip(requests, answers, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_it_answers_as_transformers(name: str, answered: dict[str, tuple[Expected, Any]]) -> None:
    expected, answers = answered[name]
    assert not isinstance(answers, str), answers[-4000:]
    expected.agrees_with_vllm(answers)
