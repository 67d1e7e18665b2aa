"""Mixtures of experts in the stock form: vLLM's own layers beside transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ask_vllm_together
from engines import NEW_TOKENS, SIZES, Expected
from factories import build_model
from opened import MIXTURES

from oneshot import Config
from oneshot.pipeline import compress


@pytest.fixture(scope="module")
def answered(
    save_model: Callable[..., Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Expected, Any]]:
    """All cases in one process of vLLM, whose start takes longer than all answers."""
    folder, expected, requests = tmp_path_factory.mktemp("results"), {}, {}
    text = {"calibration": str(text_file), "num_sequences": 64, "sequence_length": 32, "form": "stock"}
    for name, (options, settings) in MIXTURES.items():
        source, output = save_model(build_model(**SIZES | options)), folder / name.replace(" ", "-")
        compress(Config.of(str(source), str(output), device="cpu", sparsity=None, **text | settings))
        expected[name] = Expected(output, source)
        request = {"folder": str(output), "prompts": expected[name].prompts, "max_tokens": NEW_TOKENS}
        requests[name] = request | {"implementation": "vllm"}
    answers = ask_vllm_together([*requests.values()], folder)
    return {name: (expected[name], answer) for name, answer in zip(requests, answers, strict=True)}


@pytest.mark.parametrize("name", MIXTURES)
def test_it_answers_as_transformers(name: str, answered: dict[str, tuple[Expected, Any]]) -> None:
    expected, answers = answered[name]
    assert not isinstance(answers, str), answers[-4000:]
    expected.agrees_with_vllm(answers)
