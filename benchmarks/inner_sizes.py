"""The cost of parts of one layer if they alone are reduced, in nats per million parameters saved.

Every reduction is computed from the statistics of `--num-sequences` sequences and judged on `--probe-sequences` others:
the KL divergence of the model's output from the dense one's, and the mean squared error of the stream after the layer.
All other layers stay dense, as in a profile. FFN neurons are measured beside them. One row for a run goes to
`results/inner_sizes.jsonl`; `render.py` makes tables of it.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import add_text_options, append_row, parser, provenance, smollm2_gguf

from oneshot.checkpoint import Checkpoint, Model, identify, locate_checkpoint
from oneshot.compression.correction import correct
from oneshot.compression.fold import fold_sublayer
from oneshot.compression.inner_heads import InnerMaps, fold_inner, query_key_subspaces, value_subspaces
from oneshot.compression.ranks import Inputs, RankAccumulator, Ranked, with_ranks
from oneshot.compression.statistics import GramAccumulator, HeadGramAccumulator, Statistics
from oneshot.families import RankedKind
from oneshot.linalg.pivoted_qr import weighted_pivots
from oneshot.linalg.psd import RidgeFactor
from oneshot.machine import Machine
from oneshot.machine.device import resolve_device
from oneshot.machine.workers import ALONE
from oneshot.method import DAMPING
from oneshot.profiling.layer_curves import mean_energy
from oneshot.stream import Layer, LayerBuilder
from oneshot.text import Text, load_text, load_tokenizer

LAYERS = (0, 1, 3, 8, 15, 22, 29)
VALUE_SIZES = (48, 32)
QUERY_KEY_SIZES = (56, 48)
WIDTHS = (1440, 1152)
MAP_RANKS = (96,)
RANKS: dict[RankedKind, tuple[int, ...]] = {
    "query_key": (384, 288, 192),
    "output": (384, 288, 192),
    "gate": (512, 448, 384),
    "up": (512, 448, 384),
}
DOWN_RANKS = (512, 448)
NAMES: dict[RankedKind, str] = {"query_key": "q and k", "output": "o", "gate": "gate", "up": "up"}
MAP_DAMPING = 1e-3  # of the map in the place of attention: 576 inputs, thousands of tokens

Run = Callable[[torch.Tensor], torch.Tensor]
Tensors = dict[str, torch.Tensor]


@dataclass
class Probe:
    """The probe sequences' hidden states in a model with one part reduced, and the parameters that this saves.

    `saved_pivoted`: the same if every KV group's values are stored as `[I; C]`, which needs v² numbers fewer. `energy`:
    mean squared error of the stream after the layer.
    """

    kind: str
    layer: int
    size: int
    saved: int
    states: torch.Tensor
    saved_pivoted: int | None = None
    energy: float = 0.0


@dataclass(frozen=True)
class Sums:
    """The sums over the text of the statistics, from which the reductions of a layer are computed.

    Attributes:
        heads, neurons: statistics of the inputs of `o_proj` and `down_proj`.
        mapped: Gram of attention's inputs and ones. crossed: their products with attention's output.
        queries, keys: Grams of every head before rotation. linears: those that may have low rank.
    """

    heads: Statistics
    neurons: Statistics
    mapped: torch.Tensor
    crossed: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    linears: dict[RankedKind, Ranked]


def read_text(model: Model, tensors: Tensors, layer: Layer, batches: list[torch.Tensor]) -> Sums:
    """Return the sums over the text before a layer, and move the text through the layer, in place."""
    shape, device = model.shape, torch.device("cpu")
    attention, ffn = (model.family.stack.index_of(kind) for kind in ("heads", "ffn"))
    heads = GramAccumulator(shape.num_attention_heads * shape.head_dim, output_size=None, device=device)
    neurons = GramAccumulator(shape.intermediate_size, output_size=None, device=device)
    queries = HeadGramAccumulator(shape.num_attention_heads, shape.head_dim, device=device)
    keys = HeadGramAccumulator(shape.num_key_value_heads, shape.head_dim, device=device)
    ranked = [RankAccumulator(shape, model.family.stack.sublayers[index], index, device) for index in (attention, ffn)]
    mapped = torch.zeros(shape.hidden_size + 1, shape.hidden_size + 1, dtype=torch.float64)
    crossed = torch.zeros(shape.hidden_size + 1, shape.hidden_size, dtype=torch.float64)
    for x in batches:
        read = layer.normed(attention, x).flatten(0, -2)
        read = torch.cat((read, torch.ones(len(read), 1)), dim=1)
        query, key = layer.queries_keys(attention, x)
        queries.update_(query)
        keys.update_(key)
        rows = layer.inner(attention, x)
        ranked[0].update_(layer, x, rows)
        heads.update_(rows)
        written = layer.write(attention, rows)
        mapped += (read.T @ read).double()
        crossed += (read.T @ written).double()
        x += written.view_as(x)
        ranked[1].update_(layer, x)
        rows = layer.inner(ffn, x)
        neurons.update_(rows)
        x += layer.write(ffn, rows).view_as(x)
    linears = ranked[0].finish(ALONE, tensors) | ranked[1].finish(ALONE, tensors)
    return Sums(heads.finish(), neurons.finish(), mapped, crossed, queries.finish(), keys.finish(), linears)


def low_rank(weight: torch.Tensor, gram: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the matrix of a rank nearest to `weight (m, n)` for inputs of this Gram, float64."""
    return Ranked(weight, Inputs(gram), torch.ones(len(weight))).nearest(rank).whole()


