"""Ranks of an embedding that is no output head: the head stays whole, and is stored beside the ranges."""

from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, assert_cache_changes_nothing
from families.cases import CASES
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from oneshot.checkpoint import open_model
from oneshot.compression.embedding import expanded
from oneshot.evaluation import evaluate
from oneshot.pipeline import compress

FAMILIES = ("llama", "qwen3", "gemma3_text", "granite", "olmo2")


def load(folder: Path) -> Any:
    """Return the model by the modelling files in its folder; nothing is missing, nothing unexpected."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


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
    assert_cache_changes_nothing(model, 6, input_ids=tokens[:, :5])
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(load(tmp_path / "again")(tokens).logits, model(tokens).logits)
    (result,) = evaluate(
        [str(output)], [str(text_file)], sequence_length=32, max_windows=2, decode_tokens=2, prefill_tokens=8
    )
    assert result.stored_parameters == report.stored_parameters["compressed"]
    # as an input of another run
    read = open_model(str(output), tmp_path)
    torch.testing.assert_close(read.read_embedding(), embedding)
    assert torch.equal(read.read_head(), stored["lm_head.weight"])
    # the vocabulary grows, also of the stack alone
    before, stack = model(tokens).logits, AutoModel.from_pretrained(output, trust_remote_code=True)
    for grown in (model, stack):
        assert grown.resize_token_embeddings(403) is grown.get_input_embeddings()
        assert grown.config.vocab_size == 403
    torch.testing.assert_close(model(tokens).logits[..., :400], before, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "larger")
    last = torch.tensor([[402]])
    torch.testing.assert_close(load(tmp_path / "larger")(last).logits, model(last).logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stack(last).last_hidden_state, model.model(last).last_hidden_state)
