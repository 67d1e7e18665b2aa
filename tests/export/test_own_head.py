"""Ranks of an embedding that is no output head: the head stays whole, and is stored beside the ranges."""

from pathlib import Path

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig
from families.cases import CASES
from opened_results import assert_it_writes_and_grows, load
from safetensors.torch import load_file

from oneshot.checkpoint import open_model
from oneshot.compression.embedding import expanded
from oneshot.pipeline import compress

FAMILIES = ("llama", "qwen3", "gemma3_text", "granite", "olmo2")


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_ranks_of_an_embedding_beside_its_own_head(
    family: str, make_checkpoint: MakeCheckpoint, make_config: MakeConfig, text_file: Path, tmp_path: Path
) -> None:
    """The checkpoint opens, writes, is saved again, evaluated, read as an input, and its vocabulary grows."""
    folder = make_checkpoint(**CASES[family].options | {"hidden": 48, "tied": False})
    config = make_config(folder, form="per-layer", sparsity=0.4, heads="none")
    report, output = compress(config), Path(config.output)
    model, tokens, stored = load(output), torch.arange(3, 40).unsqueeze(0), load_file(output / "model.safetensors")
    assert report.plan["embedding"]
    embedding, head = expanded(stored, 48), load_file(folder / "model.safetensors")["lm_head.weight"]
    inner = model.model
    scale = getattr(inner.embed_tokens, "scale", 1.0)
    torch.testing.assert_close(inner.embed_tokens(tokens), embedding[tokens] * scale, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])
    assert stored["lm_head.weight"].shape == head.shape
    # as an input of another run
    read = open_model(str(output), tmp_path)
    torch.testing.assert_close(read.read_embedding(), embedding)
    assert torch.equal(read.read_head(), stored["lm_head.weight"])
    assert_it_writes_and_grows(model, report, text_file, tmp_path)
