"""Peak bytes of the stages that compress a layer."""

from dataclasses import dataclass

from oneshot.footprint import expert_memory, terms
from oneshot.footprint.terms import BATCH, DOUBLE, FLOAT, Stage, Term
from oneshot.footprint.work import Work


def layer_stages(work: Work) -> list[Stage]:
    """Return the stages of a layer, each at the kept FFN width that takes the most; none for a profile alone."""
    if work.plan is None:
        return []
    by_width = [_stages_at(work, width) for width in work.kept_widths]
    return [
        max(same, key=lambda stage: sum(term.bytes for term in stage.terms)) for same in zip(*by_width, strict=True)
    ]


@dataclass(frozen=True)
class _Layer:
    """State what several stages of a layer hold.

    Attributes:
        kept: the FFN width. share: kept share of the layer's parameters.
        heads, size: inputs of the output projection and of `down_proj`, with their biases.
        base: what every stage holds. copies: the layer in the compute dtype, dense and compressed. folded: the
            compressed layer. batch: activations of the dense layer. target: outputs of the dense stream.
    """

    work: Work
    kept: int
    share: float
    heads: int
    size: int
    base: tuple[Term, ...]
    copies: tuple[Term, ...]
    folded: tuple[Term, ...]
    batch: Term
    target: Term

    @property
    def kept_size(self) -> int:
        """Return the kept inputs of `down_proj`, with its bias."""
        return self.kept + self.work.shape.mlp_bias


def _layer(work: Work, kept: int) -> _Layer:
    assert work.plan is not None
    shape, hidden, width = work.shape, work.shape.hidden_size, work.shape.intermediate_size
    slices = work.schedule.finds_subspaces
    inner = work.plan.reduces_values or work.plan.reduces_queries_keys or work.method.plans_inner_sizes
    removes_experts = work.schedule.removes_experts
    reshapes = work.method.reduces_heads or inner or work.method.plans_ranks or removes_experts
    attention_share = expert_memory.share_outside(work)
    share = 1 - (1 - kept / width) * (1 - attention_share)
    heads, size = shape.num_attention_heads * shape.head_dim + shape.output_bias, width + shape.mlp_bias
    corrected = 1 if shape.experts is None else shape.experts.shared_count  # routed experts have their stored dtype
    base = (*terms.layer(work), terms.bases(work))
    if slices:
        base = (*base, Term(2 * FLOAT * hidden * (heads + size), computed=True))
    if reshapes:
        base = (*base, Term(attention_share * work.layer_bytes, computed=True))
    return _Layer(
        work,
        kept,
        share,
        heads,
        size,
        base,
        copies=(terms.layer_copy(work), terms.layer_copy(work, 1.0 if reshapes or slices else 0.0)),
        folded=(
            Term(share * work.layer_bytes, computed=True),
            Term(DOUBLE * hidden * kept * corrected, computed=True),
        ),
        batch=terms.activations(work, width),
        target=Term(2 * work.batch_tokens * hidden * work.dtype.itemsize, computed=True, knobs=BATCH),
    )


def _stages_at(work: Work, kept: int) -> list[Stage]:
    """Return the stages of a layer that keeps this FFN width."""
    layer, schedule = _layer(work, kept), work.schedule
    listed = []
    if work.method.plans_ranks:
        listed += _ranks(layer)
    if schedule.streams and schedule.solves_heads:
        listed += _heads(layer)
    if schedule.streams:
        listed += _neurons(layer) if work.shape.experts is None else _experts(layer)
        if schedule.corrects_up:
            listed += _up_steps(layer)
        moved = (terms.layer_copy(work, layer.share), layer.target, terms.activations(work, kept))
        listed.append(Stage("moving the streams on", (*layer.base, *layer.folded, *moved)))
    elif work.method.reduces_ffn:
        chosen = terms.choice(work, work.shape.intermediate_size, kept, work.method.ffn)
        solved = terms.correction(work, layer.size, layer.kept_size, residual=False)
        if work.shape.experts is not None:
            solved = expert_memory.solve(work, layer.size, kept, residual=False)
        listed.append(Stage("choosing neurons", (*layer.base, max(chosen, solved, key=terms.size_of))))
    listed.append(_writing(layer))
    return listed


def _ranks(layer: _Layer) -> list[Stage]:
    work, held = layer.work, (*layer.base, *layer.copies)
    sizes = (work.shape.hidden_size, layer.heads)
    read = [term for size in sizes for term in terms.sums(work, size, residual=False)]
    found = [terms.gram(work, size, residual=False) for size in sizes]
    return [
        Stage("the statistics of the ranks", (*held, *read, layer.batch)),
        Stage("the linears of low rank", (*held, *found, terms.directions(work))),
    ]


