"""Keys and values that stay in place: transformers' own cache copies all of a layer whenever a token is added."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


@contextmanager
def growing_in_place(model: Any, num_tokens: int) -> Iterator[None]:
    """Let the caches that `model` fills meanwhile have room for `num_tokens` tokens from the start.

    Layers that hold something else than the keys and values of all these tokens stay as they are.
    """
    from transformers import DynamicCache

    def make_room(_module: Any, _inputs: Any, options: dict[str, Any]) -> None:
        for cache in options.values():  # versions of transformers name the cache differently
            if isinstance(cache, DynamicCache) and cache.get_seq_length() == 0:
                for layer in cache.layers:
                    _make_room(layer, num_tokens)

    with model.register_forward_pre_hook(make_room, with_kwargs=True):
        yield


def _make_room(layer: Any, num_tokens: int) -> None:
    """Let an empty layer of a cache grow in place if it would concatenate all `num_tokens` tokens."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    stock = getattr(type(layer), "update", None)
    holds_all = stock is DynamicLayer.update
    holds_all |= stock is DynamicSlidingWindowLayer.update and layer.sliding_window > num_tokens
    if holds_all:
        layer.update = partial(_update, layer, [], num_tokens, layer.update)


def _update(
    layer: Any,
    room: list[torch.Tensor],
    num_tokens: int,
    stock: Callable[..., Any],
    keys: torch.Tensor,
    values: torch.Tensor,
    *args: Any,
    **options: Any,
) -> Any:
    """Do what the `stock` update of a layer does, without a copy of the tokens before.

    `room`: the tensors `(..., num_tokens, size)` that its keys and values are the beginnings of; empty at first.
    """
    before, after = layer.get_seq_length(), layer.get_seq_length() + keys.shape[-2]
    if after > num_tokens:
        return stock(keys, values, *args, **options)
    if before:
        layer.cumulative_length = after  # of a sliding window; others have no use for it
    else:
        stock(keys, values, *args, **options)
        room[:] = [part.new_empty(*part.shape[:-2], num_tokens, part.shape[-1]) for part in (keys, values)]
    for whole, part in zip(room, (keys, values), strict=True):
        whole[..., before:after, :] = part
    layer.keys, layer.values = (whole[..., :after, :] for whole in room)
    return layer.keys, layer.values
