"""Peak bytes of the stages of a profile's dense pass."""

from dataclasses import dataclass, replace

from oneshot.footprint import expert_memory, terms
from oneshot.footprint.terms import DOUBLE, FLOAT, LENGTH, Stage, Term
from oneshot.footprint.work import Work
from oneshot.profiling.embedding import EMBEDDING_PROBES
from oneshot.profiling.probes import num_probes, probe_sequences


def profile_stages(work: Work) -> list[Stage]:
    """Return the stages of the profile's dense pass; each layer adds probes."""
    shape, itemsize, length = work.shape, work.dtype.itemsize, work.text.sequence_length
    heads = shape.num_attention_heads * shape.head_dim
    count = num_probes(work.schedule.profiled_kinds, shape.num_hidden_layers, work.predicts_divergences)
    number = probe_sequences(work.text.num_sequences) * length * itemsize
    # the dense states before and behind each sublayer and its sum, and those of the probe that moves; keys and values
    # that later layers read are not stored
    probes = Term((6 * shape.hidden_size + (count + 2) * shape.lent) * number, computed=True, knobs=LENGTH)
    stores = (*work.store_bytes, count * shape.hidden_size * number)
    ffn = _neurons(work) if shape.experts is None else _experts(expert_memory.as_profiled(work))
    grams = (*ffn.held, terms.gram(work, heads + shape.output_bias, residual=False))
    counted = (*ffn.summed, *terms.sums(work, heads + shape.output_bias, residual=False)[:1])
    curves = ffn.curves
    if "rank" in work.schedule.profiled_kinds:
        columns = (heads, shape.hidden_size, shape.hidden_size)
        grams = (*grams, *(terms.gram(work, count, residual=False) for count in columns))
        counted = (*counted, *(terms.sums(work, count, residual=False)[0] for count in columns))
        curves = max(curves, terms.directions(work), key=terms.size_of)
    layer = (*terms.layer(work), terms.layer_copy(work), probes)
    batch = terms.activations(work, shape.intermediate_size)
    logits = (Term(work.outside_bytes), terms.output_head(work), *terms.predictions(work), probes)
    if work.grid.family.head is None:  # last states are compared, without a head
        logits = (Term(3 * FLOAT * length * shape.hidden_size, computed=True, knobs=LENGTH), probes)
    listed = [
        *(_profiled_embedding(work, probes) if work.schedule.profiles_embedding else []),
        Stage("the profile's statistics", (*layer, *counted, batch)),
        Stage("the profile's error curves", (*layer, *grams, curves, terms.layer_copy(work), ffn.beside_curves)),
        *(Stage(name, (*layer, *grams, terms.layer_copy(work), reduced)) for name, reduced in ffn.probes.items()),
        Stage("the profile's output divergences", logits),
    ]
    return [replace(stage, own_stores=stores) for stage in listed]


@dataclass(frozen=True)
class _Ffn:
    """State what a layer's FFN or experts take in a profile.

    `summed`: what their statistics are summed in. `held`: the finished ones. `curves`: what error curves are made of,
    and the probe's correction. `beside_curves`: tensors of probes beside them. `probes`: tensors of further probes, by
    the names of stages.
    """

    summed: tuple[Term, ...]
    held: tuple[Term, ...]
    curves: Term
    beside_curves: Term
    probes: dict[str, Term]


def _neurons(work: Work) -> _Ffn:
    hidden, size = work.shape.hidden_size, work.shape.intermediate_size + work.shape.mlp_bias
    weights, weighed = 3 * DOUBLE * hidden * size, terms.neuron_gram(work, size)
    factors = max((FLOAT + DOUBLE) * size * size + weighed.bytes, DOUBLE * size * size + weights)
    solved = (terms.correction(work, size, kept, residual=False) for kept in (size // 2, 3 * size // 4))
    return _Ffn(
        summed=terms.sums(work, size, residual=False),
        held=(terms.gram(work, size, residual=False),),
        curves=max(Term(factors, computed=True, knobs=weighed.knobs), *solved, key=terms.size_of),
        beside_curves=Term(work.on_cuda * work.layer_bytes, computed=True),
        probes={},
    )


def _experts(work: Work) -> _Ffn:
    """Return the terms of a group of experts, beside groups before it that are corrected."""
    size, kept = work.shape.intermediate_size + work.shape.mlp_bias, 3 * work.shape.intermediate_size // 4
    effects, probes = tuple[Term, ...](), dict[str, Term]()
    if "experts" in work.schedule.profiled_kinds:
        effects = (expert_memory.effects(work),)
        probes = {"the profile's probe of fewer experts": Term(work.layer_bytes, computed=True)}
    beside_curves = Term(expert_memory.share_outside(work) * work.layer_bytes, computed=True)  # of attention
    if not expert_memory.profiles(work):  # whole experts alone
        return _Ffn(effects, (), Term(0), beside_curves, probes)
    before, downs = expert_memory.solved(work, kept), expert_memory.downs(work, kept)
    probes |= {"the profile's probe of narrower experts": replace(downs, bytes=3 * downs.bytes)}
    solved = (expert_memory.solve(work, size, kept, residual=False) for kept in (size // 2, 3 * size // 4))
    return _Ffn(
        summed=(*expert_memory.sums(work, size, residual=False), *effects, before),
        held=(expert_memory.gram(work, size, residual=False), before),
        curves=max(expert_memory.curves(work, size), *solved, key=terms.size_of),
        beside_curves=beside_curves,
        probes=probes,
    )


def _profiled_embedding(work: Work, probes: Term) -> list[Stage]:
    """Return the stages in which a reduced embedding passes the dense model, while the other `probes` wait."""
    shape, length = work.shape, work.text.sequence_length
    head = terms.output_head(work)
    numbers = 3 * EMBEDDING_PROBES * length * shape.hidden_size
    states = Term(numbers * work.dtype.itemsize, computed=True, knobs=LENGTH)
    expanded = Term(work.outside_bytes)
    held = (head, states, expanded, probes)
    walk = (*terms.layer(work), terms.layer_copy(work), terms.activations(work, shape.intermediate_size, length))
    return [
        Stage("the profile's embedding", (*held, *terms.read(work.outside_bytes), *terms.embedding(work))),
        Stage("the embedding's probes", (*held, Term(work.outside_bytes), *walk)),
        Stage("the embedding's divergence", (*held, head, *terms.predictions(work))),
    ]
