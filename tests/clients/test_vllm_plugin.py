"""The plugin `oneshot-vllm`: per-layer results by vLLM's own layers, beside transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ask_vllm_together
from engines import BY_LAYER, NEW_TOKENS, SIZES, Expected
from factories import build_model, silence

from oneshot import Config
from oneshot.pipeline import compress

LONG = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
Sizes = dict[str, Any]


def ranked(layer: Sizes) -> bool:
    return bool(layer["output_rank"] and layer["query_key_rank"])


# a random model, how it is compressed, and what is true of one of its layers
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Sizes], bool]]] = {
    "ranks, biases": ({"attention_bias": True, "mlp_bias": True}, {}, ranked),
    "no ranks, rotary of llama3": (
        {"rope_parameters": LONG},
        {"ranks": "none"},
        lambda layer: layer["intermediate_size"] < 192 and not ranked(layer),
    ),
    "ranks of the embedding": (
        {"tied": True, "vocabulary": 1000},
        {"embedding": "auto", "sparsity": 0.3},
        ranked,
    ),
    "qwen2": ({"family": "qwen2", "tied": True}, {}, ranked),
    "qwen3": ({"family": "qwen3", "head_dim": 32}, {}, ranked),
    "phi3": ({"family": "phi3"}, {}, ranked),
    "fewer heads": (
        {"heads": 8, "groups": 4, "head_dim": 32},
        {"heads": "id", "head_unit": "kv-group", "sparsity": 0.4},
        lambda layer: layer["num_attention_heads"] < 8,
    ),
    "sublayers left out": (
        {},
        {"depth": "sublayers", "round_to": 4, "sparsity": 0.3},
        lambda layer: layer["num_attention_heads"] == 0 and layer["intermediate_size"] > 0,
    ),
    "sizes inside heads": (
        {},
        {"query_key_size": 20, "value_size": 12},
        lambda layer: layer["rotary_selected"] and layer["value_size"] == 12,
    ),
    "subspaces": (
        {"tied": True},
        {"recipe": "group-pca", "group_size": 1, "hidden_size": 96, "sparsity": None},
        lambda layer: layer["attention_shortcut"] and layer["ffn_shortcut"],
    ),
    "opt": ({"family": "opt", "groups": 4, "tied": True}, {}, lambda layer: not layer["gated"] and layer["mlp_bias"]),
}
IDLE: dict[str, list[int]] = {"attention": [1], "ffn": [0, 3]}  # what `depth=sublayers` leaves out


SHARED = ("ranks, biases", "ranks of the embedding", "sizes inside heads")  # also by two processes that share tensors
Answered = tuple[Expected, Any]  # transformers' answers, and vLLM's or an error's text


@pytest.fixture(scope="module")
def answered(
    save_model: Callable[..., Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Answered]:
    """All cases in one process of vLLM, whose start takes longer than all answers."""
    folder, expected, requests = tmp_path_factory.mktemp("results"), {}, {}
    text = {"calibration": str(text_file), "num_sequences": 16, "sequence_length": 32}
    for name, (options, settings, _) in CASES.items():
        model = build_model(**SIZES | options)
        if settings.get("depth") == "sublayers":
            silence(model, **IDLE)
        source, output = save_model(model), folder / name.replace(" ", "-")
        compress(Config.of(str(source), str(output), form="per-layer", device="cpu", **text | BY_LAYER | settings))
        expected[name] = Expected(output, source)
        request = {"folder": str(output), "prompts": expected[name].prompts, "max_tokens": NEW_TOKENS}
        requests[name] = request | {"implementation": "vllm"}
    shared = {f"{name}, shared": requests[name] | {"processes": 2} for name in SHARED}
    expected |= {f"{name}, shared": expected[name] for name in SHARED}
    answers = ask_vllm_together([*requests.values(), *shared.values()], folder)
    return {name: (expected[name], answer) for name, answer in zip((*requests, *shared), answers, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_it_answers_as_transformers(name: str, answered: dict[str, Answered]) -> None:
    (_, settings, is_there), (expected, answers) = CASES[name], answered[name]
    config = expected.model.config
    assert any(is_there(layer) for layer in config.layers)
    assert bool(config.embedding) == (settings.get("embedding") == "auto")
    assert not isinstance(answers, str), answers[-4000:]
    expected.agrees_with_vllm(answers)


@pytest.mark.parametrize("name", SHARED)
def test_two_processes_answer_as_transformers(name: str, answered: dict[str, Answered]) -> None:
    expected, answers = answered[f"{name}, shared"]
    assert not isinstance(answers, str), answers[-4000:]
    expected.agrees_with_vllm(answers)
