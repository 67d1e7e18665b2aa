"""Losses to expect without a profile: near what was measured, and told before the work where they are large."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from factories import MakeCheckpoint, MakeConfig

from oneshot.pipeline import predict
from oneshot.planning import expected_of_equal_layers, expected_of_own_sizes

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHARES_OF_FFN = {"smollm2": 134.5 / 79.6, "coder": 494.0 / 313.8, "gemma": 268.1 / 70.8}  # parameters ÷ the FFNs'
WIDE = {"vocabulary": 1024, "tied": True}  # most parameters are the embedding's


def measured(form: str) -> list[dict[str, Any]]:
    """Rows of three models at all sizes on a GPU, from the largest text."""
    rows = map(json.loads, (RESULTS / "gpu.jsonl").read_text().splitlines())
    return [
        row
        for row in rows
        if row["kind"] == "quality"
        and row.get("form") == form
        and "score" in row
        and row.get("settings") in ({}, {"curvature": "fisher"})
    ]


def test_what_is_expected_of_equal_layers_is_near_what_was_measured() -> None:
    rows, models = measured("stock"), set()
    for row in rows:
        model = next((name for name in SHARES_OF_FFN if name in row["section"]), "smollm2")
        models.add(model)
        neurons = row["sparsity"] * SHARES_OF_FFN[model]
        assert 0.7 < math.log(row["score"]) / math.log(expected_of_equal_layers(neurons)) < 1.3
    assert models == SHARES_OF_FFN.keys()


def test_sizes_of_their_own_lose_no_more_than_is_expected() -> None:
    rows = measured("per-layer")
    assert rows
    for row in rows:
        assert math.log(row["score"]) < 1.1 * math.log(expected_of_own_sizes(row["sparsity"]))


@pytest.mark.parametrize(
    ("form", "sparsity", "is_told"), [("stock", 0.2, True), ("stock", 0.1, False), ("auto", 0.2, False)]
)
def test_narrow_equal_layers_are_told_before_the_work(
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    caplog: pytest.LogCaptureFixture,
    form: str,
    sparsity: float,
    is_told: bool,
) -> None:
    predict(make_config(make_checkpoint(**WIDE), form=form, sparsity=sparsity))
    told = [message for message in caplog.messages if "of all FFN neurons" in message]
    assert bool(told) == is_told
    assert not told or "--form per-layer" in told[0]


@pytest.mark.parametrize(
    ("model", "sparsity", "said"),
    [
        (
            {"tied": True},
            0.35,
            "other linears and the embedding, has lost much less at every measured size, up to 30%.",
        ),
        ({}, 0.2, "--form per-layer, which also shrinks other linears, usually loses less."),
    ],
    ids=("beyond what was measured", "an output head of its own"),
)
def test_of_the_better_form_only_what_is_known_is_told(
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    caplog: pytest.LogCaptureFixture,
    model: dict[str, Any],
    sparsity: float,
    said: str,
) -> None:
    predict(make_config(make_checkpoint(**model), form="stock", sparsity=sparsity))
    [told] = [message for message in caplog.messages if "of all FFN neurons" in message]
    assert said in told
