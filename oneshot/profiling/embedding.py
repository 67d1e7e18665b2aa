"""The cost of ranks of ranges of the vocabulary, and the effect of a reduced embedding or head on the output."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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
from oneshot.text import Batch, load_tokenizer, special_tokens

PROBE_SHARES = (3 / 5, 2 / 5, 1 / 5)  # of a table's parameters: large steps cost more per parameter than small ones
PREDICTED_SEQUENCES = 16  # no probes, of which the tokens' probabilities are: a probe must not know its own tokens
MIN_TABLE_ERROR = 1e-4  # squared: below this the divergence is rounding noise


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
    layers: Callable[[], Iterable[Tensors]],
    *,
    batch: Batch,
    builder: LayerBuilder,
    dense: torch.Tensor,
    tables: Sequence[Table],
    curvature: Curvature | None,
    advance: Callable[[float], None] = lambda steps: None,
) -> Tensors:
    """Return the tensors of a `Profile` of tables of the vocabulary; `states` are those after the last layer.

    What the output head reads is known only after the last layer, so with a smaller embedding the probes pass all
    `layers` again. A smaller head reads the states that are there.

    Args:
        batch: the tokens of the probes, of all workers. builder: of the layers that they pass. dense: their states
            behind the last layer.
        tables: those that can have ranks.
        curvature: output curvature, which says what changes of the embedding's rows cost as inputs of the first layer;
            None if they count as rows of the output head alone. An embedding that is no output head needs it.
        advance: is told of each of the `table_steps`.
    """
    # 1. What the output head reads, and how likely each token is
    machine, workers, head = states.machine, states.machine.workers, states.builder.output_head()
    read, probabilities = _read_by_head(model, states, head)
    part = workers.part(len(dense))
    own_batch, last = replace(batch, token_ids=batch.token_ids[part]), dense[part].unbind()
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
        divergences = torch.zeros(len(probes), len(dense), dtype=torch.float64, device=machine.device)
        if last:
            moved = _passed(weights, machine, builder, own_batch, layers, advance) if is_input else [last] * len(probes)
            for own, whole, of_probe in zip(divergences, weights, moved, strict=True):
                other = replace(head, weight=whole().to(head.weight)) if is_head else head
                states_of_both = zip(last, of_probe, strict=True)
                own[part] = torch.stack([other.divergence_from(head, *pair).mean() for pair in states_of_both])
        advance(1)
        workers.sum_(divergences)  # zeros from all but the one whose probe it is
        means = divergences.mean(1).cpu()
        lost = torch.tensor([lost for _, lost in probes], dtype=torch.float64)
        measured |= _tensors(table, gram.cpu(), order, errors, torch.stack((lost, means), dim=1))
    return measured


def _passed(
    embeddings: Sequence[Callable[[], torch.Tensor]],
    machine: Machine,
    builder: LayerBuilder,
    batch: Batch,
    layers: Callable[[], Iterable[Tensors]],
    advance: Callable[[float], None],
) -> list[tuple[torch.Tensor, ...]]:
    """Return the last states `(length, D)` of every sequence with each embedding; a layer has one sequence at once."""
    probes = [builder.embed(embedding(), batch) for embedding in embeddings]
    upload = Uploader(machine.device)
    for number, tensors in enumerate(layers()):
        layer = builder.layer(number, upload(tensors))
        for one in (one for probe in probes for one in probe.split(1)):
            one.copy_(layer.run_all(one))
        advance(1)
    return [probe.unbind() for probe in probes]


def _read_by_head(model: Model, states: States, head: OutputHead) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean `h hᵀ (D, D)` float64 over the stream, and the tokens' probabilities in its first sequences.

    The workers share these out anew.
    """
    machine, workers = states.machine, states.machine.workers
    accumulator = GramAccumulator(model.shape.hidden_size, output_size=None, device=machine.device)
    first: list[torch.Tensor] = []
    start = states.part.start
    states.advance = lambda tokens: None  # the layers were counted
    for x, _ in states.read():
        accumulator.update_(head.norm(x).flatten(0, -2))
        first += list(x[: max(0, PREDICTED_SEQUENCES - start)].clone())
        start += len(x)
    gram = accumulator.finish(workers=workers).gram.double() / states.num_tokens
    gathered = workers.gather(tuple(first))
    probabilities = torch.zeros(model.shape.vocab_size, dtype=torch.float64, device=machine.device)
    for state in gathered[workers.part(len(gathered))]:
        probabilities += head.probabilities(state)
    workers.sum_(probabilities)
    return gram, as_float32(probabilities) / len(gathered)


def table_probes(errors: torch.Tensor, vocab_size: int) -> list[tuple[tuple[TableShape, ...], float]]:
    """Return the ranks of a table's probes and the squared errors that they leave, from the least on.

    They take the `PROBE_SHARES` whose error is large enough, at least the last one; `errors` as in `smaller_tables`.
    """
    found = [smaller_tables(errors, vocab_size, share) for share in PROBE_SHARES]
    lost = [sum(float(errors[index, table.rank]) for index, table in enumerate(tables)) for tables in found]
    probes = list(zip(found, lost, strict=True))
    return [probe for probe in probes if probe[1] >= MIN_TABLE_ERROR] or probes[-1:]
