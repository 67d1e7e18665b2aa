"""Peak bytes of the stages that compress a layer."""

from functools import cached_property

from oneshot.compression.rounding import PANEL_ROWS
from oneshot.compression.statistics import shrinkage_of
from oneshot.compression.sublayer import shrinks, takes_sketch
from oneshot.footprint import expert_memory, terms
from oneshot.footprint.terms import BATCH, DOUBLE, FLOAT, Stage, Term, computed, largest
from oneshot.footprint.work import Work


def layer_stages(work: Work) -> list[Stage]:
    """Return the stages of a layer, each at the kept FFN width that takes the most; none for a profile alone."""
    if work.plan is None:
        return []
    by_width = [_Layer(work, width).stages() for width in work.kept_widths]
    return [
        max(same, key=lambda stage: sum(term.bytes for term in stage.terms)) for same in zip(*by_width, strict=True)
    ]


class _Layer:
    """A layer that keeps an FFN width, and what its stages hold.

    Attributes:
        width, kept: the whole FFN width and the kept one. share: kept share of the layer's parameters.
        heads, size, kept_size: inputs of the output projection and of `down_proj`, with their biases.
        base: what every stage holds. held: also the layer in the compute dtype, dense and compressed.
        folded: the compressed layer. batch: activations of the dense layer. target: outputs of the dense stream.
    """

    def __init__(self, work: Work, kept: int) -> None:
        self.work, self.kept = work, kept
        shape, self.hidden, self.width = work.shape, work.shape.hidden_size, work.shape.intermediate_size
        outside_ffn = expert_memory.share_outside(work)
        self.share = 1 - (1 - kept / self.width) * (1 - outside_ffn)
        self.heads = work.heads_width + shape.output_bias
        self.size, self.kept_size = self.width + shape.mlp_bias, kept + shape.mlp_bias
        slices, removes_experts = work.schedule.finds_subspaces, work.schedule.removes_experts
        reshapes = work.method.reduces_heads or work.reshapes_heads or work.method.plans_ranks or removes_experts
        base = [*terms.layer(work), terms.bases(work)]
        if slices:
            base.append(computed(2 * FLOAT * self.hidden * (self.heads + self.size)))
        if reshapes:
            base.append(computed(outside_ffn * work.layer_bytes))
        self.base = tuple(base)
        self.held = (*base, terms.layer_copy(work), terms.layer_copy(work, 1.0 if reshapes or slices else 0.0))
        corrected = 1 if shape.experts is None else shape.experts.shared_count  # routed experts have their stored dtype
        self.folded = (computed(self.share * work.layer_bytes), computed(DOUBLE * self.hidden * kept * corrected))
        self.batch = terms.activations(work, self.width)
        self.target = computed(2 * work.batch_tokens * self.hidden * work.dtype.itemsize, BATCH)

    def stages(self) -> list[Stage]:
        work, schedule = self.work, self.work.schedule
        listed = []
        if work.method.plans_ranks:
            listed += self._ranks()
        if work.quantises:
            listed.append(self._rounding())
        if schedule.streams and schedule.solves_heads:
            listed += self._heads()
        if schedule.streams:
            listed += self._neurons() if work.shape.experts is None else self._experts()
            if schedule.corrects_up:
                listed += self._up_steps()
            moved = (terms.layer_copy(work, self.share), self.target, terms.activations(work, self.kept))
            listed.append(Stage("moving the streams on", (*self.base, *self.folded, *moved)))
        elif work.method.reduces_ffn:
            solved = terms.correction(work, self.size, self.kept_size, residual=False)
            if work.shape.experts is not None:
                solved = expert_memory.solve(work, self.size, self.kept, residual=False)
            listed.append(Stage("choosing neurons", (*self.base, largest(self._choice, solved))))
        return [*listed, self._writing()]

    @cached_property
    def _choice(self) -> Term:
        """Return what the neurons are chosen in."""
        return terms.choice(self.work, self.width, self.kept, self.work.method.ffn)

    def _ranks(self) -> list[Stage]:
        work, sizes = self.work, (self.hidden, self.heads)
        read = [term for size in sizes for term in terms.sums(work, size, residual=False)]
        found = [terms.gram(work, size, residual=False) for size in sizes]
        return [
            Stage("the statistics of the ranks", (*self.held, *read, self.batch)),
            Stage("the linears of low rank", (*self.held, *found, terms.directions(work))),
        ]

    def _rounding(self) -> Stage:
        inputs, rows = max(self.size, self.heads, self.hidden), max(2 * self.width, 3 * self.heads)
        factor = computed(4 * DOUBLE * inputs**2)
        panel = computed(7 * DOUBLE * min(PANEL_ROWS, rows) * inputs)
        found = computed((2 * self.work.dtype.itemsize + DOUBLE) * rows * inputs)
        fits = Term(0)
        if self.work.method.plans_ranks:  # rounded columns and what makes the other inputs, fitted to each other
            fits = computed(DOUBLE * self.hidden * (9 * self.hidden + 7 * max(self.width, 2 * self.heads)))
        return Stage("the rounding of linears", (*self.held, factor, panel, found, fits))

    def _heads(self) -> list[Stage]:
        work, heads = self.work, self.heads
        two_stream = work.schedule.finds_subspaces or work.method.heads_correction == "two-stream"
        residual = two_stream and work.schedule.two_streams
        solved = largest(
            terms.choice(work, heads, heads, work.method.heads),
            terms.correction(work, heads, heads // 2, residual=residual),
            computed(4 * DOUBLE * heads * heads) if work.method.heads == "id" else Term(0),
        )
        gram = _finished(work, heads, residual=residual)
        return [
            Stage("the statistics of the heads", (*self.held, *_summed(work, heads, residual=residual), self.batch)),
            Stage("the factorisation of the heads", (*self.held, *gram, self.batch, solved)),
        ]

    def _neurons(self) -> list[Stage]:
        work, size, residual = self.work, self.size, self.work.schedule.two_streams
        summed_sketch = _sketch(work, DOUBLE + FLOAT)
        summed, gram = (each(work, size, residual=residual, neurons=True) for each in (_summed, _finished))
        listed = [Stage("the statistics of the neurons", (*self.held, *summed, summed_sketch, self.batch))]
        if residual:
            gathered = (*gram, summed_sketch, self.target, computed(4 * FLOAT * self.hidden * size))
            listed.append(Stage("the residual of the neurons", (*self.held, *gathered)))
        solved = largest(self._choice, terms.correction(work, size, self.kept_size, residual=residual))
        factorised = (*self.base, *gram, _sketch(work), solved, self.target)
        return [*listed, Stage("the factorisation of the neurons", factorised)]

    def _experts(self) -> list[Stage]:
        work, size, residual = self.work, self.size, self.work.schedule.two_streams
        effects = []
        if work.schedule.removes_experts:
            residual = residual or work.method.solves  # what is lost of the layer itself
            effects = [Stage("the effects of experts", (*self.held, self.batch, expert_memory.effects(work)))]
        if not expert_memory.measures(work):
            return effects
        lost = computed(expert_memory.LOST * work.batch_tokens * self.hidden * FLOAT, BATCH)
        before = expert_memory.solved(work, self.kept)
        summed = (*expert_memory.sums(work, size, residual=residual), self.batch, lost, before)
        gram = expert_memory.gram(work, size, residual=residual)
        solved = (gram, expert_memory.solve(work, size, self.kept, residual=residual), before, self.target)
        is_grouped = expert_memory.num_groups(work) > 1  # then the layer waits for the next group
        return [
            *effects,
            Stage("the statistics of the experts", (*self.held, *summed)),
            Stage("the factorisation of the experts", (*(self.held if is_grouped else self.base), *solved)),
        ]

    def _up_steps(self) -> list[Stage]:
        work, kept, size = self.work, self.kept, self.kept_size
        copies = (terms.layer_copy(work), terms.layer_copy(work, self.share))
        held = (*self.base, *self.folded, *copies, self.batch, terms.activations(work, kept))
        again = (terms.gram(work, size, residual=True), terms.correction(work, size, size, residual=True))
        return [
            Stage("the correction of up_proj", (*held, *_up_proj(work, kept))),
            Stage("the statistics of down_proj behind it", (*held, *terms.sums(work, size, residual=True))),
            Stage("the correction of down_proj behind it", (*held, *again)),
        ]

    def _writing(self) -> Stage:
        slices = self.work.schedule.finds_subspaces
        product = computed(2 * DOUBLE * self.hidden * (self.width + self.hidden)) if slices else Term(0)
        written = 2 if slices else 1  # folded layers are float32 before they are cast
        out = Term((2 + written + terms.cast_share(self.work)) * self.share * self.work.layer_bytes)
        return Stage("writing a layer", (*self.base, *self.folded, out, product))


def _finished(work: Work, size: int, *, residual: bool, neurons: bool = False) -> tuple[Term, ...]:
    """Return the `gram`; if held-out tokens say how much is corrected, also the Grams of the slice and the rest.

    Of neurons also the Gram as it is shrunk.
    """
    few = neurons and _are_few(work, size)
    terms_of_slice = 2 * (few or work.method.holds_out)
    shrunk = (terms.gram(work, size, residual=False),) * few
    return (terms.gram(work, size, residual=residual),) * (1 + terms_of_slice) + shrunk


def _summed(work: Work, size: int, *, residual: bool, neurons: bool = False) -> tuple[Term, ...]:
    """Return what the statistics of `finished` are summed in."""
    whole = terms.sums(work, size, residual=residual)
    holds_out = work.method.holds_out or (neurons and _are_few(work, size))
    return (*whole, whole[0]) if holds_out else whole


def _are_few(work: Work, size: int) -> bool:
    """Return whether tokens are so few that what neurons share is partly chance."""
    tokens = 0 if work.grid.family.decoder is not None else work.num_tokens  # of two stacks each has any part
    return shrinks(work.method) and shrinkage_of(size, tokens) > 0


def _sketch(work: Work, itemsize: int = FLOAT) -> Term:
    """Return the sketch `S A`; while it is summed a number takes `DOUBLE + FLOAT`. Nothing without a sketch."""
    width = work.shape.intermediate_size
    rows = work.method.rows_of_sketch(width) if takes_sketch(work.method) else 0
    return computed(itemsize * rows * width, ("--set sketch_size=",))


def _up_proj(work: Work, kept: int) -> tuple[Term, ...]:
    """Return both factors of the preconditioner, what they are made of, and the steps of conjugate gradients."""
    hidden = work.shape.hidden_size
    factors = (2 * FLOAT + DOUBLE) * kept * kept + (FLOAT + DOUBLE) * hidden * hidden
    return computed(factors), computed((6 * FLOAT + 4 * DOUBLE) * kept * hidden)
