"""Predicted seconds of the stages of a run: their operations over the rates of a machine, measured or a usual one's.

They are right to a factor of two. Downloads, disks, and other work on the machine are not included. Constants of a
device were measured on an H100 (rows of `benchmarks/results/gpu.jsonl`).
"""

import math
from collections import defaultdict

from oneshot.compression.embedding import ORDER_ROUNDS, ORDER_SHARE
from oneshot.compression.expert_correction import solved_together
from oneshot.compression.expert_removal import TOKENS_TOGETHER
from oneshot.compression.ranks import FACTORS_EVERY
from oneshot.compression.statistics import batches_apart
from oneshot.compression.up_proj import UP_BATCHES
from oneshot.footprint.expert_memory import as_profiled, num_groups, profiles
from oneshot.footprint.rates import Rates
from oneshot.footprint.several import Seconds, of_one_process
from oneshot.footprint.terms import choice_cost
from oneshot.footprint.work import Work
from oneshot.linalg.psd import CONDITION_STEPS
from oneshot.machine import Store
from oneshot.planning.vocabulary import NUM_RANGES
from oneshot.profiling import IMPORTANCE_TOKENS, curvature_tokens
from oneshot.profiling.embedding import PREDICTED_SEQUENCES, PROBE_SHARES
from oneshot.profiling.probes import num_probes
from oneshot.profiling.profiler import STATISTICS_SEQUENCES
from oneshot.stream import EXPERTS_TOGETHER
from oneshot.text import SELF
from oneshot.text.self_written import DOCUMENT_TOKENS

PROBED_CHANGES = 4  # forward passes of probes through a layer: the dense one, and reduced ones beside it
SUMMED_BYTES = 32  # moved for a number of a batch: zero, sum and read in float32, then added in float64
START_SECONDS = 3.0  # tokenizer, headers, report, and what libraries do when a device uses them first
STEP_FACTOR = 10  # of a forward pass of a CPU while it writes a single text
BATCHED_STEP_FACTOR = 1.3  # the same of many texts at once, whose keys and values are read for every token
STEP_SECONDS = 2e-3  # of a layer while a device writes text token by token; to a factor of 1.3
SOLVE_SECONDS = 7.2e-8  # for each row of a triangle that a device solves with one right-hand side
EIGEN_SECONDS = 7.1e-9  # for each number of a matrix whose eigenvectors a device finds, in float32

# of mixtures, from the section "30B-A3B" of benchmarks/gpu.py
EXPERT_SECONDS = 4.5e-3  # of an expert's factorisation and solves, which are too small to fill a device
COPIES_OF_ROWS = 12  # that the stock experts make of what they read and write, and of their neurons
STACKED_BYTES_PER_SECOND = 3.3e9  # of a layer whose experts are read one by one and put into one tensor

PASSES_FOR_TYPES = 5  # one for inputs, about two for gradients, and two of rounding
ROUND_SECONDS = 3e-4  # of a column of linears that read the same
LAUNCH_SECONDS = 1.07e-5  # of an operation that the host launches on a device
# operations: to choose and solve an expert, as counted on the pretended device; to sum rows of several, and effects
EXPERT_LAUNCHES, ARRIVAL_LAUNCHES, EFFECT_LAUNCHES = 95, 17, 7

# Rates of a usual machine: two cores of a server, measured in float32, and an H100 (`benchmarks/gpu_estimate.py`).
USUAL_CPU = Rates(4e10, 4e10, 4e10, 2e10, pivoted=1e10)
USUAL_DEVICE = Rates(499e12, 499e12, 50.4e12, 61.2e12, pivot_seconds=6.5e-6, bandwidth=2.76e12, link=54.9e9)

TYPES = "types of the original"  # the stage's name


def predicted_phases(work: Work, rates: Rates, store: Store = "device") -> dict[str, Seconds]:
    """Return the seconds by stage and phase, of the slowest process. `store`: where activations are kept."""
    return of_one_process(work, _phases_alone(work, rates, store), rates, _summed(work))


