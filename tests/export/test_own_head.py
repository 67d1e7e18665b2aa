"""Ranks of an embedding and of an output head that are two tables: each has its own ranges of the vocabulary."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig
from families.cases import CASES
from opened_results import assert_it_writes_and_grows, load
from safetensors.torch import load_file

from oneshot.architecture import TABLES, Table
from oneshot.checkpoint import open_model
from oneshot.compression.embedding import MODULES, expanded
from oneshot.pipeline import compress

FAMILIES = ("llama", "qwen3", "gemma3_text", "granite", "olmo2")


def whole(table: Table, ranges: Any, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    return expanded(stored, 48, table=table) if ranges else stored[f"{MODULES[table]}.weight"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tables", [("embedding",), ("output_head",), TABLES], ids=" and ".join)
@torch.inference_mode()
def test_ranks_of_two_tables(
    family: str,
    tables: tuple[Table, ...],
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    text_file: Path,
    tmp_path: Path,
) -> None:
    """The checkpoint opens, writes, is saved again, evaluated, read as an input, and its vocabulary grows."""
    folder = make_checkpoint(**CASES[family].options | {"hidden": 48, "tied": False})
    config = make_config(folder, form="per-layer", sparsity=0.15 if len(tables) == 1 else 0.35, heads="none")
    others = ["layers.*", *(MODULES[table].split(".")[-1] for table in TABLES if table not in tables)]
    config = replace(config, target=replace(config.target, keep=tuple(others)))
    report, output = compress(config), Path(config.output)
    model, tokens, stored = load(output), torch.arange(3, 40).unsqueeze(0), load_file(output / "model.safetensors")
    assert tuple(table for table in TABLES if report.plan[table]) == tables
    embedding, head = (whole(table, report.plan[table], stored) for table in TABLES)
    scale = getattr(model.model.embed_tokens, "scale", getattr(model.model.embed_tokens, "scalar_embed_scale", 1.0))
    torch.testing.assert_close(model.model.embed_tokens(tokens), embedding[tokens] * scale, rtol=1e-4, atol=1e-5)
    states = torch.randn(2, 3, 48)
    torch.testing.assert_close(model.lm_head(states), states @ head.T, rtol=1e-4, atol=1e-5)
    # as an input of another run
    read = open_model(str(output), tmp_path)
    torch.testing.assert_close(read.read_embedding(), embedding)
    torch.testing.assert_close(read.read_head(), head)
    assert_it_writes_and_grows(model, report, text_file, tmp_path)
