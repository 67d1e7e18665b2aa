"""The comparison of forms in a run: each form by its own method, whatever the form of the run."""

from pathlib import Path
from typing import Any

import pytest
from factories import MakeCheckpoint, MakeConfig
from families.cases import CASES

from oneshot.pipeline import compress, profile

FORMS = ("stock", "per-layer", "nemotron-nas", "gguf")


def test_every_run_predicts_the_same_for_each_form(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    folder, measured = make_checkpoint(tied=True), tmp_path / "profile"
    profile(make_config(folder, form="per-layer", curvature="none", output=str(measured)))
    found = {}
    for form in FORMS[1:]:
        output = str(tmp_path / form)
        report = compress(make_config(folder, form=form, profile=str(measured), output=output, round_to=1))
        assert report.predicted_divergence is not None
        found[form] = dict(report.predicted_divergence)
    own = {form: values.pop("plan") for form, values in found.items()}
    assert found["per-layer"].keys() == set(FORMS)
    for form in FORMS[1:]:
        assert found[form] == found["per-layer"]
        assert own[form] == pytest.approx(found["per-layer"][form])
    assert own["per-layer"] < own["nemotron-nas"]


@pytest.mark.parametrize(
    ("family", "settings", "predicted"),
    [
        ("qwen2_moe", {"form": "per-layer", "num_experts": 3, "experts": "effects"}, None),
        ("llama", {"form": "per-layer", "value_size": 6, "ranks": "none"}, None),
        ("llama", {"form": "stock", "depth": "sensitivity"}, {"plan", "stock", "nemotron-nas", "gguf"}),
    ],
    ids=["stated experts", "stated sizes inside heads", "ranks that were not measured"],
)
def test_plans_with_sizes_that_were_not_measured_have_no_prediction(
    family: str,
    settings: dict[str, Any],
    predicted: set[str] | None,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
) -> None:
    folder = make_checkpoint(**CASES[family].options | {"layers": 3})
    report = compress(make_config(folder, round_to=8, sparsity=0.3, **settings))
    assert (report.predicted_divergence and report.predicted_divergence.keys()) == predicted