def _phases_alone(work: Work, rates: Rates, store: Store) -> dict[str, Seconds]:
    """Return the seconds of a run that no process shares."""
    shape = work.shape
    layers, forward = shape.num_hidden_layers, operations_of_token(work, rates)
    stages: dict[str, Seconds] = {"prepare": {"start": START_SECONDS}}
    if SELF in work.source_tokens:
        stages["prepare"]["own text"] = _own_text(work, rates)
    if work.schedule.measures_curvature:
        stages["curvature"] = _curvature(work, forward, rates, store)
    if work.schedule.makes_profile:
        stages["profile"] = _profile(work, forward, rates)
    if work.schedule.measures_importance:
        tokens = work.num_tokens if work.plan is None else min(IMPORTANCE_TOKENS, work.num_tokens)
        passes = PASSES_FOR_TYPES if work.schedule.chooses_types else 1
        stages["importance"] = {"forward": passes * layers * tokens * forward / rates.stream}
    if work.plan is None:
        return stages
    if work.schedule.finds_subspaces:
        stages["hidden size"] = {
            "forward": layers * work.num_tokens * forward / rates.stream,
            "sums": layers * work.num_tokens * 2 * 2 * shape.hidden_size**2 / rates.energies,
            "directions": layers * 12 * shape.hidden_size**3 / rates.double,
        }
    kept = sum(layer.intermediate_size for layer in work.plan.layers) / layers
    of_layer = _layer_seconds(work, kept, forward, rates, store)
    stages["layers"] = {phase: layers * seconds for phase, seconds in of_layer.items()}
    return stages


def _summed(work: Work) -> dict[str, float]:
    """Return how many numbers the processes of a run add up for a layer, by stage; of Grams about half."""
    shape = work.shape
    neurons = shape.ffns_per_layer * shape.intermediate_size
    columns = work.heads_width**2 + 2 * shape.hidden_size**2
    targets = work.schedule.dense_share * neurons * shape.hidden_size
    return {
        "curvature": sum(size**2 for size in work.curvature_sizes) / 2,
        "profile": (neurons * shape.intermediate_size + columns) / 2,
        "layers": (neurons * shape.intermediate_size + columns * work.method.plans_ranks) / 2 + targets,
    }


def stage_seconds(work: Work, store: Store) -> dict[str, float]:
    """Return the stages in order, with seconds on a usual machine: only their ratios are meant.

    A stage has 0 if its seconds do not depend on how fast the machine computes.
    """
    phases = predicted_phases(work, USUAL_DEVICE if work.on_cuda else USUAL_CPU, store)
    stages, written = {"reading": 0.0}, phases.pop("prepare").get("own text", 0.0)
    if written:
        stages["writing text"] = written
    if work.schedule.prices_types:  # a forward pass, and one with gradients
        stages[TYPES] = 3 / PASSES_FOR_TYPES * sum(phases["importance"].values())
    for name, seconds in phases.items():
        embedding = seconds.pop("embedding", 0.0)
        stages[name] = sum(seconds.values())
        if embedding:
            stages["ranks of the embedding"] = embedding
        if name == "profile" and work.plan is not None:
            stages["planning the sizes of the layers"] = 0.0
    written_last = {} if work.plan is None else {"writing": 0.0}
    last = {"importance": stages.pop("importance")} if "importance" in stages else {}
    return stages | written_last | last


def _own_text(work: Work, rates: Rates) -> float:
    """Return the seconds in which the model writes text, token by token; 0 if it writes none."""
    written, layers = work.source_tokens.get(SELF, 0), work.shape.num_hidden_layers
    if not written:
        return 0.0
    if not rates.on_device:
        documents = min(work.documents_together, math.ceil(written / DOCUMENT_TOKENS))  # each step reads all weights
        passes = written * (layers * operations_of_token(work, rates) + work.head_operations)
        return (BATCHED_STEP_FACTOR + STEP_FACTOR / documents) * passes / rates.stream
    steps = math.ceil(written / DOCUMENT_TOKENS / work.documents_together) * DOCUMENT_TOKENS
    return steps * layers * max(STEP_SECONDS, work.shape.layer_parameters() * work.dtype.itemsize / rates.bandwidth)


