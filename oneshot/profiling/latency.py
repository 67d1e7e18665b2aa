"""Seconds of a layer by its sizes, measured on this machine, for plans under a latency budget."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from oneshot.architecture import CarriedSizes, LayerShape, ModelShape, StackShape
from oneshot.checkpoint import Model
from oneshot.errors import PlanError
from oneshot.machine import Machine
from oneshot.machine.transfer import uploaded
from oneshot.stream import LayerBuilder
from oneshot.tensors import Tensors

ROUNDS = 7
WIDTHS = 6
RANKS = 4  # of each linear, beside the whole one

Coordinates = Callable[[int, int], nn.Module]  # of a width and a rank: what a linear of low rank reads through


class Timings:
    """Seconds of calls, in the order in which they are asked for: those that are known, then measured ones.

    Attributes:
        taken: least seconds of every call, in lists; one list for each time that `least` was called.
    """

    def __init__(self, taken: Sequence[Sequence[float]] = ()) -> None:
        self.taken = [list(seconds) for seconds in taken]
        self._num_asked = 0

    def least(self, calls: list[Callable[[], object]], device: torch.device) -> list[float]:
        """Return the least seconds of every call."""
        if self._num_asked == len(self.taken):
            self.taken.append(_least(calls, device))
        self._num_asked += 1
        return self.taken[self._num_asked - 1]


def measured_seconds(
    model: Model,
    machine: Machine,
    sequence_length: int,
    *,
    coordinates: Coordinates | None = None,
    timings: Timings | None = None,
) -> Callable[[StackShape], float]:
    """Return a function from a model's sizes to the seconds that its layers take for one sequence.

    The two sublayers are timed separately, on the weights of the first layer with attention cut to size: attention with
    every number of heads (in KV groups, or equally many out of each), the FFN at `WIDTHS` widths with interpolation
    between them. A carried mixer is timed as it is. They are minima over rounds in which all sizes take turns, which
    other processes disturb least. Sizes inside heads and of the hidden state are taken as in the dense model.
    `coordinates`: the form's, or None without ranks. With them a linear of low rank counts as much more or less than
    the whole one as it was measured (`_ranked_seconds`); a kind of linear that saves parameters but no time is then not
    worth a rank. `timings`: what was measured before of the same model, machine and length, and takes what is measured.

    Raises `PlanError` for two kinds of carried mixers with equally many parameters.
    """
    # 1. A layer with attention, as wide as the widest, and a sequence.
    timings = Timings() if timings is None else timings
    shape, family = model.shape, model.family
    attending = [number for number in range(shape.num_hidden_layers) if family.stack_of(number).attentions]
    number = next(iter(attending), 0)
    tensors = _sized(model, number, model.read_layer(number), replace(shape, own_sizes=()))
    ffn = family.stack_of(number).index_of("ffn")
    builder = LayerBuilder(model, machine, sequence_length)
    x = torch.randn(1, sequence_length, shape.hidden_size, generator=torch.Generator().manual_seed(0))
    x = uploaded(x, machine.device).to(machine.dtype)

    def sublayer(smaller: ModelShape, index: int) -> Callable[[], object]:
        layer = builder.layer(number, _sized(model, number, tensors, replace(smaller, own_sizes=())))
        return lambda: layer.run(index, x)

    def mixer(carried: CarriedSizes) -> Callable[[], object]:
        first, *_ = carried.layers
        layer, index = builder.layer(first, model.read_layer(first)), family.stack_of(first).mixer_index
        return lambda: layer.run(index, x)

    # 2. The least seconds of attention with every number of heads, of the FFN at some widths, and of carried mixers.
    heads = _head_sizes(model) if attending else []
    widths = sorted({max(1, round(shape.intermediate_size * part / WIDTHS)) for part in range(1, WIDTHS + 1)})
    attention = family.stack_of(number).mixer_index
    calls = [sublayer(replace(shape, num_attention_heads=h, num_key_value_heads=g), attention) for h, g in heads]
    calls += [sublayer(replace(shape, intermediate_size=width), ffn) for width in widths]
    calls += [mixer(carried) for carried in shape.carried]
    seconds = timings.least(calls, machine.device)
    of_heads = dict(zip(heads, seconds, strict=False))
    of_width = seconds[len(heads) : len(heads) + len(widths)]
    of_carried = dict(zip((one.parameters for one in shape.carried), seconds[len(heads) + len(widths) :], strict=True))
    if len(of_carried) < len(shape.carried):
        raise PlanError(
            f"--budget latency cannot tell the mixers of this {family.model_type} apart, which have equally many "
            "parameters; choose another budget."
        )
    # 3. What linears of low rank add to them, or save.
    ranked = None
    if coordinates is not None:
        ranked = _ranked_seconds(model, machine, tensors, sequence_length, coordinates, timings)

    # 4. A layer is the sum of its two sublayers.
    def of_layer(layer: LayerShape) -> float:
        kept = layer.num_attention_heads, layer.num_key_value_heads
        whole = of_carried[layer.carried] if layer.carried else of_heads[kept]
        whole += float(np.interp(layer.intermediate_size, widths, of_width))
        return whole if ranked is None else whole + ranked(layer)

    return lambda stack: sum(map(of_layer, stack.layers))


def _head_sizes(model: Model) -> list[tuple[int, int]]:
    """Return the query heads and KV heads that attention may have: all, if the stock class can have no others."""
    found: dict[tuple[int, int], None] = {}
    for shape in model.shape.distinct:
        groups, per_group = shape.num_key_value_heads, shape.heads_per_group
        if model.family.reason_against("heads") is None:
            found |= dict.fromkeys((groups * each, groups) for each in range(1, per_group + 1))
            found |= dict.fromkeys((kept * per_group, kept) for kept in range(1, groups))
        else:
            found[shape.num_attention_heads, groups] = None
    return list(found)


def _ranked_seconds(
    model: Model,
    machine: Machine,
    tensors: Tensors,
    sequence_length: int,
    coordinates: Coordinates,
    timings: Timings,
) -> Callable[[LayerShape], float]:
    """Return a function from a layer to the seconds that its linears' ranks add; they are negative where these pay.

    A linear `(m, n)` of rank r takes `a + b r (n − r) + c r m`, and a whole one `a + c n m`. Least squares find the
    numbers from `RANKS` ranks and two numbers of rows.
    """
    stack = model.family.stack
    writers = [attention.out for attention in stack.attentions]
    weights = [tensors[f"{linear}.weight"] for linear in (*writers, stack.ffn.up)]
    by_inputs = {weight.shape[1]: weight for weight in weights}  # one number of inputs is measured once
    of_inputs = {
        inputs: _fitted_ranks(uploaded(weight, machine.device).to(machine.dtype), sequence_length, coordinates, timings)
        for inputs, weight in by_inputs.items()
    }

    def added(layer: LayerShape) -> float:
        values = layer.num_attention_heads * layer.value_size
        scores = (layer.num_attention_heads + layer.num_key_value_heads) * layer.query_key_size
        linears = (
            (layer.query_key_rank, scores, layer.hidden_size),
            (layer.output_rank, layer.middle_size, values),
            (layer.gate_rank, layer.intermediate_size, layer.middle_size),
            (layer.up_rank, layer.intermediate_size, layer.middle_size),
        )
        return sum(of_inputs[inputs](rank, rows) for rank, rows, inputs in linears if rank)

    return added


def _fitted_ranks(
    weight: torch.Tensor, sequence_length: int, coordinates: Coordinates, timings: Timings
) -> Callable[[int, int], float]:
    """Return a function from rank and rows to the seconds that a linear takes more than the whole one `(m, n)`."""
    rows, inputs = weight.shape
    x = weight.new_ones(1, sequence_length, inputs)
    ranks = sorted({max(1, round(inputs * part / RANKS)) for part in range(1, RANKS)})
    sizes = [(rank, m) for m in sorted({max(1, rows // 2), rows}) for rank in (*ranks, inputs)]
    seconds = timings.least([_linear(x, weight[:m], rank, coordinates) for rank, m in sizes], weight.device)
    low = [(rank, m) for rank, m in sizes if rank < inputs]
    whole = [(rank, m) for rank, m in sizes if rank == inputs]
    taken = dict(zip(sizes, seconds, strict=True))

    def terms(rank: int, m: int) -> list[float]:
        return [1.0, rank * (inputs - rank), rank * m]

    of_low, *_ = np.linalg.lstsq([terms(*size) for size in low], [taken[size] for size in low])
    of_whole, *_ = np.linalg.lstsq([[1.0, inputs * m] for _, m in whole], [taken[size] for size in whole])
    return lambda rank, m: float(np.dot(terms(rank, m), of_low) - np.dot([1.0, inputs * m], of_whole))


def _linear(x: torch.Tensor, weight: torch.Tensor, rank: int, coordinates: Coordinates) -> Callable[[], object]:
    """Return a call of a linear `(m, n)`, or of one of low rank as the per-layer form computes it."""
    inputs = weight.shape[1]
    if rank == inputs:
        return lambda: functional.linear(x, weight)
    outputs, read = weight[:, :rank].contiguous(), coordinates(inputs, rank).requires_grad_(False)
    read.load_state_dict({"columns": torch.randperm(inputs), "weight": torch.ones(inputs - rank, rank)})
    read.to(x.device).to(x.dtype)
    return lambda: functional.linear(read(x), outputs)


def _sized(model: Model, number: int, tensors: Tensors, shape: ModelShape) -> Tensors:
    """Return the first neurons and heads of layer `number`, and those again where other layers have more."""
    expected, sized = model.family.expected_tensors(shape, number), {}
    for name, tensor in tensors.items():
        for dim, size in enumerate(expected[name]):
            repeated = torch.cat([tensor] * -(-size // tensor.shape[dim]), dim)
            tensor = repeated.narrow(dim, 0, size)
        sized[name] = tensor.contiguous()
    return sized


def _least(calls: list[Callable[[], object]], device: torch.device) -> list[float]:
    """Return the least seconds of every call: CPU time of the process on one thread, else seconds of the clock."""
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    now = time.process_time if one_thread else time.perf_counter
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS + 1):  # the first round warms up
        for call, seconds in zip(calls, times, strict=True):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            started = now()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(now() - started)
    return [min(seconds[1:]) for seconds in times]
