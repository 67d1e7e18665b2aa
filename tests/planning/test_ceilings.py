"""`--params` and `--max-size` are never exceeded, in any form."""

from pathlib import Path
from typing import Any

import pytest
from factories import MakeCheckpoint, MakeConfig
from hypothesis import given
from hypothesis import strategies as st

from oneshot.checkpoint import Checkpoint
from oneshot.pipeline import compress
from oneshot.planning import Budget

FORMS = ("stock", "per-layer", "nemotron-nas", "gguf")
METHODS: dict[str, dict[str, Any]] = {
    "neurons": {"form": "stock"},
    "heads": {"form": "stock", "ffn": "none", "heads": "id"},
    "hidden size": {"form": "stock", "ffn": "none", "hidden": "pca"},
    "layers": {"form": "stock", "ffn": "none", "depth": "sensitivity"},
    **{form: {"form": form} for form in FORMS[1:]},
}


@pytest.mark.parametrize("name", METHODS)
def test_parameters_are_a_ceiling(make_checkpoint: MakeCheckpoint, make_config: MakeConfig, name: str) -> None:
    folder = make_checkpoint(layers=3)
    dense = Checkpoint(folder).num_parameters
    asked = round((0.96 if name == "heads" else 0.83) * dense)
    report = compress(make_config(folder, sparsity=None, parameters=asked, **METHODS[name]))
    assert 0.6 * dense < report.stored_parameters["compressed"] <= asked


@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_a_ceiling(make_checkpoint: MakeCheckpoint, make_config: MakeConfig, form: str) -> None:
    folder = make_checkpoint(layers=3)
    whole = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    asked = round(0.85 * whole) + (20_000 if form == "gguf" else 0)  # its vocabulary is in the same file
    report = compress(make_config(folder, sparsity=None, size_bytes=asked, form=form))
    output = Path(report.config["output"])
    written = sum(path.stat().st_size for path in output.iterdir() if path.suffix in (".safetensors", ".gguf"))
    assert 0.4 * whole < written <= asked


@given(measures=st.lists(st.integers(0, 100), min_size=1, unique=True), target=st.integers(0, 100))
def test_a_ceiling_chooses_the_largest_below_it(measures: list[int], target: int) -> None:
    chosen = Budget(target, is_ceiling=True).choose(measures, measures)
    below = [measure for measure in measures if measure <= target]
    assert chosen == (max(below) if below else min(measures))
    nearest = Budget(target).choose(measures, measures)
    assert abs(nearest - target) == min(abs(measure - target) for measure in measures)
