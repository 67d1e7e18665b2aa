"""`--params` and `--max-size` are never exceeded, in any form."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig
from hypothesis import given
from hypothesis import strategies as st

from oneshot.architecture import RANKED_KINDS, TableShape
from oneshot.checkpoint import Checkpoint
from oneshot.export import planned_parts
from oneshot.pipeline import compress
from oneshot.planning import Budget, dense_plan, vocabulary_ranges
from oneshot.run import budget_of, open_run
from oneshot.run.budgets import HEADER_BYTES

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


def test_a_gguf_file_counts_the_vocabulary_that_it_holds(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """It does not hold the tokenizer's JSON, which may be many times as long."""
    folder = Path(shutil.copytree(make_checkpoint(layers=3), tmp_path / "model"))
    config = make_config(folder, sparsity=None, size_bytes=10**7, form="gguf")
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()), indent=40))
    with open_run(config) as run:
        predicted = budget_of(run, config.target).measure(run.grid.stack(dense_plan(run.model.shape, run.method)))
    compress(replace(config, target=replace(config.target, size_bytes=None, sparsity=0.0)))
    written = (Path(config.output) / "model.gguf").stat().st_size
    assert written <= predicted < written + 2 * HEADER_BYTES * len(Checkpoint(folder).shapes)


def test_bytes_count_the_orders_of_low_ranks(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    """They are of 64 bits beside weights of 16, against the tensors that a result would store."""
    folder = make_checkpoint(hidden=512, width=512, groups=4, layers=1, tied=True, dtype=torch.bfloat16)
    config = make_config(folder, form="per-layer", sparsity=None, size_bytes=10**7)
    with open_run(config) as run:
        plan = dense_plan(run.model.shape, run.method)
        plan = replace(plan, layers=(replace(plan.layers[0], **{f"{kind}_rank": 256 for kind in RANKED_KINDS}),))
        tables = tuple(TableShape(part.stop - part.start, 64) for part in vocabulary_ranges(run.model.shape.vocab_size))
        stack = run.grid.stack(plan)
        parts = planned_parts(run.form, run.model, plan, None, {}, "keep")
        stored = {name: tensor for part in parts for name, tensor in part.items()}
        indices = sum(tensor.numel() for tensor in stored.values() if tensor.dtype == torch.int64)
        assert stack.indices() == indices == 4 * 512
        assert replace(stack, embedding=tables).indices() == indices + len(tables) * 512 + run.model.shape.vocab_size
        headers = HEADER_BYTES * 2 * len(run.model.checkpoint.shapes)
        assert budget_of(run, config.target).measure(stack) == headers + sum(one.nbytes for one in stored.values())


@given(measures=st.lists(st.integers(0, 100), min_size=1, unique=True), target=st.integers(0, 100))
def test_a_ceiling_chooses_the_largest_below_it(measures: list[int], target: int) -> None:
    chosen = Budget(target, is_ceiling=True).choose(measures, measures)
    below = [measure for measure in measures if measure <= target]
    assert chosen == (max(below) if below else min(measures))
    nearest = Budget(target).choose(measures, measures)
    assert abs(nearest - target) == min(abs(measure - target) for measure in measures)
