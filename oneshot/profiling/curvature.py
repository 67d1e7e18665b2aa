"""Measure output curvature: one pass forward and one backward over a little text. No weight is trained.

The states before every layer stay in activation stores. Then layer by layer, from the last: the layer runs again, now
with a graph, and the gradient behind it becomes the gradient before it. So one layer and its graph for one batch, or on
a device for a part of it, are held at a time, and every layer is read twice.
"""

import tempfile
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from oneshot.architecture import Description, ModelShape, Stack, part_of_output
from oneshot.checkpoint import Model
from oneshot.compression.branch_norm import BranchNorm, MixtureNorms, at_scaled
from oneshot.compression.curvature import STATES, Curvature, shrunk
from oneshot.compression.overflow import SumsOverflowError, gradients_overflow, naming_the_layer
from oneshot.compression.statistics import GramAccumulator
from oneshot.machine import Machine, repeatable_attention
from oneshot.machine.transfer import Uploader
from oneshot.profiling.lent_gradients import Beside, LentGradients
from oneshot.stream import ActivationStore, Layer, LayerBuilder, Memory, OutputHead, holds_scores, memory_of, read_ahead
from oneshot.text import Batch, Text, placed

CURVATURE_TOKENS = 16_384  # at most, and at most a quarter of the text, if this leaves the fewest
FEWEST_TOKENS = 2_048
BATCHES = 8  # at least, where there are as many sequences
Norms = list[BranchNorm | MixtureNorms | None]  # of a layer, by sublayer: what follows their writers
# of a layer: its number, sums of the part of the text, what finds the layer where states overflow, if they do; layer 0
# comes a second time with the sum of the states before it
OfLayer = tuple[int, dict[str, GramAccumulator], Callable[[], int | None]]
SCORES_TOGETHER = 2**28  # numbers of attention's scores on a device, which has them whole
LARGEST_GRADIENT = 10.0  # of a token, in units of the mean norm of its sequence


def measure_curvature(
    model: Model, text: Text, machine: Machine, *, seed: int, advance: Callable[[float], None] = lambda tokens: None
) -> Curvature:
    """Return the output curvature of every layer, on the first `curvature_tokens` of the text.

    Workers share the batches, and some may have none; what they draw and sum does not depend on their number.

    Args:
        seed: of random signs. advance: receives the tokens that passed a layer, in either direction.

    Raises `CheckpointError` if gradients are not finite; it names the layer where they or states overflow.
    """
    text = text.first(curvature_tokens(text.num_tokens))
    together = sequences_of_batch(text.num_sequences, machine.batch_size, mixture=model.shape.experts is not None)
    batches = text.batches(together)
    part = machine.workers.part(len(batches))
    first, own = sum(len(batch.token_ids) for batch in batches[: part.start]), placed(batches[part])
    curvature = Curvature(Path(tempfile.mkdtemp(prefix="curvature-", dir=machine.scratch)))
    with torch.inference_mode(False), torch.no_grad():
        passed = (
            _passed_back(model, machine, own, text.longest, first, seed, advance) if own else _nothing(model, machine)
        )
        for number, sums, cause in passed:
            try:
                grams = ((name, one.finish(machine.workers).gram / text.num_tokens) for name, one in sums.items())
                if STATES in sums:
                    curvature.save_states(dict(grams)[STATES])
                else:
                    curvature.save(number, {name: shrunk(gram) for name, gram in grams})
            except SumsOverflowError as error:
                layer = cause()
                if layer is None:
                    raise gradients_overflow(number, model.read_layer(number)) from error
                with naming_the_layer(layer, partial(model.read_layer, layer)):
                    raise
    return curvature