def _curvature(work: Work, forward: float, rates: Rates, store: Store) -> Seconds:
    """Return the seconds of the pass forward and back that measures output curvature."""
    shape, layers = work.shape, work.shape.num_hidden_layers
    tokens = min(curvature_tokens(work.num_tokens), work.num_tokens)
    grams = sum(_gram(size, tokens) for size in work.curvature_sizes)
    numbers = sum(size**2 for size in work.curvature_sizes) / 2
    added = _added(work, tokens, numbers, rates)
    seconds = {
        "forward": layers * tokens * forward / rates.stream,
        "backward": 2 * layers * tokens * forward / rates.stream,  # forward again, then back to activations alone
        "sums": layers * (grams / rates.energies + added),
        "output head": 3 * tokens * work.head_operations / rates.energies,
    }
    if rates.on_device:
        copied = 2 * layers * work.layer_bytes + 4 * (store != "device") * sum(work.curvature_store_bytes)
        seconds["transfer"] = copied / rates.link
        if shape.experts is not None:  # nothing else takes as long
            seconds["reading"] = 2 * layers * work.layer_bytes / STACKED_BYTES_PER_SECOND
    return seconds


def _profile(work: Work, forward: float, rates: Rates) -> Seconds:
    shape, kinds = work.shape, work.schedule.profiled_kinds
    layers, size, length = shape.num_hidden_layers, shape.intermediate_size, work.text.sequence_length
    read = min(STATISTICS_SEQUENCES, work.text.num_sequences) * length
    count = num_probes(kinds, layers, work.predicts_divergences)
    probes = work.probe_tokens * (count / 2 + PROBED_CHANGES)
    ffns = shape.ffns_per_layer if shape.experts is None or profiles(work) else 0  # whose neurons are measured
    passed = ffns / shape.tokens_per_arrival
    # all groups of experts have a pass, and all but the last another one
    groups = num_groups(as_profiled(work)) if profiles(work) else 1
    passes, summed = 2 * groups - 1, 2 - 1 / groups
    columns = (not {"heads", "inner"}.isdisjoint(kinds)) * [work.heads_width]
    columns += ("rank" in kinds) * [work.heads_width, shape.hidden_size, shape.hidden_size]
    grams = summed * passed * _gram(size, read) + sum(_gram(count, read) for count in columns)
    logits = length * work.head_operations / rates.energies
    numbers = (summed * ffns * size**2 + sum(count**2 for count in columns)) / 2
    added = _added(work, read, numbers, rates)
    seconds = {
        "forward": layers * (passes * read + probes) * forward / rates.stream,
        "sums": layers * (grams / rates.sums + added),
        "pivots": layers * rates.pivots(size, size, ffns) if ffns else 0.0,
        "solve": layers * ffns * (size**3 / 3 + 4 * size**2 * shape.hidden_size) / rates.double,
        "energies": layers * ffns * 4 * size**2 * shape.hidden_size / rates.energies,
        "output head": work.probe_tokens / length * (count + 3) * logits,
    }
    if "rank" in kinds:
        seconds["ranks"] = layers * _low_rank(work, rates)
    if "experts" in kinds:  # of one expert more for each token
        seconds["forward"] += layers * read * forward / rates.stream
    if rates.on_device:
        seconds["condition"] = layers * ffns * _condition(work, 3 / 4 * size)
        seconds["launches"] = layers * _launches(work, read, passes, effects="experts" in kinds)
        if ffns:  # of the narrower experts, and of their curves
            seconds["solve"] += 2 * layers * _latency(work)
        seconds["transfer"] = layers * work.layer_bytes / rates.link
    if tables := len(work.schedule.profiled_tables):
        passed = len(PROBE_SHARES) * work.table_probe_tokens
        predicted = min(PREDICTED_SEQUENCES, work.text.num_sequences)
        seconds["embedding"] = passed * layers * forward / rates.stream + predicted * logits
        seconds["embedding"] += tables * (2 * passed / length * logits + _order_of_tokens(work, rates))
    return seconds