def _heads(layer: _Layer) -> list[Stage]:
    work, heads, held = layer.work, layer.heads, (*layer.base, *layer.copies)
    two_stream = work.schedule.finds_subspaces or work.method.heads_correction == "two-stream"
    residual = two_stream and work.schedule.two_streams
    counted = (*terms.sums(work, heads, residual=residual), *terms.held_out_sums(work, heads, residual=residual))
    gram = (terms.gram(work, heads, residual=residual), *terms.held_out(work, heads, residual=residual))
    solved = max(
        terms.choice(work, heads, heads, work.method.heads),
        terms.correction(work, heads, heads // 2, residual=residual),
        Term(4 * DOUBLE * heads * heads, computed=True) if work.method.heads == "id" else Term(0),
        key=terms.size_of,
    )
    return [
        Stage("the statistics of the heads", (*held, *counted, layer.batch)),
        Stage("the factorisation of the heads", (*held, *gram, layer.batch, solved)),
    ]


def _neurons(layer: _Layer) -> list[Stage]:
    work, size, held = layer.work, layer.size, (*layer.base, *layer.copies)
    residual, width = work.schedule.two_streams, work.shape.intermediate_size
    counted = (*terms.sums(work, size, residual=residual), *terms.held_out_sums(work, size, residual=residual))
    gram = (terms.gram(work, size, residual=residual), *terms.held_out(work, size, residual=residual))
    listed = [Stage("the statistics of the neurons", (*held, *counted, *terms.sketch_sums(work), layer.batch))]
    if residual:
        finished = Term(4 * FLOAT * work.shape.hidden_size * size, computed=True)
        gathered = (*gram, *terms.sketch_sums(work), layer.target, finished)
        listed.append(Stage("the residual of the neurons", (*held, *gathered)))
    solved = max(
        terms.choice(work, width, layer.kept, work.method.ffn),
        terms.correction(work, size, layer.kept_size, residual=residual),
        key=terms.size_of,
    )
    factorised = (*layer.base, *gram, *terms.sketch(work), solved, layer.target)
    return [*listed, Stage("the factorisation of the neurons", factorised)]


def _experts(layer: _Layer) -> list[Stage]:
    work, size, held = layer.work, layer.size, (*layer.base, *layer.copies)
    residual = work.schedule.two_streams
    effects = []
    if work.schedule.removes_experts:
        residual = residual or work.method.solves  # what is lost of the layer itself
        effects = [Stage("the effects of experts", (*held, layer.batch, expert_memory.effects(work)))]
    if not expert_memory.measures(work):
        return effects
    lost = Term(expert_memory.LOST * work.batch_tokens * work.shape.hidden_size * FLOAT, computed=True, knobs=BATCH)
    before = expert_memory.solved(work, layer.kept)
    summed = (*expert_memory.sums(work, size, residual=residual), layer.batch, lost, before)
    gram = expert_memory.gram(work, size, residual=residual)
    solved = (gram, expert_memory.solve(work, size, layer.kept, residual=residual), before, layer.target)
    is_grouped = expert_memory.num_groups(work) > 1  # then the layer waits for the next group
    return [
        *effects,
        Stage("the statistics of the experts", (*held, *summed)),
        Stage("the factorisation of the experts", (*(held if is_grouped else layer.base), *solved)),
    ]


def _up_steps(layer: _Layer) -> list[Stage]:
    work, kept, size = layer.work, layer.kept, layer.kept_size
    copies = (terms.layer_copy(work), terms.layer_copy(work, layer.share))
    passed = (terms.activations(work, work.shape.intermediate_size), terms.activations(work, kept))
    held = (*layer.base, *layer.folded, *copies, *passed)
    again = (terms.gram(work, size, residual=True), terms.correction(work, size, size, residual=True))
    return [
        Stage("the correction of up_proj", (*held, *terms.up_proj(work, kept))),
        Stage("the statistics of down_proj behind it", (*held, *terms.sums(work, size, residual=True))),
        Stage("the correction of down_proj behind it", (*held, *again)),
    ]


def _writing(layer: _Layer) -> Stage:
    work, hidden, width = layer.work, layer.work.shape.hidden_size, layer.work.shape.intermediate_size
    slices = work.schedule.finds_subspaces
    product = Term(2 * DOUBLE * hidden * (width + hidden), computed=True) if slices else Term(0)
    written = 2 if slices else 1  # folded layers are float32 before they are cast
    out = Term((2 + written + terms.cast_share(work)) * layer.share * work.layer_bytes)
    return Stage("writing a layer", (*layer.base, *layer.folded, out, product))
