"""Peak bytes of the stages of a profile's dense pass."""

from oneshot.footprint import expert_memory, terms
from oneshot.footprint.terms import DOUBLE, FLOAT, LENGTH, Stage, Term
from oneshot.footprint.work import Work
from oneshot.profiling.embedding import EMBEDDING_PROBES
from oneshot.profiling.probes import PROBE_SEQUENCES, probes_per_layer


def profile_stages(work: Work) -> list[Stage]:
    """Return the stages of the profile's dense pass; each layer adds probes."""
    shape, itemsize, length = work.shape, work.dtype.itemsize, work.text.sequence_length
    size, heads = shape.intermediate_size + shape.mlp_bias, shape.num_attention_heads * shape.head_dim
    states = PROBE_SEQUENCES * length * shape.hidden_size * itemsize
    probes = Term(
        (probes_per_layer(work.schedule.profiled_kinds) * shape.num_hidden_layers + 2) * states,
        computed=True,
        knobs=LENGTH,
    )
    of_ffn = terms if shape.experts is None else expert_memory
    all_experts = expert_memory.together(work)
    grams = (
        of_ffn.gram(all_experts, size, residual=False),
        terms.gram(work, heads + shape.output_bias, residual=False),
    )
    counted = (
        *of_ffn.sums(all_experts, size, residual=False),
        *terms.sums(work, heads + shape.output_bias, residual=False)[:1],
    )
    linears: tuple[Term, ...] = ()
    if "rank" in work.schedule.profiled_kinds:
        columns = (heads, shape.hidden_size, shape.hidden_size)
        linears = tuple(terms.gram(work, count, residual=False) for count in columns)
        counted = (*counted, *(terms.sums(work, count, residual=False)[0] for count in columns))
    layer = (*terms.layer(work), terms.layer_copy(work), probes)
    batch = terms.activations(work, shape.intermediate_size)
    weights = 3 * DOUBLE * shape.hidden_size * size
    weighed = terms.neuron_gram(work, size)
    factors = max((FLOAT + DOUBLE) * size * size + weighed.bytes, DOUBLE * size * size + weights)
    curves = Term(factors, computed=True, knobs=weighed.knobs)
    reduced = Term(work.on_cuda * work.layer_bytes, computed=True)
    if shape.experts is not None:
        curves, reduced = expert_memory.curves(all_experts, size), Term(work.layer_bytes, computed=True)
        if "experts" in work.schedule.profiled_kinds:
            counted = (*counted, expert_memory.effects(work))
    if linears:
        curves = max(curves, terms.directions(work), key=terms.size_of)
    solve = terms.correction if shape.experts is None else expert_memory.solve
    correction = max(
        (solve(all_experts, size, kept, residual=False) for kept in (size // 2, 3 * size // 4)), key=terms.size_of
    )
    logits = (Term(work.outside_bytes), terms.output_head(work), *terms.predictions(work), probes)
    if work.grid.family.head is None:  # last states are compared, without a head
        logits = (Term(3 * FLOAT * length * shape.hidden_size, computed=True, knobs=LENGTH), probes)
    return [
        *(_profiled_embedding(work, probes) if work.schedule.profiles_embedding else []),
        Stage("the profile's statistics", (*layer, *counted, batch)),
        Stage(
            "the profile's error curves",
            (*layer, *grams, *linears, max(curves, correction, key=terms.size_of), terms.layer_copy(work), reduced),
        ),
        Stage("the profile's output divergences", logits),
    ]


def _profiled_embedding(work: Work, probes: Term) -> list[Stage]:
    """Return the stages in which a reduced embedding passes the dense model, while the other `probes` wait."""
    shape, length = work.shape, work.text.sequence_length
    head = terms.output_head(work)
    states = Term(3 * EMBEDDING_PROBES * length * shape.hidden_size * work.dtype.itemsize, computed=True, knobs=LENGTH)
    expanded = Term(work.outside_bytes)
    held = (head, states, expanded, probes)
    walk = (*terms.layer(work), terms.layer_copy(work), terms.activations(work, shape.intermediate_size, length))
    return [
        Stage("the profile's embedding", (*held, *terms.read(work.outside_bytes), *terms.embedding(work))),
        Stage("the embedding's probes", (*held, Term(work.outside_bytes), *walk)),
        Stage("the embedding's divergence", (*held, head, *terms.predictions(work))),
    ]