def pivoted(rows: int, columns: int, rank: int) -> int:
    """Return the numbers that a matrix of a rank is stored in: `[I; C]` times a matrix."""
    return rank * (rows + columns - rank)


def saved_by_rank(weight: torch.Tensor, rank: int) -> int:
    """Return how many numbers fewer a weight of a rank is stored in."""
    rows, columns = weight.shape
    return weight.numel() - pivoted(rows, columns, rank)


def probes_of_layer(
    model: Model, builder: LayerBuilder, number: int, tensors: Tensors, sums: Sums, x: torch.Tensor
) -> Iterator[Probe]:
    """Reduce every part of a layer by itself; `x` are the dense states before the layer."""
    shape, stack = model.shape, model.family.stack
    size, groups, width = shape.head_dim, shape.num_key_value_heads, shape.hidden_size
    attention, ffn = stack.index_of("heads"), stack.index_of("ffn")
    dense, mixer = builder.layer(number, tensors), stack.attention
    projections = {name: tensors[f"{name}.weight"] for name in (mixer.q, mixer.k, mixer.v, mixer.out)}
    whole = sum(weight.numel() for weight in projections.values())
    per_coordinate = (shape.num_attention_heads + groups) * width

    def with_linear(name: str, weight: torch.Tensor) -> torch.Tensor:
        changed = tensors | {f"{name}.weight": weight.to(tensors[f"{name}.weight"])}
        return builder.layer(number, changed).run_all(x)

    def with_map(weight: torch.Tensor) -> torch.Tensor:
        normed = dense.normed(attention, x)
        written = normed @ weight[:-1].float() + weight[-1].float()
        return dense.run(ffn, x + written)

    out, gram = projections[mixer.out], sums.heads.gram
    for kept in VALUE_SIZES:
        _, restricted = value_subspaces(
            out, gram, num_groups=groups, head_dim=size, size=kept, correct=True, damping=DAMPING
        )
        saved = per_coordinate * (size - kept)
        yield Probe("values", number, kept, saved, with_linear(mixer.out, restricted), saved + groups * kept**2)
    for kept in QUERY_KEY_SIZES:
        maps, _, _ = query_key_subspaces(sums.queries, sums.keys, size=kept, rotary=True)
        full = InnerMaps(queries=maps.mT @ maps)
        saved = per_coordinate * (size - kept)
        states = builder.layer(number, fold_inner(tensors, mixer, full)).run_all(x)
        yield Probe("queries and keys", number, kept, saved, states)

    yield Probe("no attention", number, 0, whole + width, dense.run(ffn, x))
    linear = RidgeFactor(sums.mapped, MAP_DAMPING).solve(sums.crossed)  # (D + 1, D)
    yield Probe("linear map", number, width, whole - width * (width + 1), with_map(linear))
    mean = sums.mapped[-1, :-1] / sums.mapped[-1, -1]
    covariance = sums.mapped[:-1, :-1] / sums.mapped[-1, -1] - mean.outer(mean)
    for rank in MAP_RANKS:
        reduced = low_rank(linear[:-1].T, covariance, rank).T
        constant = linear[-1] + mean @ (linear[:-1] - reduced)
        saved = whole - pivoted(width, width, rank) - width
        yield Probe("linear map", number, rank, saved, with_map(torch.cat((reduced, constant.unsqueeze(0)))))

    for kind, ranks in RANKS.items():
        linear, of_kind = sums.linears[kind], mixer if kind in mixer.ranked else stack.ffn
        for rank in ranks:
            changed = with_ranks(tensors, of_kind, {kind: linear.nearest(rank)})
            saved = saved_by_rank(linear.weight, rank)
            yield Probe(f"rank of {NAMES[kind]}", number, rank, saved, builder.layer(number, changed).run_all(x))

    down = tensors[f"{stack.ffn.down}.weight"]
    for rank in DOWN_RANKS:
        reduced = low_rank(down, sums.neurons.gram, rank)
        yield Probe("rank of down", number, rank, saved_by_rank(down, rank), with_linear(stack.ffn.down, reduced))
    order = weighted_pivots(sums.neurons.gram, down.double().norm(dim=0), rank=WIDTHS[0])
    for kept in WIDTHS:
        columns = order[:kept].sort().values
        factors = correct(down, columns, sums.neurons, correction="same-layer", damping=DAMPING)
        narrower = builder.layer(number, fold_sublayer(tensors, stack.sublayers[ffn], shape, factors))
        saved = 3 * width * (shape.intermediate_size - kept)
        yield Probe("FFN neurons", number, kept, saved, narrower.run_all(x))


