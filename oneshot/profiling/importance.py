"""What llama.cpp calls an importance matrix: sums of squares of what linears read, from one pass over the text."""

from collections.abc import Callable
from functools import partial

import torch

from oneshot.checkpoint import Model
from oneshot.compression.overflow import naming_the_layer, refuse_overflow
from oneshot.machine import Machine
from oneshot.machine.transfer import Uploader
from oneshot.stream import InputSquares, States, read_ahead
from oneshot.text import Text

IMPORTANCE_TOKENS = 32_768  # of a result's text: means of squares need fewer than corrections


def measure_importance(
    model: Model, text: Text, machine: Machine, *, advance: Callable[[float], None] = lambda tokens: None
) -> InputSquares:
    """Pass the text through the dense model once, layer by layer, and return the sums of all workers on the host.

    They are named by the modules of the stock class, `model.layers.3.mlp.down_proj`; experts by the parameter.
    The output head has sums if it is a linear of its own.

    Args:
        advance: receives the tokens that passed a layer.

    Raises `CheckpointError` if activations are not finite; it names the layer.
    """
    states, found = States(model, machine, text, advance=advance), InputSquares()
    upload = Uploader(machine.device)
    for number, tensors in enumerate(read_ahead(model, machine.device)):
        layer = states.dense_layer(number, upload(tensors))
        with layer.summing_inputs() as squares:
            states.defer(lambda x, _, layer=layer: layer.run_all(x))  # type: ignore[misc]
            states.settle()
        with naming_the_layer(number, partial(dict, tensors)):
            _collect(squares, found, machine, model.family.stack_of(number).layer_prefix(number))
        del layer, tensors  # free before the next one is waited for
    head = model.family.head
    if head is not None and not model.shape.tied and model.family.last_stack.project_out is None:
        squares, stack = InputSquares(), model.family.last_stack
        norm = torch.nn.Identity() if stack.final_norm is None else states.builder.final_norm(stack)
        for x, _ in states.read():
            squares.add_rows_(head.removesuffix(".weight"), norm(x))
        _collect(squares, found, machine, "")
    states.close()
    return found


def _collect(squares: InputSquares, found: InputSquares, machine: Machine, prefix: str) -> None:
    """Put the sums of all workers under their whole names. Raises `SumsOverflowError` if they are not finite."""
    for name, total in squares.sums.items():
        counts = squares.counts[name]
        machine.workers.sum_(total, counts)
        refuse_overflow(total)
        found.add_(prefix + name, total.cpu(), counts.cpu())
