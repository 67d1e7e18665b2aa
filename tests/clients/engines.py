"""Shared by fixtures and tests: the command line, and llama-perplexity's measure by transformers."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

CONTEXT = 128  # tokens of a chunk of llama-perplexity, of which the second half is scored

Answer = dict[str, Any]  # `scores`: log-probabilities of tokens, `tokens`: a greedy continuation


def run_oneshot(*arguments: str | Path) -> None:
    """Run the command line, as users do."""
    subprocess.run([sys.executable, "-m", "oneshot", *map(str, arguments), "--quiet"], check=True, capture_output=True)


def half_chunk_perplexity(model: Any, token_ids: list[int], chunks: int) -> float:
    """Return the perplexity that llama-perplexity measures, by transformers."""
    import torch

    losses = []
    with torch.inference_mode():
        for chunk in torch.tensor(token_ids[: chunks * CONTEXT]).view(chunks, CONTEXT).split(1):
            logits = model(chunk, use_cache=False).logits[0, CONTEXT // 2 : CONTEXT - 1]
            losses.append(torch.nn.functional.cross_entropy(logits, chunk[0, CONTEXT // 2 + 1 :]))
    return math.exp(float(torch.stack(losses).double().mean()))
