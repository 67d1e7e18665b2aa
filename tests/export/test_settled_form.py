"""`--form auto`: the per-layer form where it gains something or alone holds the result, otherwise stock."""

from pathlib import Path
from typing import Any

import pytest
from factories import MakeCheckpoint, MakeConfig

from oneshot.pipeline import compress, predict, profile
from oneshot.settings import RECIPE_NAME


@pytest.mark.parametrize(
    ("model", "options", "settled"),
    [
        ({"tied": True}, {}, "per-layer"),
        ({"family": "qwen3"}, {}, "per-layer"),
        ({"family": "gemma3_text"}, {}, "per-layer"),
        ({}, {"value_size": 4}, "per-layer"),  # no stock config of a Llama states it with whole queries
        ({}, {"ranks": "none"}, "per-layer"),  # has sizes of its own for every layer
        ({}, {"recipe": "flap"}, "stock"),  # has no place for ranks
        ({}, {"recipe": "tcsp"}, "stock"),
        ({}, {"recipe": "stat"}, "stock"),
        ({}, {"recipe": "group-pca", "group_size": 2}, "per-layer"),
        ({}, {"correction": "none"}, "stock"),
        ({}, {"allocation": "uniform"}, "stock"),
        ({}, {"up_steps": 1, "depth": "sensitivity"}, "per-layer"),
        ({}, {"quantise": "w4a16", "sparsity": 0.0}, "stock"),
        ({"tied": True}, {"sparsity": 0.0}, "stock"),
        ({"tied": True}, {"sparsity": 0.0, "value_size": 4}, "per-layer"),
        ({}, {"quantise": "w4a16"}, "per-layer"),
        ({"family": "opt", "groups": 4, "do_layer_norm_before": False, "word_embed_proj_dim": 16}, {}, "stock"),
        ({"family": "bert", "model_class": "AutoModelForMaskedLM", "groups": 4}, {}, "stock"),
    ],
)
def test_auto_settles(
    model: dict[str, Any],
    options: dict[str, Any],
    settled: str,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
) -> None:
    predicted = predict(make_config(make_checkpoint(**model), **{"sparsity": 0.05, "form": "auto"} | options))
    assert predicted.form == settled
    assert f"{settled}, opened by" in str(predicted)


def test_a_profile_is_of_the_form_of_the_runs_that_plan_from_it(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    folder, options = make_checkpoint(tied=True), {"form": "auto", "num_sequences": 32}
    made = profile(make_config(folder, **options, sparsity=0.0, output=str(tmp_path / "profile")))
    assert made.origin.curvature == "fisher"  # of ranks, which the stock form has no place for
    report = compress(make_config(folder, **options, sparsity=0.1, profile=str(tmp_path / "profile")))
    assert report.config["form"] == "per-layer"


def test_a_result_and_its_recipe_state_the_form_that_was_settled(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    report = compress(make_config(make_checkpoint(tied=True), form="auto"))
    assert report.config["form"] == "per-layer"
    assert "form: per-layer\n" in (Path(report.config["output"]) / RECIPE_NAME).read_text()
