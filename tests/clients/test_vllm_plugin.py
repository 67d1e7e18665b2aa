"""The plugin `oneshot-vllm`: per-layer results by vLLM's own layers, beside transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ask_vllm_together
from engines import BY_LAYER, NEW_TOKENS, SIZES, Expected
from factories import build_model, silence
from opened import PLUGIN_CASES

from oneshot import Config
from oneshot.pipeline import compress

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
    for name, (options, settings, _) in PLUGIN_CASES.items():
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


@pytest.mark.parametrize("name", PLUGIN_CASES)
def test_it_answers_as_transformers(name: str, answered: dict[str, Answered]) -> None:
    (_, settings, is_there), (expected, answers) = PLUGIN_CASES[name], answered[name]
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
