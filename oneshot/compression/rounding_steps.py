"""When linears are rounded: those that read the input before the writer is measured, and the writer after that."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from oneshot.architecture import FeedForward, cut
from oneshot.compression.correction import Factors
from oneshot.compression.fold import with_columns
from oneshot.compression.ranks import with_ranks
from oneshot.compression.rounding import order_for_groups, round_linears
from oneshot.compression.statistics import GramAccumulator, Statistics
from oneshot.compression.sublayer import LayerWork, SublayerTask
from oneshot.stream import Layer, States


def round_readers_(task: SublayerTask, work: LayerWork, states: States, current: Layer) -> None:
    """Round the linears that read the sublayer's input. The writer's correction makes up for what they lost."""
    gram = work.inputs.pop(task.index, None)
    if gram is None:
        size = task.shape.hidden_size
        gram = _gram(task, states, size, lambda x: current.normed(task.index, x).flatten(0, -2))
    _round_(task, work, states, task.sublayer.readers, gram)


def round_writer_(task: SublayerTask, work: LayerWork, states: States, current: Layer) -> None:
    """Round a writer that is not corrected, after the readers."""
    writer = task.sublayer.writer
    weight = work.working[f"{writer}.weight"]
    gram = _gram(task, states, weight.shape[1], lambda x: current.inner(task.index, x))
    order = neuron_order(task, weight)
    if order is not None:
        gram = gram[order][:, order]
        axes = task.sublayer.mixer.axes(task.shape)
        work.working, work.scales = (cut(one, axes, {"neurons": order}) for one in (work.working, work.scales))
        task.keep_(work, order, None)
    _round_(task, work, states, (writer,), gram)


def neuron_order(task: SublayerTask, weight: torch.Tensor) -> torch.Tensor | None:
    """Return the order in which the neurons of an FFN are stored, by the `weight (D, k)` that reads them.

    None for other mixers and for scales that all inputs of an output share.
    """
    assert task.quantisation is not None
    ordered = isinstance(task.sublayer.mixer, FeedForward) and task.quantisation.group > 0
    return order_for_groups(weight) if ordered else None


def round_factors(
    task: SublayerTask, work: LayerWork, units: torch.Tensor, factors: Factors, statistics: Statistics
) -> tuple[torch.Tensor, Factors]:
    """Return the units that stay, and a corrected writer that is rounded; keep the scales of the rows that they have.

    Neurons are put in the order of `neuron_order`. The factors state no error, because the one by the statistics is of
    the writer before.
    """
    quantisation, mixer, writer = task.quantisation, task.sublayer.mixer, task.sublayer.writer
    assert quantisation is not None
    num_columns = int((factors.kept_columns < task.num_columns).sum())
    columns, constant = factors.kept_columns.tensor_split([num_columns])  # a bias has a column
    weight, bias = factors.weight.tensor_split([num_columns], dim=1)
    order = neuron_order(task, weight)
    if order is not None:
        units, columns, weight = units[order], columns[order], weight[:, order]
    gram, name = statistics.gram[columns.unsqueeze(1), columns], f"{writer}.weight"
    num_tokens = statistics.num_rows
    found = task.shared(lambda: round_linears(mixer, (writer,), {name: weight}, {}, gram, num_tokens, quantisation))
    work.scales = with_columns(work.scales, task.sublayer, task.shape, columns) | found.scales
    work.rounding_errors |= found.errors
    return units, replace(
        factors,
        kept_columns=torch.cat((columns, constant)),
        weight=torch.cat((found.weights[name], bias), dim=1),
        predicted_error=None,
    )


def _round_(task: SublayerTask, work: LayerWork, states: States, linears: Sequence[str], gram: torch.Tensor) -> None:
    """Round linears that read the same, in one process for all."""
    num_tokens = states.stack_tokens / task.every(states)
    quantisation, mixer, ranks = task.quantisation, task.sublayer.mixer, work.ranks.get(task.index, {})
    assert quantisation is not None
    found = task.shared(lambda: round_linears(mixer, linears, work.working, ranks, gram, num_tokens, quantisation))
    work.working = with_ranks(work.working | found.weights, mixer, found.ranks)
    if found.ranks:
        work.ranks[task.index] = ranks | found.ranks
    work.scales |= found.scales
    work.rounding_errors |= found.errors


def _gram(
    task: SublayerTask, states: States, size: int, rows_of: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the Gram `(n, n)` of what linears read in some batches of the stream, after the states have moved on."""
    states.settle()
    sums = GramAccumulator(size, output_size=None, device=task.machine.device)
    for x, _ in states.read(task.every(states)):
        sums.update_(rows_of(x))
    return sums.finish(task.machine.workers).gram
