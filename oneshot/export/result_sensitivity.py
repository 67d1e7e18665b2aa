"""What a result of `--form gguf` gives for errors of its outputs: squared gradients at the outputs of its linears."""

import torch
from torch import nn

from oneshot.compression.overflow import refuse_overflow
from oneshot.compression.statistics import GramAccumulator, Statistics
from oneshot.export.result_model import EMBEDDING, HEAD, Advance, ResultModel
from oneshot.stream import ActivationStore, InputSquares, outputs_of

SENSITIVITY_TOKENS = 8192
HEAD_INPUTS = f"{HEAD}.inputs"


def output_squares(model: ResultModel, seed: int, advance: Advance) -> tuple[InputSquares, Statistics]:
    """Return the sums of squared gradients at the outputs of a result's linears, and the Gram of what its head reads.

    The gradients start as `OutputHead.random_gradient`, so the means over tokens are the diagonal of the Fisher matrix
    at these outputs. The gradient at the embedding's rows has the name of its module. The output head has the
    probabilities of tokens, which bound their variance, and the squares of what it reads under `lm_head.inputs`.
    The pass is made as for the output curvature (`profiling/curvature`), outside inference mode.
    """
    squares = InputSquares()
    states = [model.embedded()]
    for number in range(model.num_layers):
        layer = model.layer(number)
        states.append(model.store())
        for batch in model.batches:
            states[-1].write(batch.rows, layer.run(states[-2].read_batch(batch)))
            advance(batch.token_ids.numel())
    gradients = states.pop()
    of_head = _start(model, gradients, squares, seed)
    for number in reversed(range(model.num_layers)):
        layer = model.layer(number)
        linears: dict[str, nn.Module] = {
            name: part for name, part in layer.module.named_modules() if isinstance(part, nn.Linear)
        }
        for batch in model.batches:
            x, behind = states[-1].read_batch(batch), gradients.read_batch(batch)
            with torch.enable_grad(), outputs_of(linears) as outputs:
                moved = layer.run(x.requires_grad_())
            before, *found = torch.autograd.grad(moved, [x, *outputs.values()], behind)
            for name, gradient in zip(outputs, found, strict=True):
                squares.add_rows_(f"model.layers.{number}.{name}", gradient)
            gradients.write(batch.rows, before)
            advance(batch.token_ids.numel())
        states.pop().close()
    for batch in model.batches:
        squares.add_rows_(EMBEDDING, gradients.read(batch.rows) * model.embedding_scale)
    gradients.close()
    refuse_overflow(*squares.sums.values())
    return squares, of_head


def _start(model: ResultModel, last: ActivationStore, squares: InputSquares, seed: int) -> Statistics:
    """Replace the last states by random gradients; sum and return what the head reads."""
    head, number = model.output_head(), 0
    size = model.source.shapes[f"{EMBEDDING}.weight"][1]
    gram = GramAccumulator(size, output_size=None, device=model.machine.device)
    for batch in model.batches:
        states = last.read_batch(batch)
        for state in states:
            read = head.norm(state)
            squares.add_rows_(HEAD_INPUTS, read)
            gram.update_(read)
            squares.add_(HEAD, head.probabilities(state), torch.ones(1))
            state.copy_(head.random_gradient(state, seed + number))
            number += 1
        last.write(batch.rows, states)
    return gram.finish()
