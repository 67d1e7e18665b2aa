"""The cost of ranks of an embedding's vocabulary, and the effect of a reduced embedding on the output."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from oneshot.architecture import TableShape
from oneshot.checkpoint import Model
from oneshot.compression import Curvature
from oneshot.compression.embedding import TokenRows, expanded, order_of_tokens, range_errors, reduce_embedding
from oneshot.compression.statistics import GramAccumulator, shrinkage_on_other_text, towards_diagonal
from oneshot.linalg.sums import as_float32
from oneshot.machine.transfer import Uploader
from oneshot.planning import smaller_tables
from oneshot.stream import OutputHead, States
from oneshot.tensors import Tensors
from oneshot.text import Text, load_tokenizer, special_tokens

PROBE_SHARES = (3 / 5, 2 / 5, 1 / 5)  # of its parameters: large steps cost more per parameter than small ones
EMBEDDING_PROBES = 8  # sequences: few places lose almost everything that is lost
MIN_EMBEDDING_ERROR = 1e-4  # squared: below this the divergence is rounding noise


def no_embedding_profile() -> Tensors:
    """Return the tensors of a `Profile` for an embedding that was not measured: empty, and no sensitivity."""
    empty = torch.empty(0, 0, dtype=torch.float64)
    return _tensors(empty, torch.empty(0), torch.arange(0), empty, torch.zeros(1, dtype=torch.float64))


def _tensors(*found: torch.Tensor) -> Tensors:
    names = ("gram", "probabilities", "order", "errors", "sensitivity")
    return {f"embedding_{name}": tensor for name, tensor in zip(names, found, strict=True)}


def marks_of(model: Model) -> list[int]:
    """Return the tokens whose rows stay as they are (`special_tokens`)."""
    return special_tokens(load_tokenizer(model.checkpoint.folder), model.shape.vocab_size)


def embedding_steps(model: Model) -> int:
    """Return the steps of `profile_embedding`: states, order and ranks, every layer, and the output."""
    return model.shape.num_hidden_layers + 4


def profile_embedding(
    model: Model,
    states: States,
    text: Text,
    layers: Callable[[], Iterable[Tensors]],
    *,
    curvature: Curvature | None,
    advance: Callable[[float], None] = lambda steps: None,
) -> Tensors:
    """Return the `embedding_…` tensors of a `Profile`; `states` are those after the last layer.

    What the output head reads is known only after the last layer, so a few sequences pass all `layers` again.

    Args:
        text: the text of the states, of all workers.
        curvature: output curvature, which says what changes of the rows cost as inputs of the first layer; None if
            they count as rows of the output head alone. An embedding that is no output head needs it.
        advance: is told of each of the `embedding_steps`.
    """
    # 1. What the output head reads, what it costs if the first layer reads other rows, and how likely each token is.
    machine, workers, head = states.machine, states.machine.workers, states.builder.output_head()
    gram, probabilities, last, part = _read_by_head(model, states, head)
    if not model.shape.tied:
        gram.zero_()
    if curvature is not None:
        gram += model.family.stack.embedding_scale**2 * curvature.of_states(machine.device)
    gram = towards_diagonal(gram, shrinkage_on_other_text(len(gram), states.num_tokens))
    advance(1)
    # 2. The order of the tokens, and what every rank of every range loses of the logits.
    embedding = model.read_embedding()
    rows = TokenRows(embedding, gram, probabilities, marks_of(model))
    order = order_of_tokens(rows, workers=workers)
    advance(1)
    errors = range_errors(rows, order, workers=workers)
    advance(1)
    # 3. A few sequences pass all layers again, with a reduced embedding.
    tables, lost = embedding_probe(errors, len(embedding))
    smaller = reduce_embedding(rows, order, tables, workers=workers)
    divergences = torch.zeros(EMBEDDING_PROBES, dtype=torch.float64, device=machine.device)
    if last:
        reduced = expanded(smaller, embedding.shape[1], machine.device)
        del smaller
        [batch] = text.part(part).batches(len(last))
        probes = states.builder.embed(reduced, batch)
        upload = Uploader(machine.device)
        for number, tensors in enumerate(layers()):
            layer = states.builder.layer(number, upload(tensors))
            for probe in probes.split(1):
                probe.copy_(layer.run_all(probe))
            advance(1)
        other = replace(head, weight=reduced.to(head.weight)) if model.shape.tied else head
        for number, state, probe in zip(range(part.start, part.stop), last, probes, strict=True):
            divergences[number] = other.divergence_from(head, state, probe).mean()
        advance(1)
    # 4. The divergence of the output per lost share.
    workers.sum_(divergences)  # zeros from all but the one whose probe it is
    mean = sum(divergences.tolist()) / min(EMBEDDING_PROBES, text.num_sequences)
    sensitivity = torch.tensor([max(0.0, mean) / max(lost, MIN_EMBEDDING_ERROR)], dtype=torch.float64)
    return _tensors(gram.cpu(), probabilities.cpu(), order, errors, sensitivity)


def _read_by_head(
    model: Model, states: States, head: OutputHead
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], slice]:
    """Return the mean `h hᵀ (D, D)` float64 over the stream, the tokens' probabilities, and the probes' last states.

    Probabilities and probes are of the first sequences, which the workers share out anew. The states are of this
    worker's part of them, which is also returned.
    """
    machine, workers = states.machine, states.machine.workers
    accumulator = GramAccumulator(model.shape.hidden_size, output_size=None, device=machine.device)
    first: list[torch.Tensor] = []
    start = states.part.start
    states.advance = lambda tokens: None  # the layers were counted
    for x, _ in states.read():
        accumulator.update_(head.norm(x).flatten(0, -2))
        first += list(x[: max(0, EMBEDDING_PROBES - start)].clone())
        start += len(x)
    gram = accumulator.finish(workers=workers).gram.double() / states.num_tokens
    probed = workers.gather(tuple(first))
    part = workers.part(len(probed))
    last = list(probed[part])
    probabilities = torch.zeros(model.shape.vocab_size, dtype=torch.float64, device=machine.device)
    for state in last:
        probabilities += head.probabilities(state)
    workers.sum_(probabilities)
    return gram, as_float32(probabilities) / len(probed), last, part


def embedding_probe(errors: torch.Tensor, vocab_size: int) -> tuple[tuple[TableShape, ...], float]:
    """Return the ranks of the embedding's probe and the squared error that they leave.

    They take the largest of `PROBE_SHARES` whose error is large enough; `errors` as in `smaller_tables`.
    """
    for share in PROBE_SHARES:
        tables = smaller_tables(errors, vocab_size, share)
        lost = sum(float(errors[index, table.rank]) for index, table in enumerate(tables))
        if lost >= MIN_EMBEDDING_ERROR:
            break
    return tables, lost
