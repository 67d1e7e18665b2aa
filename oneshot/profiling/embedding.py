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
PREDICTED_SEQUENCES = 16  # others, of which the tokens' probabilities are: a probe must not know its own tokens
MIN_EMBEDDING_ERROR = 1e-4  # squared: below this the divergence is rounding noise


def no_embedding_profile() -> Tensors:
    """Return the tensors of a `Profile` for an embedding that was not measured: empty, and no sensitivity."""
    empty = torch.empty(0, 0, dtype=torch.float64)
    return _tensors(empty, torch.empty(0), torch.arange(0), empty, torch.empty(0, 2, dtype=torch.float64))


def _tensors(*found: torch.Tensor) -> Tensors:
    names = ("gram", "probabilities", "order", "errors", "probes")
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
    # 1. What a tied output head reads, what it costs if the first layer reads other rows, and how likely each token is.
    machine, workers, head = states.machine, states.machine.workers, states.builder.output_head()
    gram, probabilities, last, part = _read_by_head(model, states, head)
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
    # 3. A few sequences pass all layers again, with a reduced embedding of each size.
    probes = embedding_probes(errors, len(embedding))
    smaller = [reduce_embedding(rows, order, tables, workers=workers) for tables, _ in probes]

    def reduced(index: int) -> torch.Tensor:
        return expanded(smaller[index], embedding.shape[1], machine.device)

    divergences = torch.zeros(len(probes), EMBEDDING_PROBES, dtype=torch.float64, device=machine.device)
    if last:
        [batch] = text.part(part).batches(len(last))
        passing = [states.builder.embed(reduced(index), batch) for index in range(len(probes))]
        upload = Uploader(machine.device)
        for number, tensors in enumerate(layers()):
            layer = states.builder.layer(number, upload(tensors))
            for one in (one for probe in passing for one in probe.split(1)):
                one.copy_(layer.run_all(one))
            advance(1)
        for index, passed in enumerate(passing):
            other = replace(head, weight=reduced(index).to(head.weight)) if model.shape.tied else head
            for number, state, probe in zip(range(part.start, part.stop), last, passed, strict=True):
                divergences[index, number] = other.divergence_from(head, state, probe).mean()
        advance(1)
    # 4. What each loses of the logits, and the divergence of the output.
    workers.sum_(divergences)  # zeros from all but the one whose probe it is
    means = divergences.sum(1).cpu() / num_embedding_probes(text.num_sequences)
    lost = torch.tensor([lost for _, lost in probes], dtype=torch.float64)
    return _tensors(gram.cpu(), probabilities.cpu(), order, errors, torch.stack((lost, means), dim=1))


def num_embedding_probes(num_sequences: int) -> int:
    """Return how many sequences are probes: the first ones, and half of a short text."""
    return min(EMBEDDING_PROBES, max(1, num_sequences // 2))


def _read_by_head(
    model: Model, states: States, head: OutputHead
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], slice]:
    """Return the mean `h hᵀ (D, D)` float64 over the stream, the tokens' probabilities, and the probes' last states.

    The mean is zero for a head of its own, which reads with other rows. Probes are of the first sequences, and the
    probabilities are of the sequences behind them. The workers share both out anew. The states are of this worker's
    part of the probes, which is also returned.
    """
    machine, workers = states.machine, states.machine.workers
    accumulator = GramAccumulator(model.shape.hidden_size, output_size=None, device=machine.device)
    first: list[torch.Tensor] = []
    start = states.part.start
    states.advance = lambda tokens: None  # the layers were counted
    for x, _ in states.read():
        if model.shape.tied:
            accumulator.update_(head.norm(x).flatten(0, -2))
        first += list(x[: max(0, EMBEDDING_PROBES + PREDICTED_SEQUENCES - start)].clone())
        start += len(x)
    gram = accumulator.finish(workers=workers).gram.double() / states.num_tokens
    gathered = workers.gather(tuple(first))
    count = num_embedding_probes(len(gathered))
    part, others = workers.part(count), gathered[count:] or gathered  # the probe itself in a text of one sequence
    probabilities = torch.zeros(model.shape.vocab_size, dtype=torch.float64, device=machine.device)
    for state in others[workers.part(len(others))]:
        probabilities += head.probabilities(state)
    workers.sum_(probabilities)
    return gram, as_float32(probabilities) / len(others), list(gathered[part]), part


def embedding_probes(errors: torch.Tensor, vocab_size: int) -> list[tuple[tuple[TableShape, ...], float]]:
    """Return the ranks of the embedding's probes and the squared errors that they leave, from the least on.

    They take the `PROBE_SHARES` whose error is large enough, at least the last one; `errors` as in `smaller_tables`.
    """
    found = [smaller_tables(errors, vocab_size, share) for share in PROBE_SHARES]
    lost = [sum(float(errors[index, table.rank]) for index, table in enumerate(tables)) for tables in found]
    probes = list(zip(found, lost, strict=True))
    return [probe for probe in probes if probe[1] >= MIN_EMBEDDING_ERROR] or probes[-1:]