def _order_of_tokens(work: Work, rates: Rates) -> float:
    """Return the seconds in which tokens move: the Grams of ranges, and what every token loses in every range."""
    table = 2 * work.shape.vocab_size * work.shape.hidden_size**2
    losses = table * (1 + (1 - ORDER_SHARE) * NUM_RANGES) / rates.energies
    return ORDER_ROUNDS * (table / rates.double + losses)


def _layer_seconds(work: Work, kept: float, forward: float, rates: Rates, store: Store) -> Seconds:
    """Return the seconds of a layer with `kept` neurons."""
    shape, size, tokens = work.shape, work.shape.intermediate_size, work.num_tokens
    hidden, schedule, method = shape.hidden_size, work.schedule, work.method
    ffns, passed = shape.ffns_per_layer, shape.ffns_per_layer / shape.tokens_per_arrival  # all, and a token's
    groups = num_groups(work)
    seconds: defaultdict[str, float] = defaultdict(float)
    if schedule.streams:
        share, product = schedule.dense_share, 2 * passed * size * hidden  # of a token's neurons with its target
        moves = 1 + (kept / size) + share + method.reduces_heads / 2
        moves += (2 + method.solves) * schedule.removes_experts  # effects of one expert more, and the dense output
        # each further group repeats three passes: the mixture, the dense stream's mixture, and its experts
        again = (groups - 1) * (1 + share + method.solves * schedule.removes_experts)
        seconds["forward"] += tokens * (moves * forward + (share + 3 * again) * product) / rates.stream
        seconds["sums"] += (passed * _gram(size, tokens) + tokens * share * product) / rates.sums
        numbers = ffns * (size**2 / 2 + share * size * hidden)
        seconds["sums"] += _added(work, tokens, numbers, rates)
    if method.reduces_ffn:
        cost = choice_cost(work, size, kept, method.ffn)
        chosen = cost.sketch_pivots * (rates.pivot_seconds or 0.0) + cost.operations / rates.double
        of_grams = rates.pivots(size, cost.gram_pivots, math.ceil(ffns / groups)) if cost.gram_pivots else 0.0
        seconds["pivots"] += groups * of_grams + ffns * chosen
    if method.solves:
        right = size - kept + hidden * schedule.two_streams
        solved = kept**3 / 3 + 2 * kept**2 * right + 2 * hidden * kept * (size - kept)
        seconds["solve"] += ffns * solved / rates.double
        seconds["energies"] += ffns * 4 * size**2 * hidden / rates.energies
        if rates.on_device:
            seconds["condition"] += ffns * _condition(work, kept)
    if schedule.corrects_up:
        steps = method.up_steps
        there_and_back = 2 * hidden * (3 * size + (6 + 5 * steps) * kept)
        again = 2 * hidden * (3 * size + 2 * kept)
        seconds["up_proj"] += tokens * (there_and_back / UP_BATCHES + again) / rates.stream
        seconds["up_proj"] += tokens * (kept**2 / UP_BATCHES + kept * (kept + 2 * hidden)) / rates.sums
        seconds["solve"] += (2 * kept**3 / 3 + 2 * (2 + steps) * kept**2 * hidden) / rates.double
    if method.plans_ranks:
        read = tokens / batches_apart(tokens, hidden)
        grams = 2 * _gram(hidden, read) + _gram(work.heads_width, read)
        spared = 4 * hidden * size * (1 - 1 / FACTORS_EVERY) * (shape.experts is None)  # gate and up of most tokens
        seconds["forward"] += read * (forward - spared) / rates.stream
        seconds["sums"] += grams / rates.sums
        seconds["ranks"] += _low_rank(work, rates)
    if work.quantises:
        columns = 2 * hidden + work.heads_width + size
        seconds["rounding"] += columns * ROUND_SECONDS + 2 * shape.layer_parameters() * hidden / rates.double
    if schedule.finds_subspaces:
        seconds["solve"] += 6 * hidden * shape.layer_parameters() / rates.double
    if rates.on_device:
        if schedule.streams:
            seconds["launches"] += _launches(work, tokens, groups, effects=schedule.removes_experts)
        if method.solves:
            seconds["solve"] += _latency(work)
        copied = (1 + kept / size) * work.layer_bytes
        if store != "device":  # every pass reads the streams and writes what moved
            copied += 2 * (2 + method.reduces_heads + schedule.corrects_up) * sum(work.store_bytes)
            copied += (groups if groups > 1 else 0) * sum(work.store_bytes)
        seconds["transfer"] += copied / rates.link
    return seconds


