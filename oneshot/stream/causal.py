"""Causal attention by blocks of queries, with float32 products of oneDNN: faster than torch's on AMD's CPUs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from oneshot.linalg.products import linear, mkl_is_narrow, product

BY_BLOCKS = "oneshot-by-blocks"
BLOCK = 256  # queries whose scores are held at once
LONGEST = 2048  # tokens; oneDNN keeps two products for every block of a sequence
WIDTH = 64  # of which sizes of heads and lengths are multiples, for oneDNN


def is_faster_by_blocks(device: torch.device) -> bool:
    """Return whether oneDNN's products are faster than torch's attention, which has the rate of MKL."""
    return device.type == "cpu" and mkl_is_narrow()


def attend_by_blocks(module: Any) -> None:
    """Let a module of transformers compute causal scores by blocks of queries.

    Its class must look the implementation up by name. Falcon compares the name, and hides no token for an unknown one.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(BY_BLOCKS, _by_blocks)
    module.config._attn_implementation = BY_BLOCKS


def _by_blocks(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of heads `(sequences, heads, length, size)`, `(sequences, length, heads, size)`.

    By `causal` if nothing but the order of tokens hides them, otherwise by scaled dot product attention. The signature
    is the one of transformers' attention functions.
    """
    from transformers import AttentionInterface

    length, size = query.shape[-2:]
    is_plain = attention_mask is None and length == key.shape[-2] <= LONGEST and key.shape == value.shape
    is_causal = options.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    unusual = options.get("position_bias") is not None or bool(options.get("dropout"))
    if not is_plain or not is_causal or unusual or length % WIDTH or size % WIDTH or torch.is_grad_enabled():
        attend: Callable[..., tuple[torch.Tensor, None]] = AttentionInterface()["sdpa"]
        return attend(module, query, key, value, attention_mask, scaling=scaling, **options)
    return causal(query, key, value, size**-0.5 if scaling is None else scaling), None


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return causal attention `(sequences, length, heads, size)`, with scores and their softmax in float32.

    Args:
        query: `(sequences, heads, length, size)`. key, value: of as many heads, or of fewer ones, which are shared.
    """
    sequences, heads, length, size = query.shape
    shared = heads // key.shape[1]
    result = query.new_empty(sequences, length, heads, size)
    later = torch.full((BLOCK, BLOCK), -torch.inf).triu_(1)
    for sequence in range(sequences):
        for group in range(key.shape[1]):
            of_group = slice(group * shared, (group + 1) * shared)
            queries, keys = query[sequence, of_group].float() * scaling, key[sequence, group].float()
            values = value[sequence, group].float()
            for start in range(0, length, BLOCK):
                stop = min(start + BLOCK, length)
                count = stop - start
                scores = linear(queries[:, start:stop].reshape(-1, size), keys[:stop]).view(shared, count, stop)
                scores[..., start:] += later[:count, :count]
                attended = product(scores.softmax(-1).view(-1, stop), values[:stop]).view(shared, count, size)
                result[sequence, start:stop, of_group] = attended.transpose(0, 1).to(result.dtype)
    return result
