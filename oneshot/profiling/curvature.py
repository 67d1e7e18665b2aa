"""Measure output curvature: one pass forward and one backward over a little text. No weight is trained.

The states before every layer stay in activation stores. Then layer by layer, from the last: the layer runs again, now
with a graph, and the gradient behind it becomes the gradient before it. So one layer and its graph for one batch, or on
a device for a part of it, are held at a time, and every layer is read twice.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from oneshot.checkpoint import Model
from oneshot.compression.curvature import Curvature, shrunk
from oneshot.compression.statistics import GramAccumulator
from oneshot.families import Stack
from oneshot.machine import Machine, repeatable_attention
from oneshot.machine.prefetch import prefetch
from oneshot.machine.transfer import Uploader, pinned, uploaded
from oneshot.stream import ActivationStore, Layer, LayerBuilder, OutputHead
from oneshot.text import Batch, Text, placed

CURVATURE_TOKENS = 16_384
SCORES_TOGETHER = 2**28  # numbers of attention's scores on a device, which has them whole
LARGEST_GRADIENT = 10.0  # of a token, in units of the mean norm of its sequence


def measure_curvature(
    model: Model,
    text: Text,
    machine: Machine,
    *,
    seed: int,
    advance: Callable[[float], None] = lambda tokens: None,
) -> Curvature:
    """Return the output curvature of every layer, on the first `CURVATURE_TOKENS` of the text.

    Workers share the batches; what they draw and sum does not depend on their number.

    Args:
        seed: for drawing tokens. advance: receives the tokens that passed a layer, in either direction.

    Raises `CheckpointError` if gradients are not finite.
    """
    text = text.first(CURVATURE_TOKENS)
    batches = text.batches(machine.batch_size)
    part = machine.workers.part(len(batches))
    first, own = sum(len(batch.token_ids) for batch in batches[: part.start]), placed(batches[part])
    curvature = Curvature(Path(tempfile.mkdtemp(prefix="curvature-", dir=machine.scratch)))
    with torch.inference_mode(False), torch.no_grad():
        builder = LayerBuilder(model, machine, text.longest)
        states = _forward(model, machine, builder, own, advance)
        gradients = states.pop()  # what is behind the last layer gives way to its gradients
        _start(builder.output_head(), gradients, own, first, seed)
        numbers = range(model.shape.num_hidden_layers)[::-1]
        for number, layer in zip(numbers, _layers(model, machine, builder, numbers), strict=True):
            sums = _Sums(model, machine.device)
            for batch in own:
                behind, x = _read(gradients, batch), _read(states[-1], batch)
                together = sequences_together(len(x), x.shape[1], model.shape.num_attention_heads, x.device)
                before = []
                for some, gradient in zip(x.split(together), behind.split(together), strict=True):
                    own_before, output, queries, keys = _gradients(layer, model.family.stack, some, gradient)
                    sums.update_(output, queries, keys, gradient)
                    before.append(own_before)
                gradients.write(batch.rows, torch.cat(before))
                advance(batch.token_ids.numel())
            sums.save(curvature, number, machine, text.num_tokens)
            states.pop().close()
        gradients.close()
    return curvature


def sequences_together(sequences: int, length: int, heads: int, device: torch.device) -> int:
    """Return how many of a batch's sequences pass a layer with a graph together: fewer where scores take memory."""
    if device.type != "cuda":
        return sequences
    return min(sequences, max(1, SCORES_TOGETHER // (heads * length**2)))


def _forward(
    model: Model, machine: Machine, builder: LayerBuilder, batches: Sequence[Batch], advance: Callable[[float], None]
) -> list[ActivationStore]:
    """Return the states before every layer, and behind the last one."""
    num_layers, num_tokens = model.shape.num_hidden_layers, sum(batch.token_ids.numel() for batch in batches)
    states = [ActivationStore(num_tokens, model.shape.hidden_size, machine) for _ in range(num_layers + 1)]
    embedding = model.read_embedding()
    for batch in batches:
        states[0].write(batch.rows, builder.embed(embedding, batch))
    del embedding
    for number, layer in enumerate(_layers(model, machine, builder, range(num_layers))):
        for batch in batches:
            states[number + 1].write(batch.rows, layer.run_all(_read(states[number], batch)))
            advance(batch.token_ids.numel())
    return states


def _layers(model: Model, machine: Machine, builder: LayerBuilder, numbers: Sequence[int]) -> Iterator[Layer]:
    """Yield layers whose weights may be in a graph: tensors of inference mode may not."""
    upload = Uploader(machine.device)
    read = prefetch(lambda index: pinned(model.read_layer(numbers[index]), machine.device), len(numbers))
    for number, tensors in zip(numbers, read, strict=True):
        yield builder.layer(
            number,
            {name: tensor.clone() if tensor.is_inference() else tensor for name, tensor in upload(tensors).items()},
        )
        del tensors  # free before the next layer is waited for


def _read(store: ActivationStore, batch: Batch) -> torch.Tensor:
    return store.read(batch.rows).unflatten(0, batch.token_ids.shape)


def _start(head: OutputHead, last: ActivationStore, batches: Sequence[Batch], first: int, seed: int) -> None:
    """Replace the states behind the last layer by the gradients of the loss of drawn tokens.

    The numbers that draw a sequence's tokens depend on the seed and its index in the whole text; `first`: of these
    batches.
    """
    for batch in batches:
        states = _read(last, batch)
        for state in states:
            uniforms = torch.rand(len(state), generator=torch.Generator().manual_seed(seed + first))
            state.copy_(head.drawn_gradient(state, uploaded(uniforms, state.device)))
            first += 1
        last.write(batch.rows, states)


def _gradients(layer: Layer, stack: Stack, x: torch.Tensor, behind: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients at the layer's input, at the stream behind attention, and at queries and keys.

    All are `(sequences, length, …)`. `behind (sequences, length, D)`: the gradient behind the layer.
    """
    attention, ffn = stack.index_of("heads"), stack.index_of("ffn")
    linears = stack.attention.q, stack.attention.k
    with torch.enable_grad(), repeatable_attention(x.device), layer.outputs_of(*linears) as outputs:
        x.requires_grad_()
        attended = layer.run(attention, x)
        moved = layer.run(ffn, attended)
    at = [x, attended, *(outputs[linear] for linear in linears)]
    return list(torch.autograd.grad(moved, at, behind))


class _Sums:
    """Sum what the curvature of one layer is made of."""

    def __init__(self, model: Model, device: torch.device) -> None:
        shape = model.shape
        self._output, self._queries_keys, self._ffn = (
            GramAccumulator(size, output_size=None, device=device)
            for size in (shape.hidden_size, shape.query_key_width, shape.hidden_size)
        )

    def update_(self, output: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, ffn: torch.Tensor) -> None:
        """Add the gradients of a batch, `(sequences, length, …)`."""
        self._output.update_(clipped(output))
        self._queries_keys.update_(clipped(torch.cat((queries, keys), -1)))
        self._ffn.update_(clipped(ffn))

    def save(self, curvature: Curvature, layer: int, machine: Machine, num_tokens: int) -> None:
        """Write the means over the tokens of all workers, shrunk towards equal curvature of all directions."""
        output, query_key, ffn = (
            shrunk(sums.finish(machine.workers).gram / num_tokens)
            for sums in (self._output, self._queries_keys, self._ffn)
        )
        curvature.save(layer, output=output, query_key=query_key, ffn=ffn)


def clipped(gradients: torch.Tensor) -> torch.Tensor:
    """Return gradients `(sequences, length, n)` as float32 rows, none above `LARGEST_GRADIENT` in its sequence."""
    rows = gradients.float()
    norms = rows.norm(dim=-1, keepdim=True)
    limits = LARGEST_GRADIENT * norms.mean(1, keepdim=True)
    return (rows * (limits / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1)).flatten(0, 1)
