"""Per-layer results, opened by the modelling files in their folders."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from factories import assert_cache_changes_nothing
from transformers import AutoModel, AutoModelForCausalLM

from oneshot import Report
from oneshot.evaluation import evaluate


def load(folder: Path) -> Any:
    """Return the model by the modelling files in its folder; nothing is missing, nothing unexpected."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def assert_it_writes_and_grows(model: Any, report: Report, text_file: Path, scratch: Path) -> None:
    """Assert that a result of 400 tokens with ranks of the embedding writes, is saved again, evaluated, and grows."""
    output, tokens = Path(report.config["output"]), torch.arange(3, 40).unsqueeze(0)
    assert_cache_changes_nothing(model, 6, input_ids=tokens[:, :5])
    model.save_pretrained(scratch / "again")
    assert torch.equal(load(scratch / "again")(tokens).logits, model(tokens).logits)
    (result,) = evaluate(
        [str(output)], [str(text_file)], sequence_length=32, max_windows=2, decode_tokens=2, prefill_tokens=8
    )
    assert result.stored_parameters == report.stored_parameters["compressed"]
    assert result.kv_bytes_per_token == report.kv_bytes_per_token["compressed"]
    # the vocabulary grows, also of the stack alone
    before, stack = model(tokens).logits, AutoModel.from_pretrained(output, trust_remote_code=True)
    for grown in (model, stack):
        assert grown.resize_token_embeddings(403) is grown.get_input_embeddings()
        assert grown.config.vocab_size == 403
    torch.testing.assert_close(model(tokens).logits[..., :400], before, rtol=1e-4, atol=1e-5)
    model.save_pretrained(scratch / "larger")
    last = torch.tensor([[402]])
    saved, grown = (deepcopy(one).double()(last).logits for one in (load(scratch / "larger"), model))
    torch.testing.assert_close(saved, grown, rtol=1e-4, atol=1e-5)  # float32 also rounds by the layout of the ranges
    drawn = not hasattr(stack.get_input_embeddings(), "tables")  # transformers draws new rows of a whole table
    ids = tokens if drawn else last
    torch.testing.assert_close(stack(ids).last_hidden_state, model.model(ids).last_hidden_state)