@torch.inference_mode()
def measure(model: Model, statistics: Text, probed: Text, layers: list[int], scratch: Path) -> list[dict[str, object]]:
    """Return the size, the saved parameters and the divergence of every probe."""
    machine = Machine(resolve_device("cpu"), torch.float32, scratch)
    builder = LayerBuilder(model, machine, statistics.longest)
    embedding = model.read_embedding()
    batches = [builder.embed(embedding, batch) for batch in statistics.batches(4)]
    [batch] = probed.batches(probed.num_sequences)
    x = builder.embed(embedding, batch)
    probes: list[Probe] = []
    for number in range(model.shape.num_hidden_layers):
        print(f"layer {number}: {len(probes)} probes", flush=True)
        tensors = model.read_layer(number)
        dense = builder.layer(number, tensors)
        for probe in probes:
            probe.states = dense.run_all(probe.states)
        if number in layers:
            sums = read_text(model, tensors, dense, batches)
            added = list(probes_of_layer(model, builder, number, tensors, sums, x))
            after = dense.run_all(x)
            for probe in added:
                probe.energy = float(mean_energy(probe.states - after))
            probes += added
        else:
            for states in batches:
                states.copy_(dense.run_all(states))
        x = dense.run_all(x)
    head = builder.output_head()
    nats = [0.0] * len(probes)
    for sequence, state in enumerate(x):
        prediction = head.prediction(state)
        for index, probe in enumerate(probes):
            nats[index] += float(head.divergence(prediction, probe.states[sequence]).double().mean()) / len(x)
    return [
        {
            "kind": probe.kind,
            "layer": probe.layer,
            "size": probe.size,
            "saved": probe.saved,
            "saved_pivoted": probe.saved_pivoted,
            "nats": divergence,
            "energy": probe.energy,
        }
        for probe, divergence in zip(probes, nats, strict=True)
    ]


def main() -> None:
    options = parser(__doc__)
    add_text_options(options, num_sequences=8)
    options.add_argument("--probe-sequences", type=int, default=2)
    options.add_argument("--sequence-length", type=int, default=1024)
    options.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        dense = locate_checkpoint(str(smollm2_gguf()), Path(scratch))
        text = load_text(
            str(arguments.data_dir / "general.jsonl"),
            load_tokenizer(dense),
            num_sequences=arguments.num_sequences + arguments.probe_sequences,
            sequence_length=arguments.sequence_length,
            seed=0,
        )
        statistics, probed = text.part(slice(arguments.num_sequences)), text.last(arguments.probe_sequences)
        model = identify(Checkpoint(dense))
        probes = measure(model, statistics, probed, arguments.layers, Path(scratch))
        row = provenance(
            model="SmolLM2-135M-Instruct",
            calibration="general.jsonl",
            statistics_tokens=statistics.num_tokens,
            probe_tokens=probed.num_tokens,
            probes=probes,
        )
    append_row("inner_sizes", row)


if __name__ == "__main__":
    main()
