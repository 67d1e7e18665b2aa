"""Layers that predict further tokens, as drafts in vLLM: a stock result writes the text that it writes alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ask_vllm_together
from engines import NEW_TOKENS, SIZES
from factories import build_model
from further import add_further_layers
from opened import FURTHER

from oneshot import Config
from oneshot.pipeline import compress

PROMPTS = [list(range(5 + first, 20 + first)) for first in range(4)]
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
# vLLM 0.32 rotates queries of three dimensions wrongly on a CPU
ROTARY = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
# what published config.json files state, and transformers does not
PUBLISHED = {"deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 1}}


@pytest.fixture(scope="module")
def answered(
    save_model: Callable[..., Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    """Return what vLLM answers for each family, alone and with drafts."""
    folder, requests = tmp_path_factory.mktemp("results"), list[dict[str, Any]]()
    text: dict[str, Any] = {"calibration": str(text_file), "num_sequences": 64, "sequence_length": 32, "form": "stock"}
    for name, options in FURTHER.items():
        source, output = save_model(build_model(**SIZES | options)), folder / name
        add_further_layers(source, name)
        place = source / "config.json"
        place.write_text(json.dumps(json.loads(place.read_text()) | PUBLISHED.get(name, {})))
        report = compress(Config.of(str(source), str(output), device="cpu", sparsity=0.2, **text))
        assert report.further_parameters is not None
        assert report.further_parameters["compressed"] > 0
        alone = {"folder": str(output), "prompts": PROMPTS, "max_tokens": NEW_TOKENS, "options": ROTARY}
        requests += [alone, alone | {"options": ROTARY | DRAFTS}]
    answers = ask_vllm_together(requests, folder)
    return {name: answers[2 * at : 2 * at + 2] for at, name in enumerate(FURTHER)}


@pytest.mark.parametrize("name", FURTHER)
def test_drafts_change_no_text(name: str, answered: dict[str, list[Any]]) -> None:
    alone, drafted = answered[name]
    for answers in (alone, drafted):
        assert not isinstance(answers, str), answers[-4000:]
    assert [one["tokens"] for one in drafted] == [one["tokens"] for one in alone]
