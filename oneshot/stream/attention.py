"""Attention that holds whole scores `(heads, length, length)`: one sequence at a time, whatever the batch."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from oneshot.checkpoint import Model, attention_of, stock_classes

BY_SEQUENCE = "oneshot-by-sequence-{}"  # with the implementation of the stock class: `eager` or `sdpa`


def holds_scores(model: Model, device: torch.device) -> bool:
    """Return whether attention holds a number for every head and every two tokens of a sequence.

    Eager attention does (Gemma 2, gpt-oss), and on a CPU also scaled dot product attention if values and keys have
    different sizes (torch 2.13).
    """
    widths_differ = model.shape.query_key_size != model.shape.head_dim
    return _implementation(model) == "eager" or (device.type == "cpu" and widths_differ)


def attend_by_sequence(model: Model, module: Any) -> None:
    """Let a module of transformers attend to one sequence of a batch after another, with the stock implementation."""
    from transformers import AttentionInterface

    own = _implementation(model)
    AttentionInterface.register(BY_SEQUENCE.format(own), partial(_by_sequence, own))
    module.config._attn_implementation = BY_SEQUENCE.format(own)


def _implementation(model: Model) -> str:
    chosen = attention_of(stock_classes(model.checkpoint.config)[1])
    return chosen if isinstance(chosen, str) else chosen["text_config"]


def _by_sequence(
    own: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of `query`, `key` and `value`, each `(sequences, heads, length, size)`.

    The signature is the one of transformers' attention functions.
    """
    attend: Callable[..., tuple[torch.Tensor, Any]]
    if own == "eager":
        attend = sys.modules[type(module).__module__].eager_attention_forward  # each family's file has its own
    else:
        from transformers import AttentionInterface

        attend = AttentionInterface()[own]
    masks = [attention_mask] * len(query)
    if attention_mask is not None and len(attention_mask) == len(query):
        masks = list(attention_mask.split(1))
    parts = zip(query.split(1), key.split(1), value.split(1), masks, strict=True)
    return torch.cat([attend(module, *part, **options)[0] for part in parts]), None
