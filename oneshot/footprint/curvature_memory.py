"""Peak bytes of the stages of the pass that measures output curvature, forward and back."""

from oneshot.footprint import terms
from oneshot.footprint.terms import BATCH, FLOAT, Stage, Term, computed
from oneshot.footprint.work import Work
from oneshot.profiling.curvature import sequences_together

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
    batch = terms.activations(work, shape.intermediate_size)
    again = Term((not work.on_cuda) * work.layer_bytes)  # tensors that a graph may hold
    summed = [term for size in work.curvature_sizes for term in terms.sums(work, size, residual=False)]
    head = (*terms.read(work.outside_bytes), terms.output_head(work), *terms.predictions(work))
    return [
        Stage("the stream of the output curvature", (*layer, again, batch), own_stores=stores),
        Stage("the drawn tokens of the output curvature", head, own_stores=stores),
        Stage("the output curvature", (*layer, again, _graph(work), *summed), own_stores=stores),
    ]


def _graph(work: Work) -> Term:
    """Return what the sequences that pass a layer with a graph together need."""
    shape, length = work.shape, work.text.sequence_length
    together = sequences_together(
        work.batch_tokens // length, length, shape.num_attention_heads, work.device, work.holds_scores
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
