"""Peak bytes of the stages of a profile's dense pass, and of the measurement of output curvature."""

import math
from dataclasses import replace

from oneshot.footprint import expert_memory, terms
from oneshot.footprint.terms import BATCH, DOUBLE, FLOAT, LENGTH, Stage, Term, computed, largest
from oneshot.footprint.work import Work
from oneshot.profiling.curvature import sequences_together
from oneshot.profiling.embedding import PREDICTED_SEQUENCES, PROBE_SHARES, TABLE_PROBES
from oneshot.profiling.probes import num_probes

Terms = tuple[Term, ...]


def profile_stages(work: Work) -> list[Stage]:
    """Return the stages of the profile's dense pass; each layer adds probes."""
    shape, length, kinds = work.shape, work.text.sequence_length, work.schedule.profiled_kinds
    heads, experts = work.heads_width, expert_memory.as_profiled(work)
    count = num_probes(kinds, shape.num_hidden_layers, work.predicts_divergences)
    number = work.probe_tokens * work.dtype.itemsize
    # the dense states before and behind each sublayer and its sum, and the moving probe's states; keys and values
    # that later layers read are not stored
    probes = computed((6 * shape.hidden_size + (count + 2) * shape.lent) * number, LENGTH)
    summed, held, curves = _neurons(work) if shape.experts is None else _experts(experts)
    held = (*held, terms.gram(work, heads + shape.output_bias, residual=False))
    summed = (*summed, *terms.sums(work, heads + shape.output_bias, residual=False)[:1])
    if "rank" in kinds:
        columns = (heads, shape.hidden_size, shape.hidden_size)
        held = (*held, *(terms.gram(work, count, residual=False) for count in columns))
        summed = (*summed, *(terms.sums(work, count, residual=False)[0] for count in columns))
        curves = largest(curves, terms.directions(work))
    probed = expert_memory.share_outside(work) if shape.experts is not None else work.on_cuda  # attention, or all of it
    layer, copy = (*terms.layer(work), terms.layer_copy(work), probes), terms.layer_copy(work)
    logits = (Term(work.outside_bytes), terms.output_head(work), *terms.predictions(work), probes)
    if work.grid.family.head is None:  # last states are compared, without a head
        logits = (computed(3 * FLOAT * length * shape.hidden_size, LENGTH), probes)
    listed = _profiled_embedding(work, probes) if work.schedule.profiled_tables else []
    listed += [
        Stage("the profile's statistics", (*layer, *summed, terms.activations(work, shape.intermediate_size))),
        Stage("the profile's error curves", (*layer, *held, curves, copy, computed(probed * work.layer_bytes))),
    ]
    if shape.experts is not None and "experts" in kinds:
        fewer = computed(work.layer_bytes)
        listed.append(Stage("the profile's probe of fewer experts", (*layer, *held, copy, fewer)))
    if expert_memory.profiles(work):
        narrower = computed(3 * expert_memory.downs(experts, 3 * shape.intermediate_size // 4).bytes)
        listed.append(Stage("the profile's probe of narrower experts", (*layer, *held, copy, narrower)))
    listed.append(Stage("the profile's output divergences", logits))
    stores = (*work.store_bytes, count * shape.hidden_size * number)
    return [replace(stage, own_stores=stores) for stage in listed]


def _neurons(work: Work) -> tuple[Terms, Terms, Term]:
    """Return what statistics of neurons are summed in, the finished ones, and what curves and probes are made of."""
    hidden, size = work.shape.hidden_size, work.shape.intermediate_size + work.shape.mlp_bias
    weights, weighed = 3 * DOUBLE * hidden * size, terms.neuron_gram(work, size)
    factors = max((FLOAT + DOUBLE) * size * size + weighed.bytes, DOUBLE * size * size + weights)
    solved = (terms.correction(work, size, kept, residual=False) for kept in (size // 2, 3 * size // 4))
    curves = largest(computed(factors, weighed.knobs), *solved)
    return terms.sums(work, size, residual=False), (terms.gram(work, size, residual=False),), curves


def _experts(work: Work) -> tuple[Terms, Terms, Term]:
    """Return the same of a group of experts, beside groups before it that are corrected."""
    size, kept = work.shape.intermediate_size + work.shape.mlp_bias, 3 * work.shape.intermediate_size // 4
    effects = (expert_memory.effects(work),) if "experts" in work.schedule.profiled_kinds else ()
    if not expert_memory.profiles(work):  # whole experts alone
        return effects, (), Term(0)
    before = expert_memory.solved(work, kept)
    solved = (expert_memory.solve(work, size, kept, residual=False) for kept in (size // 2, 3 * size // 4))
    summed = (*expert_memory.sums(work, size, residual=False), *effects, before)
    held = (expert_memory.gram(work, size, residual=False), before)
    return summed, held, largest(expert_memory.curves(work, size), *solved)


def _profiled_embedding(work: Work, probes: Term) -> list[Stage]:
    """Return the stages in which reduced embeddings pass the dense model, while the other `probes` wait."""
    shape, length = work.shape, work.text.sequence_length
    head = terms.output_head(work)
    tokens = len(PROBE_SHARES) * work.table_probe_tokens + (TABLE_PROBES + PREDICTED_SEQUENCES) * length
    states = computed(tokens * shape.hidden_size * work.dtype.itemsize, LENGTH)
    expanded, reduced = Term(work.outside_bytes), Term(math.ceil(sum(PROBE_SHARES) * work.outside_bytes))
    held = (head, states, expanded, reduced, probes)
    walk = (*terms.layer(work), terms.layer_copy(work), terms.activations(work, shape.intermediate_size, length))
    return [
        Stage("the profile's embedding", (*held, *terms.read(work.outside_bytes), *terms.embedding(work))),
        Stage("the embedding's probes", (*held, Term(work.outside_bytes), *walk)),
        Stage("the embedding's divergence", (*held, head, *terms.predictions(work))),
    ]


# Numbers of a token that the graph of a layer and its gradients hold, in units of the sizes of its activations.
OF_NEURONS, OF_HEADS, OF_HIDDEN = 8, 12, 10
OF_SCORES = 6
OF_WHOLE_SCORES = 10  # eager attention in steps, which may also bound them, as Gemma 2's does; measured 6.5 to 8.5
OF_LENT = 6  # lent keys and values, their gradients in this layer and from later ones, each read and written
OF_EXPERTS = 1.5  # in units of what a pass without a graph takes
FLOATS_OF_HIDDEN = 10  # norms and the gradients that are summed
FLOATS_OF_NORMS_INSIDE = 10
OF_CARRIED = 12  # floats, in units of the outputs of a carried mixer's linears and of its scan


def curvature_stages(work: Work) -> list[Stage]:
    """Return the stages; the states before every layer are stored meanwhile."""
    shape, stores = work.shape, work.curvature_store_bytes
    layer = (*terms.layer(work), terms.layer_copy(work))
    tokens = work.curvature_together * work.text.sequence_length
    batch = terms.activations(work, shape.intermediate_size, tokens=tokens)
    again = Term((not work.on_cuda) * work.layer_bytes)  # tensors that a graph may hold
    summed = [term for size in work.curvature_sizes for term in terms.sums(work, size, residual=False)]
    head = (*terms.read(work.outside_bytes), terms.output_head(work), *terms.predictions(work))
    return [
        Stage("the stream of the output curvature", (*layer, again, batch), own_stores=stores),
        Stage("the random gradients of the output curvature", head, own_stores=stores),
        Stage("the output curvature", (*layer, again, _graph(work), *summed), own_stores=stores),
    ]


def _graph(work: Work) -> Term:
    """Return what the sequences that pass a layer with a graph together need."""
    shape, length = work.shape, work.text.sequence_length
    together = sequences_together(
        work.curvature_together, length, shape.num_attention_heads, work.device, work.holds_scores
    )
    tokens = together * length
    floats = FLOATS_OF_HIDDEN + work.grid.family.stack.norms_inside * FLOATS_OF_NORMS_INSIDE
    floats = floats * shape.hidden_size + 3 * shape.query_key_width
    floats += OF_CARRIED * max((one.width for one in shape.carried), default=0)
    numbers = OF_HEADS * work.heads_width + OF_HIDDEN * shape.hidden_size + OF_LENT * shape.lent
    if shape.experts is None:
        numbers += OF_NEURONS * shape.intermediate_size
    needed: float = tokens * (work.dtype.itemsize * numbers + FLOAT * floats)
    if shape.experts is not None:
        needed += tokens * OF_EXPERTS * terms.experts(work, shape.intermediate_size)
    if work.on_cuda or work.holds_scores:  # on CUDA always, so that gradients add up in a fixed order
        scores = OF_WHOLE_SCORES if work.holds_scores else OF_SCORES
        needed += scores * FLOAT * tokens * length * shape.num_attention_heads
    if work.has_masks:
        needed += terms.MASKS * FLOAT * length**2
    return computed(needed, BATCH)