def sequences_of_batch(num_sequences: int, batch_size: int, *, mixture: bool) -> int:
    """Return how many sequences pass together: few enough for `BATCHES` batches, which processes can share.

    Experts take as long for few tokens as for many, so a mixture's batches are as large as `batch_size` allows.
    """
    return batch_size if mixture else max(1, min(batch_size, num_sequences // BATCHES))


def curvature_tokens(num_tokens: int) -> int:
    """Return how many tokens of a text the curvature is measured on, if it has so many."""
    return min(CURVATURE_TOKENS, max(FEWEST_TOKENS, num_tokens // 4))


def _passed_back(
    model: Model,
    machine: Machine,
    own: Sequence[Batch],
    longest: int,
    first: int,
    seed: int,
    advance: Callable[[float], None],
) -> Iterator[OfLayer]:
    """Pass a worker's `own` batches forward and back, and yield every layer's sums over them, from the last layer.

    `longest`: sequence of the whole text. `first`: index of the first own sequence in it.
    """
    builder = LayerBuilder(model, machine, longest)
    memory = memory_of(model, machine, own)
    states = _forward(model, machine, builder, own, memory, advance)
    lent = LentGradients(memory, machine, own)
    gradients = states.pop()  # what is behind the last layer gives way to its gradients
    are_finite = _start(builder.output_head(), gradients, own, first, seed)
    whole, numbers = holds_scores(model, machine.device), range(model.shape.num_hidden_layers)[::-1]
    for number, (layer, norms) in zip(numbers, _layers(model, machine, builder, numbers, memory), strict=True):
        stack, shape = model.family.stack_of(number), model.shape.of(number)
        sums = _accumulators(model, machine, number)
        for batch in own:
            behind, x = gradients.read_batch(batch), states[-1].read_batch(batch)
            together = sequences_together(len(x), x.shape[1], shape.num_attention_heads, x.device, whole)
            before = []
            parts = lent.parts(batch, together, borrows=model.family.borrows(number))
            for some, gradient, beside in zip(x.split(together), behind.split(together), parts, strict=True):
                own_before, found = _gradients(layer, norms, stack, shape, sums, some, gradient, beside)
                for name, gradients_of in found.items():
                    sums[name].update_(clipped(gradients_of))
                before.append(own_before)
            gradients.write(batch.rows, torch.cat(before))
            advance(batch.token_ids.numel())
        yield number, sums, partial(_first_overflow, states, own, are_finite)
        states.pop().close()
    sums = _of_states(model, machine)
    for batch in own:
        sums[STATES].update_(clipped(gradients.read_batch(batch)))
    yield 0, sums, partial(_first_overflow, states, own, are_finite)
    gradients.close()
    lent.close()


def _nothing(model: Model, machine: Machine) -> Iterator[OfLayer]:
    """Yield the sums of a worker without batches, as `_passed_back`: zeros, without a pass."""
    for number in range(model.shape.num_hidden_layers)[::-1]:
        yield number, _accumulators(model, machine, number), lambda: None
    yield 0, _of_states(model, machine), lambda: None


def _first_overflow(
    states: Sequence[ActivationStore], batches: Sequence[Batch], are_finite: torch.Tensor
) -> int | None:
    """Return the first layer behind which states are not finite; None if all are.

    `states`: those before every layer that is not passed back. `are_finite`: whether all behind the last layer are.
    """
    if are_finite:
        return None
    finite = (all(bool(store.read_batch(batch).isfinite().all()) for batch in batches) for store in states[1:])
    return next((layer for layer, is_finite in enumerate(finite) if not is_finite), len(states) - 1)


def measured_sizes(family: Description, shape: ModelShape, stack: Stack) -> dict[str, int]:
    """Return the sizes `n` of the matrices `(n, n)` that are measured of a layer, by their names in `LayerCurvature`.

    Only ranks of attention's linears need attention's matrices.
    """
    sizes = {"ffn": shape.hidden_size}
    if family.may_have_ranks(shape) and any(attention.ranked for attention in stack.attentions):
        sizes |= {"output": shape.hidden_size, "query_key": shape.query_key_width}
    return sizes


def sequences_together(sequences: int, length: int, heads: int, device: torch.device, holds_scores: bool) -> int:
    """Return how many of a batch's sequences pass a layer with a graph together: fewer where scores take memory."""
    if device.type != "cuda":
        return 1 if holds_scores else sequences
    return min(sequences, max(1, SCORES_TOGETHER // (heads * length**2)))


def _forward(
    model: Model,
    machine: Machine,
    builder: LayerBuilder,
    batches: Sequence[Batch],
    memory: Memory | None,
    advance: Callable[[float], None],
) -> list[ActivationStore]:
    """Return the states before every layer, and behind the last one.

    The `memory` has the keys and values that layers have lent.
    """
    num_layers, num_tokens = model.shape.num_hidden_layers, sum(batch.token_ids.numel() for batch in batches)
    states = [ActivationStore(num_tokens, model.shape.hidden_size, machine) for _ in range(num_layers + 1)]
    embedding = model.read_embedding()
    for batch in batches:
        states[0].write(batch.rows, builder.embed(embedding, batch))
    del embedding
    for number, (layer, _) in enumerate(_layers(model, machine, builder, range(num_layers), memory)):
        for batch in batches:
            if memory is not None:
                memory.enter(batch)
            states[number + 1].write(batch.rows, layer.run_all(states[number].read_batch(batch)))
            advance(batch.token_ids.numel())
    return states


def _layers(
    model: Model, machine: Machine, builder: LayerBuilder, numbers: Sequence[int], memory: Memory | None
) -> Iterator[tuple[Layer, Norms]]:
    """Yield layers whose weights may be in a graph, as tensors of inference mode may not; and norms inside them."""
    upload = Uploader(machine.device)
    for number, tensors in zip(numbers, read_ahead(model, machine.device, numbers), strict=True):
        tensors = {
            name: tensor.clone() if tensor.is_inference() else tensor for name, tensor in upload(tensors).items()
        }
        stack, device = model.family.stack_of(number), machine.device
        norms: Norms = [BranchNorm.of(sublayer, tensors, device) for sublayer in stack.sublayers]
        mixture = MixtureNorms.of(stack, tensors, device)
        if mixture is not None:
            norms[mixture.index] = mixture
        layer = builder.layer(number, tensors, memory)
        del tensors
        yield layer, norms
        del layer  # free before the next one is waited for


def _start(head: OutputHead, last: ActivationStore, batches: Sequence[Batch], first: int, seed: int) -> torch.Tensor:
    """Replace the states behind the last layer by random gradients; return whether all states are finite, a scalar.

    The signs of a sequence depend on the seed and on its index in the whole text; `first`: of these batches.
    """
    finite = []
    for batch in batches:
        states = last.read_batch(batch)
        finite.append(states.isfinite().all())
        for state in states:
            state.copy_(head.random_gradient(state, seed + first))
            first += 1
        last.write(batch.rows, states)
    return torch.stack(finite).all()


def _gradients(
    layer: Layer,
    norms: Norms,
    stack: Stack,
    shape: ModelShape,
    measured: Container[str],
    x: torch.Tensor,
    behind: torch.Tensor,
    beside: Beside | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the gradient at the layer's input `x (sequences, length, D)`, and those inside it that are `measured`.

    `behind`: the gradient behind the layer. `norms`: inside the sublayers. All gradients are `(sequences, length,
    …)`; `query_key` has one for queries and keys together. `beside`: what the layer reads beside the stream; its
    sums get the gradients at keys and values that it borrows.
    """
    # 1. The linears whose outputs get gradients, and what the layer reads beside the stream.
    mixer, ffn = stack.mixer_index, stack.index_of("ffn")
    writers = {ffn: stack.sublayers[ffn].writer}
    writers |= {mixer: stack.attention.out} if "output" in measured else {}
    readers = [stack.attention.q, stack.attention.k] if "query_key" in measured else []
    linears = list(dict.fromkeys([*writers.values(), *map(stack.stored_linear, readers)]))
    others_of = [norm.beside for norm in norms if isinstance(norm, MixtureNorms)]
    layer = layer if beside is None else layer.reading(beside.memory)
    leaves = [] if beside is None else beside.leaves
    # 2. Forward with a graph of this layer, and back.
    with torch.enable_grad(), repeatable_attention(x.device), layer.outputs_of(*linears, *others_of) as outputs:
        for leaf in (x, *leaves):
            leaf.requires_grad_()
        moved = layer.run(ffn, layer.run(mixer, x))
    lent, behind_lent = ([], []) if beside is None else beside.lent()
    asked = [x, *(outputs[linear] for linear in linears), *leaves]
    ahead = [behind, *behind_lent]
    before, *found_at = torch.autograd.grad([moved, *lent], asked, ahead, allow_unused=bool(leaves))
    gradients = dict(zip(linears, found_at, strict=False))
    if beside is not None:
        beside.add_(found_at[len(linears) :])

    # 3. Where a norm follows the writer, gradients are at its output in units of the token's root mean square.
    def at_writer(index: int) -> torch.Tensor:
        gradient, norm = gradients[writers[index]], norms[index]
        if norm is not None:
            written = outputs[writers[index]].detach().flatten(0, -2)
            if isinstance(norm, MixtureNorms):
                others = outputs[norm.beside].detach().flatten(0, -2)
                scales = norm.scales(layer, written, others + layer.after_experts(norm.mixer, written))
            else:
                scales = norm.scales(written, layer.added(index, written))
            gradient = at_scaled(gradient.flatten(0, -2), scales)
        return gradient.reshape(x.shape)

    def at_reader(linear: str) -> torch.Tensor:
        of_queries = shape.num_attention_heads * shape.head_dim
        return part_of_output(gradients[stack.stored_linear(linear)], linear, stack, of_queries)

    found = {"ffn": at_writer(ffn)}
    if readers:
        found |= {"output": at_writer(mixer), "query_key": torch.cat([at_reader(linear) for linear in readers], -1)}
    return before, found


def _accumulators(model: Model, machine: Machine, layer: int) -> dict[str, GramAccumulator]:
    """Return the sums of what the curvature of a layer is made of, by the names of `measured_sizes`."""
    sizes = measured_sizes(model.family, model.shape.of(layer), model.family.stack_of(layer))
    return {name: GramAccumulator(size, output_size=None, device=machine.device) for name, size in sizes.items()}


def _of_states(model: Model, machine: Machine) -> dict[str, GramAccumulator]:
    """Return the sum that the curvature of the states before the first layer is made of."""
    return {STATES: GramAccumulator(model.shape.hidden_size, output_size=None, device=machine.device)}


def clipped(gradients: torch.Tensor) -> torch.Tensor:
    """Return gradients `(sequences, length, n)` as float32 rows, none above `LARGEST_GRADIENT` in its sequence."""
    rows = gradients.float()
    norms = rows.norm(dim=-1, keepdim=True)
    limits = LARGEST_GRADIENT * norms.mean(1, keepdim=True)
    return (rows * (limits / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1)).flatten(0, 1)
