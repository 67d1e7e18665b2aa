"""Seconds of a decoder layer by its sizes, measured on this machine, for plans under a latency budget."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from oneshot.arch.base import DOWN_PROJ, GATE_PROJ, K_PROJ, O_PROJ, Q_PROJ, UP_PROJ, V_PROJ
from oneshot.layerwise.streams import Tensors
from oneshot.records import ModelShape, StackShape
from oneshot.source import SourceModel
from oneshot.stream import LayerStream

ROUNDS = 7
WIDTHS = 6


def measured_seconds(
    source: SourceModel, *, sequence_length: int, device: torch.device, dtype: torch.dtype
) -> Callable[[StackShape], float]:
    """A function from a model's sizes to the seconds that its decoder layers take for one sequence.

    The two halves of a layer are timed apart, on the weights of the first layer cut to size: attention with every
    number of heads (in KV groups, or the same number out of each), the FFN at `WIDTHS` widths, between which it is
    interpolated. Medians over rounds in which all sizes take turns. Sizes within heads and of the hidden state are
    taken as they are in the dense model.
    """
    shape, tensors = source.shape, source.read_layer(0)
    x = torch.randn(1, sequence_length, shape.hidden_size, generator=torch.Generator().manual_seed(0)).to(device, dtype)

    def halves(smaller: ModelShape) -> tuple[Callable[[], object], Callable[[], object]]:
        config = source.architecture.resize_config(source.checkpoint.config, smaller)
        stream = LayerStream(config, source.architecture, sequence_length=sequence_length, device=device, dtype=dtype)
        layer = stream.layer(_cut(tensors, smaller))
        return lambda: layer.attention(x), lambda: layer.ffn(x)

    groups, per_group = shape.num_key_value_heads, shape.heads_per_group
    heads = [(groups * each, groups) for each in range(1, per_group + 1)]
    heads += [(kept * per_group, kept) for kept in range(1, groups)]
    if not source.architecture.removable_heads:
        heads = [(shape.num_attention_heads, groups)]
    widths = sorted({max(1, round(shape.intermediate_size * part / WIDTHS)) for part in range(1, WIDTHS + 1)})
    attention = [halves(replace(shape, num_attention_heads=h, num_key_value_heads=g))[0] for h, g in heads]
    ffn = [halves(replace(shape, intermediate_size=width))[1] for width in widths]
    seconds = _medians([*attention, *ffn], device)
    of_heads = dict(zip(heads, seconds, strict=False))
    of_width = seconds[len(heads) :]

    def of_stack(stack: StackShape) -> float:
        return sum(
            of_heads[layer.num_attention_heads, layer.num_key_value_heads]
            + float(np.interp(layer.intermediate_size, widths, of_width))
            for layer in stack.layers
        )

    return of_stack


def _cut(tensors: Tensors, shape: ModelShape) -> Tensors:
    """The first neurons and heads of a layer."""
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    rows = {Q_PROJ: queries, K_PROJ: keys, V_PROJ: keys, GATE_PROJ: shape.intermediate_size}
    rows[UP_PROJ] = shape.intermediate_size
    columns = {O_PROJ: queries, DOWN_PROJ: shape.intermediate_size}
    cut = {}
    for name, tensor in tensors.items():
        linear = name.rpartition(".")[0]
        if linear in rows:
            tensor = tensor[: rows[linear]]
        elif linear in columns and tensor.dim() == 2:
            tensor = tensor[:, : columns[linear]]
        cut[name] = tensor.contiguous()
    return cut


def _medians(calls: list[Callable[[], object]], device: torch.device) -> list[float]:
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS + 1):  # the first round warms up
        for call, seconds in zip(calls, times, strict=True):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            started = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
    return [statistics.median(seconds[1:]) for seconds in times]
