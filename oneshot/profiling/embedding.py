"""The cost of ranks of ranges of the vocabulary, and the effect of a reduced embedding or head on the output."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from oneshot.architecture import TABLES, Table, TableShape
from oneshot.checkpoint import Model
from oneshot.compression import Curvature
from oneshot.compression.embedding import TokenRows, expanded, order_of_tokens, range_errors, reduce_embedding
from oneshot.compression.statistics import GramAccumulator, shrinkage_on_other_text, towards_diagonal
from oneshot.linalg.sums import as_float32
from oneshot.machine import Machine
from oneshot.machine.transfer import Uploader
from oneshot.planning import smaller_tables
from oneshot.stream import LayerBuilder, OutputHead, States
from oneshot.tensors import Tensors
from oneshot.text import NO_ROWS, Batch, Text, load_tokenizer, special_tokens

PROBE_SHARES = (3 / 5, 2 / 5, 1 / 5)  # of a table's parameters: large steps cost more per parameter than small ones
TABLE_PROBES = 8  # sequences of the text: few places lose almost everything that is lost
PREDICTED_SEQUENCES = 16  # others, of which the tokens' probabilities are: a probe must not know its own tokens
MIN_TABLE_ERROR = 1e-4  # squared: below this the divergence is rounding noise


@dataclass(frozen=True)
class TableProbes:
    """State one kind of sequences that pass the model with a smaller table.

    Attributes:
        builder: the builder of the layers that they pass. token_ids: `(sequences, length)`, of all workers.
        part: this worker's sequences of them. dense: their dense states behind the last layer, `(length, D)` of each.
    """

    builder: LayerBuilder
    token_ids: torch.Tensor
    part: slice
    dense: Sequence[torch.Tensor]


def no_table_profile() -> Tensors:
    """Return the tensors of a `Profile` for tables that were not measured: empty ones."""
    nothing: Tensors = {"token_probabilities": torch.empty(0)}
    for table in TABLES:
        nothing |= _tensors(table, torch.empty(0, 0), torch.arange(0), torch.empty(0, 0), torch.empty(0, 2))
    return nothing


def _tensors(table: Table, gram: torch.Tensor, order: torch.Tensor, *measured: torch.Tensor) -> Tensors:
    errors, probes = (one.double() for one in measured)
    found = {"gram": gram.double(), "order": order, "errors": errors, "probes": probes}
    return {f"{table}_{name}": tensor for name, tensor in found.items()}


def marks_of(model: Model) -> list[int]:
    """Return the tokens whose rows stay as they are (`special_tokens`)."""
    return special_tokens(load_tokenizer(model.checkpoint.folder), model.shape.vocab_size)


def table_steps(model: Model, tables: Sequence[Table]) -> int:
    """Return the steps of `profile_tables`: states, order, ranks and output of every table, and every layer."""
    return model.shape.num_hidden_layers + 1 + 3 * len(tables)


def profile_tables(
    model: Model,
    states: States,
    text: Text,
    layers: Callable[[], Iterable[Tensors]],
    *,
    other_kinds: TableProbes | None,
    tables: Sequence[Table],
    curvature: Curvature | None,
    advance: Callable[[float], None] = lambda steps: None,
) -> Tensors:
    """Return the tensors of a `Profile` of tables of the vocabulary; `states` are those after the last layer.

    What the output head reads is known only after the last layer, so with a smaller embedding a few sequences pass all
    `layers` again. A smaller head reads the states that are there. Sequences of the text count as much as all of other
    kinds together.

    Args:
        text: the text of the states, of all workers. other_kinds: sequences of other kinds of text; None without any.
        tables: those that can have ranks.
        curvature: output curvature, which says what changes of the embedding's rows cost as inputs of the first layer;
            None if they count as rows of the output head alone. An embedding that is no output head needs it.
        advance: is told of each of the `table_steps`.
    """
    # 1. What the output head reads, and how likely each token is
    machine, workers, head = states.machine, states.machine.workers, states.builder.output_head()
    read, probabilities, of_text = _read_by_head(model, states, text, head)
    sequences = [of_text] if other_kinds is None else [of_text, other_kinds]
    marks = marks_of(model)
    advance(1)
    measured = no_table_profile() | {"token_probabilities": probabilities.cpu()}
    for table in tables:
        # 2. What changes of a row cost: in the logits, and if the first layer reads other rows
        is_head, is_input = table == "output_head" or model.shape.tied, table == "embedding"
        gram = read.clone() if is_head else torch.zeros_like(read)
        if is_input and curvature is not None:
            gram += model.family.stack.embedding_scale**2 * curvature.of_states(machine.device)
        gram = towards_diagonal(gram, shrinkage_on_other_text(len(gram), states.num_tokens))
        # 3. The order of the tokens, and what every rank of every range loses
        weight = model.read_table(table)
        rows = TokenRows(weight, gram, probabilities, marks, table)
        order = order_of_tokens(rows, workers=workers)
        advance(1)
        errors = range_errors(rows, order, workers=workers)
        advance(1)
        # 4. The divergence of the output for a few sizes
        probes = table_probes(errors, len(weight))
        smaller = [reduce_embedding(rows, order, ranges, workers=workers) for ranges, _ in probes]
        weights = [partial(expanded, one, weight.shape[1], machine.device, table) for one in smaller]
        found = [
            torch.zeros(len(probes), len(one.token_ids), dtype=torch.float64, device=machine.device)
            for one in sequences
        ]
        own = [(one, divergences) for one, divergences in zip(sequences, found, strict=True) if one.dense]
        if own:
            passed = [[one.dense for one, _ in own]] * len(probes)
            if is_input:
                passed = _passed(weights, [one for one, _ in own], machine, layers, advance)
            for number, (whole, of_probe) in enumerate(zip(weights, passed, strict=True)):
                other = replace(head, weight=whole().to(head.weight)) if is_head else head
                for (one, divergences), reduced in zip(own, of_probe, strict=True):
                    pairs = zip(one.dense, reduced, strict=True)
                    means = [other.divergence_from(head, *pair).mean() for pair in pairs]
                    divergences[number, one.part] = torch.stack(means).double()
        advance(1)
        for divergences in found:
            workers.sum_(divergences)  # zeros from all but the one whose sequence it is
        mean = torch.stack([divergences.mean(1) for divergences in found]).mean(0).cpu()
        lost = torch.tensor([lost for _, lost in probes], dtype=torch.float64)
        measured |= _tensors(table, gram.cpu(), order, errors, torch.stack((lost, mean), dim=1))
    return measured


def _passed(
    embeddings: Sequence[Callable[[], torch.Tensor]],
    sequences: Sequence[TableProbes],
    machine: Machine,
    layers: Callable[[], Iterable[Tensors]],
    advance: Callable[[float], None],
) -> list[list[Sequence[torch.Tensor]]]:
    """Return the last states of each embedding, of all kinds, `(length, D)` of every sequence.

    A layer has one sequence at once.
    """
    probes = [_embedded(embedding(), sequences) for embedding in embeddings]
    upload = Uploader(machine.device)
    for number, tensors in enumerate(layers()):
        uploaded = upload(tensors)
        for kind, one in enumerate(sequences):
            layer = one.builder.layer(number, uploaded)
            for state in (state for probe in probes for state in probe[kind].split(1)):
                state.copy_(layer.run_all(state))
        advance(1)
    return [[states.unbind() for states in probe] for probe in probes]


def _embedded(embedding: torch.Tensor, sequences: Sequence[TableProbes]) -> list[torch.Tensor]:
    """Return the states before the first layer of every kind, `(sequences, length, D)`."""
    return [one.builder.embed(embedding, Batch(NO_ROWS, one.token_ids[one.part])) for one in sequences]


def _read_by_head(
    model: Model, states: States, text: Text, head: OutputHead
) -> tuple[torch.Tensor, torch.Tensor, TableProbes]:
    """Return the mean `h hᵀ (D, D)` float64 over the stream, the tokens' probabilities, and the text's probes.

    Probes are the first sequences, half of a short text, and the probabilities are of the sequences behind them. The
    workers share both out anew.
    """
    machine, workers = states.machine, states.machine.workers
    accumulator = GramAccumulator(model.shape.hidden_size, output_size=None, device=machine.device)
    first: list[torch.Tensor] = []
    start = states.part.start
    states.advance = lambda tokens: None  # the layers were counted
    for x, _ in states.read():
        accumulator.update_(head.norm(x).flatten(0, -2))
        first += list(x[: max(0, TABLE_PROBES + PREDICTED_SEQUENCES - start)].clone())
        start += len(x)
    gram = accumulator.finish(workers=workers).gram.double() / states.num_tokens
    gathered = workers.gather(tuple(first))
    count = min(TABLE_PROBES, max(1, text.num_sequences // 2))
    part, others = workers.part(count), gathered[count:] or gathered  # the probe itself in a text of one sequence
    probabilities = torch.zeros(model.shape.vocab_size, dtype=torch.float64, device=machine.device)
    for state in others[workers.part(len(others))]:
        probabilities += head.probabilities(state)
    workers.sum_(probabilities)
    probes = TableProbes(states.builder, text.token_ids[:count], part, gathered[part])
    return gram, as_float32(probabilities) / len(others), probes


def table_probes(errors: torch.Tensor, vocab_size: int) -> list[tuple[tuple[TableShape, ...], float]]:
    """Return the ranks of a table's probes and the squared errors that they leave, from the least on.

    They take the `PROBE_SHARES` whose error is large enough, at least the last one; `errors` as in `smaller_tables`.
    """
    found = [smaller_tables(errors, vocab_size, share) for share in PROBE_SHARES]
    lost = [sum(float(errors[index, table.rank]) for index, table in enumerate(tables)) for tables in found]
    probes = list(zip(found, lost, strict=True))
    return [probe for probe in probes if probe[1] >= MIN_TABLE_ERROR] or probes[-1:]
