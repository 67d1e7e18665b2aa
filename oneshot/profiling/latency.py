"""Seconds of a layer by its sizes, measured on this machine, for plans under a latency budget."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from oneshot.checkpoint import Model
from oneshot.families import ModelShape, StackShape
from oneshot.machine import Machine
from oneshot.machine.transfer import uploaded
from oneshot.stream import LayerBuilder

ROUNDS = 7
WIDTHS = 6

Tensors = dict[str, torch.Tensor]


def measured_seconds(model: Model, machine: Machine, sequence_length: int) -> Callable[[StackShape], float]:
    """Return a function from a model's sizes to the seconds that its layers take for one sequence.

    The two sublayers are timed separately, on the weights of the first layer cut to size: attention with every number
    of heads (in KV groups, or equally many out of each), the FFN at `WIDTHS` widths with interpolation between them.
    They are medians over rounds in which all sizes take turns. Sizes inside heads and of the hidden state are taken as
    in the dense model.
    """
    shape, tensors, stack = model.shape, model.read_layer(0), model.family.stack
    builder = LayerBuilder(model, machine, sequence_length)
    x = torch.randn(1, sequence_length, shape.hidden_size, generator=torch.Generator().manual_seed(0))
    x = uploaded(x, machine.device).to(machine.dtype)

    def sublayer(smaller: ModelShape, index: int) -> Callable[[], object]:
        layer = builder.layer(_cut(model, tensors, smaller))
        return lambda: layer.run(index, x)

    groups, per_group = shape.num_key_value_heads, shape.heads_per_group
    heads = [(groups * each, groups) for each in range(1, per_group + 1)]
    heads += [(kept_groups * per_group, kept_groups) for kept_groups in range(1, groups)]
    if model.family.reason_against("heads") is not None:
        heads = [(shape.num_attention_heads, groups)]
    widths = sorted({max(1, round(shape.intermediate_size * part / WIDTHS)) for part in range(1, WIDTHS + 1)})
    attention, ffn = stack.index_of("heads"), stack.index_of("ffn")
    calls = [sublayer(replace(shape, num_attention_heads=h, num_key_value_heads=g), attention) for h, g in heads]
    calls += [sublayer(replace(shape, intermediate_size=width), ffn) for width in widths]
    seconds = _medians(calls, machine.device)
    of_heads = dict(zip(heads, seconds, strict=False))
    of_width = seconds[len(heads) :]

    def of_stack(stack: StackShape) -> float:
        return sum(
            of_heads[layer.num_attention_heads, layer.num_key_value_heads]
            + float(np.interp(layer.intermediate_size, widths, of_width))
            for layer in stack.layers
        )

    return of_stack


def _cut(model: Model, tensors: Tensors, shape: ModelShape) -> Tensors:
    """Return the first neurons and heads of a layer."""
    expected = model.family.expected_tensors(shape)
    return {
        name: tensor[tuple(slice(size) for size in expected[name])].contiguous() for name, tensor in tensors.items()
    }


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