def _low_rank(work: Work, rates: Rates) -> float:
    """Return the seconds that find the linears of low rank of a layer."""
    shape, size = work.shape, work.shape.hidden_size
    others = shape.intermediate_size + shape.num_key_value_heads * shape.head_dim  # outputs of down and of values
    linears, ranked = 4, shape.layer_parameters() - others * size
    if shape.experts is not None:  # attention's alone
        linears, ranked = 2, (2 * shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim * size
    # eigenvectors of each, and products with their roots
    seconds = (4 * ranked * size + linears * 12 * size**3) / rates.energies
    return seconds + linears * EIGEN_SECONDS * size**2 if rates.on_device else seconds


def operations_of_token(work: Work, rates: Rates) -> float:
    """Return the operations of a token in a layer, at the rate of linears.

    Attention's count as many as linears have in its time, and so do copies of a device's experts.
    """
    shape = work.shape
    parameters = shape.layer_parameters() if shape.experts is None else shape.active_parameters()
    slower = rates.stream / (rates.attention or rates.stream)
    operations = 2 * parameters + 2 * work.text.sequence_length * work.heads_width * slower
    if shape.experts is None or not rates.on_device:
        return operations
    rows = shape.experts.per_token * (shape.hidden_size + shape.intermediate_size) * work.dtype.itemsize
    return operations + COPIES_OF_ROWS * rows / rates.bandwidth * rates.stream


def _latency(work: Work) -> float:
    """Return the fixed device overhead, in seconds, of solving a layer's experts, on top of their arithmetic."""
    return 0.0 if work.shape.experts is None else work.shape.experts.count * EXPERT_SECONDS


def _launches(work: Work, tokens: float, passes: int, *, effects: bool) -> float:
    """Return the seconds of launches for the experts of a layer, of which several are solved and summed at once."""
    if work.shape.experts is None:
        return 0.0
    count = work.shape.experts.count
    of_block = passes * math.ceil(tokens / work.batch_tokens) * ARRIVAL_LAUNCHES
    of_block += effects * math.ceil(tokens / min(work.batch_tokens, TOKENS_TOGETHER)) * EFFECT_LAUNCHES
    blocks = math.ceil(count / EXPERTS_TOGETHER)
    return (count * EXPERT_LAUNCHES + blocks * of_block) * LAUNCH_SECONDS


def _condition(work: Work, size: float) -> float:
    """Return the seconds of a condition number; a device estimates several experts at once."""
    sizes = work.shape.intermediate_size, work.shape.hidden_size
    together = 1 if work.shape.experts is None else solved_together(*sizes, work.device)
    return 2 * CONDITION_STEPS * SOLVE_SECONDS * size / together


def _added(work: Work, tokens: int, numbers: float, rates: Rates) -> float:
    """Return the seconds in which products of every batch are added to sums of so many numbers."""
    return math.ceil(tokens / work.batch_tokens) * SUMMED_BYTES * numbers / rates.bandwidth


def _gram(size: int, tokens: float) -> float:
    return float(tokens) * size * size
