"""Whole runs whose Grams are hostile: 50 words, an activation of 10,000, and the rounding of tensor cores.

Each form is run once, each recipe and each part that factorises once, in float32 or in bfloat16: what a factorisation
does is tested on its own (`linalg/test_psd.py`), so here it suffices that every one is reached in some run.
"""

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import MakeConfig, build_model
from hostile_grams import TENSOR_CORES, symmetric_noise
from safetensors.torch import load_file

from oneshot.compression import statistics, up_proj
from oneshot.linalg.sums import finished_gram
from oneshot.pipeline import compress
from oneshot.report.records import Report

WORDS = 50
MASSIVE = 1e4

LINEARS = "inputs of a linear of low rank"
CURVES, KEPT = "columns of an error curve", "kept columns"

# name -> (options, what the Grams are of that need a larger ridge)
RUNS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "per-layer": ({"form": "per-layer", "embedding": "low-rank"}, {LINEARS, CURVES}),
    "per-layer, heads and values": ({"form": "per-layer", "heads": "obs", "inner_sizes": "sensitivity"}, {CURVES}),
    "stock": ({"heads": "id", "up_steps": 2, "damping": 1e-6}, {KEPT}),
    "nemotron-nas": ({"form": "nemotron-nas", "dtype": "bfloat16"}, {CURVES}),
    "gguf": ({"form": "gguf", "ffn": "wanda", "dtype": "bfloat16"}, {CURVES}),
    "stat": ({"recipe": "stat", "form": "per-layer"}, {KEPT}),
    "tcsp": ({"recipe": "tcsp", "correction": "two-stream", "damping": 1e-6, "dtype": "bfloat16"}, {KEPT}),
    "group-pca": ({"recipe": "group-pca", "shared_weight": 0.1}, set()),
}


@pytest.fixture(scope="module")
def massive(save_model: Callable[..., Path]) -> Path:
    """Return a model of which one neuron of the first layer is ten thousand times larger than the others."""
    model = build_model(hidden=256, width=384, tied=True, seed=1)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[5] *= MASSIVE
    return save_model(model)


@pytest.fixture(scope="module")
def few_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a text of 50 distinct words."""
    chance = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 6))) for _ in range(WORDS)]
    path = tmp_path_factory.mktemp("text") / "few.txt"
    path.write_text("\n\n".join(" ".join(chance.choices(words, k=80)) for _ in range(40)))
    return path


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every finished Gram be as wrong as one of bfloat16 rows on tensor cores."""
    rng = np.random.default_rng(0)

    def rounded(total: torch.Tensor) -> torch.Tensor:
        gram = finished_gram(total)
        return gram + TENSOR_CORES * gram.norm() * torch.from_numpy(symmetric_noise(rng, len(gram))).float()

    for module in (statistics, up_proj):
        monkeypatch.setattr(module, "finished_gram", rounded)


def run(make_config: MakeConfig, checkpoint: Path, text: Path, options: dict[str, Any]) -> Report:
    settings = {"calibration": str(text), "num_sequences": 12, "sequence_length": 24, "batch_size": 4} | options
    return compress(make_config(checkpoint, **settings))


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_in_finite_weights_and_tells_what_rounding_did(
    name: str, massive: Path, few_words: Path, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    options, expected = RUNS[name]
    with caplog.at_level(logging.WARNING):
        report = run(make_config, massive, few_words, options)
    for path in Path(report.config["output"]).glob("*.safetensors"):
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(path).values())
    json.dumps(report.to_dict(), allow_nan=False)
    told = [warning for warning in report.warnings if "singular to rounding" in warning]
    names = [
        warning.removeprefix("The text says too little about some directions of the ").split(" (")[0]
        for warning in told
    ]
    assert set(names) >= expected
    assert len(set(names)) == len(names)
    heard = [record.getMessage() for record in caplog.records if "singular to rounding" in record.getMessage()]
    assert heard == told
