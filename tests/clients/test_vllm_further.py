"""Layers that predict further tokens, as drafts in vLLM: a result writes the text that it writes alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ask_vllm_together
from engines import NEW_TOKENS, SIZES
from factories import build_model
from further import add_further_layers
from opened import FURTHER
from safetensors.torch import load_file, save_file

from oneshot import Config
from oneshot.pipeline import compress

PROMPTS = [list(range(5 + first, 20 + first)) for first in range(4)]
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}, "disable_log_stats": False}
# vLLM 0.32 rotates queries of three dimensions wrongly on a CPU
ROTARY = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
# what published config.json files state, and transformers does not
PUBLISHED = {"deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 1}}


# the form of a result, and what else its config has
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name}, stock": (name, {"form": "stock", "sparsity": 0.2}) for name in FURTHER},
    "glm4_moe, per-layer": ("glm4_moe", {"form": "per-layer", "sparsity": 0.2}),
    "glm4_moe, own numbers of experts": ("glm4_moe", {"form": "per-layer", "sparsity": 0.3, "experts": "effects"}),
    "glm4_moe, all sizes": ("glm4_moe", {"form": "per-layer", "sparsity": 0}),
}


def let_drafts_be_accepted(folder: Path) -> None:
    """Let the layer predict about the token that the model predicts, which small random models repeat."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    (joined,) = (name for name in tensors if name.endswith("eh_proj.weight"))
    hidden = len(tensors[joined])
    tensors[joined] = torch.cat((torch.zeros(hidden, hidden), torch.eye(hidden)), dim=1)
    save_file(tensors, path, {"format": "pt"})


@pytest.fixture(scope="module")
def answered(
    save_model: Callable[..., Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    """Return what vLLM answers for each result and each input, alone and with drafts."""
    folder, sources = tmp_path_factory.mktemp("results"), dict[str, Path]()
    text: dict[str, Any] = {"calibration": str(text_file), "num_sequences": 64, "sequence_length": 32}
    for name, options in FURTHER.items():
        sources[name] = save_model(build_model(**SIZES | options))
        add_further_layers(sources[name], name)
        let_drafts_be_accepted(sources[name])
        place = sources[name] / "config.json"
        place.write_text(json.dumps(json.loads(place.read_text()) | PUBLISHED.get(name, {})))
    opened = dict(sources)
    for case, (name, settings) in CASES.items():
        opened[case] = folder / case.replace(" ", "-")
        report = compress(Config.of(str(sources[name]), str(opened[case]), device="cpu", **text | settings))
        assert report.further_parameters is not None
        assert report.further_parameters["compressed"] > 0
    requests = list[dict[str, Any]]()
    for place in opened.values():
        alone = {"folder": str(place), "prompts": PROMPTS, "max_tokens": NEW_TOKENS, "options": ROTARY}
        requests += [alone, alone | {"options": ROTARY | DRAFTS}]
    answers = ask_vllm_together(requests, folder)
    return {case: answers[2 * at : 2 * at + 2] for at, case in enumerate(opened)}


@pytest.mark.parametrize("case", CASES)
def test_drafts_change_no_text(case: str, answered: dict[str, list[Any]]) -> None:
    alone, drafted = answered[case]
    for answers in (alone, drafted):
        assert not isinstance(answers, str), answers[-4000:]
    assert [one["tokens"] for one in drafted] == [one["tokens"] for one in alone]
    for one, other in zip(drafted, alone, strict=True):
        assert one["scores"] == pytest.approx(other["scores"], abs=1e-4)


def test_the_drafts_of_a_result_are_its_input_s(answered: dict[str, list[Any]]) -> None:
    """With all sizes the per-layer form computes the input, so as many of its drafts are accepted."""
    accepted = [answered[case][1][0]["accepted"] for case in ("glm4_moe", "glm4_moe, all sizes")]
    assert accepted[0] == accepted[1] > 0
