"""Bytes that single computations of a run hold, tensor by tensor; a stage is a sum of them."""

from dataclasses import dataclass

import torch

from oneshot.compression.correction import ENERGY_PANEL
from oneshot.compression.fold import PANEL_ROWS
from oneshot.compression.sublayer import takes_sketch
from oneshot.footprint.work import Work
from oneshot.linalg.sums import DEVICE_PANEL_WIDTH, PANEL_WIDTH
from oneshot.method import SelectorName
from oneshot.selection import Cost, Extent, find_selector
from oneshot.selection.evidence import neuron_gram_bytes
from oneshot.stream.memory import TOKENS_TOGETHER
from oneshot.stream.output_head import panel_rows

HEAP_BLOCK_BYTES = 32 * 2**20  # smaller blocks stay in glibc's heap when they are freed
FLOAT, DOUBLE = 4, 8
MAPPED_BYTES = 64 * 2**10  # that Linux maps around a page of a file
COMPILED_BYTES, COMPILED_PRODUCTS = 0.8 * 2**20, 1024  # of a product that oneDNN compiled, and how many it keeps
DEQUANTISED = 2.0  # of the largest tensor of a GGUF file in float32, while it is dequantised
BUCKET_BYTES = 48  # of one distance: integers of 64 bits and their temporaries
# Gaps that texts of unequal lengths leave in the heap, measured on MiniLM: shares of a batch's activations and of all
# hidden states that are stored.
GAPS_OF_ACTIVATIONS, GAPS_OF_TEXT = 0.25, 0.5
CARRIED_COPIES = 8  # of the outputs of a carried mixer's linears, in float32: parts, their products, states by chunks
SPLIT_BLOCKS = 3  # further blocks of the size of scores that gaps in the heap may take; on Gemma 2 from none to 3
LARGEST_REUSED_BYTES = 2**25  # glibc takes larger blocks from the system and gives them back
SCORES = 3  # floats for each of whole scores: masked, their softmax in steps
SCORES_WITH_SINKS = 6  # also beside the sinks, and below their largest
MASKS = 3  # floats for every two tokens: of full attention and of a window, and one while it is made or converted

BATCH = ("--batch-size", "--sequence-length")
LENGTH = ("--sequence-length",)


@dataclass(frozen=True)
class Term:
    """Bytes of one kind in a stage: `computed` on the compute device or always on the host; `knobs` reduce them."""

    bytes: float
    computed: bool = False
    knobs: tuple[str, ...] = ()


def computed(size: float, knobs: tuple[str, ...] = ()) -> Term:
    """Return bytes on the compute device."""
    return Term(size, True, knobs)


def largest(*alternatives: Term) -> Term:
    """Return the largest of what is held one after the other."""
    return max(alternatives, key=lambda term: term.bytes)


@dataclass(frozen=True)
class Stage:
    """The memory at the peak of a stage.

    `has_states`: whether hidden states may be stored meanwhile. `own_stores`: bytes of each of its activation stores;
    None for the streams' own.
    """

    name: str
    terms: tuple[Term, ...]
    has_states: bool = True
    own_stores: tuple[int, ...] | None = None

    def stores(self, work: Work) -> tuple[int, ...]:
        """Return the bytes of each activation store that exists in this stage."""
        if not self.has_states:
            return ()
        return tuple(work.store_bytes) if self.own_stores is None else self.own_stores

    def total(self, *, computed: bool) -> float:
        """Return the bytes on the compute device (`computed`), or of what is always on the host."""
        return sum(term.bytes for term in self.terms if term.computed == computed)

    def knobs(self) -> tuple[str, ...]:
        """Return the options that would lower this stage by a tenth or more, the most helpful first."""
        tenth = sum(term.bytes for term in self.terms) / 10
        ordered = sorted(self.terms, key=lambda term: -term.bytes)
        return tuple(dict.fromkeys(knob for term in ordered if term.bytes > tenth for knob in term.knobs))


def read(size: float) -> tuple[Term, ...]:
    """Return a tensor that is read: its copy, and the pages of the file that it is copied from."""
    return (Term(2 * size),)


def layer(work: Work) -> tuple[Term, ...]:
    """Return the tensors of a layer, and of the next one while it is read.

    On CUDA they are in pinned memory, and on the device. A finished layer waits in pinned memory for its thread.
    """
    beside = token_inputs(work)
    if not work.on_cuda:
        return (Term(work.layer_bytes), *read(work.layer_bytes), *beside, _compiled_products(work))
    return (*beside, Term(3 * work.pinned_bytes), *read(work.layer_bytes), computed(work.layer_bytes))


def token_inputs(work: Work) -> tuple[Term, ...]:
    """Return what the distinct tokens of the text read in a layer beside the stream, while it is made; often nothing.

    The system maps pages around a row that is read.
    """
    inputs, shape = work.grid.family.stack.token_inputs, work.shape
    if inputs is None:
        return ()
    distinct = min(shape.vocab_size, work.num_tokens)
    together = min(distinct, TOKENS_TOGETHER)
    row_bytes = (inputs.width * shape.num_hidden_layers + shape.hidden_size) * work.stored_itemsize
    pages = min(shape.vocab_size * row_bytes, 2 * MAPPED_BYTES * together)
    made = FLOAT * together * (4 * shape.hidden_size + 6 * inputs.width)
    return Term(pages), computed(2 * distinct * inputs.width * work.dtype.itemsize + made)


def _compiled_products(work: Work) -> Term:
    """Return what the CPU's library keeps of products of experts in bfloat16: one for every number of rows."""
    if work.shape.experts is None or work.dtype != torch.bfloat16:
        return Term(0)
    batches = -(-work.num_tokens // work.batch_tokens)
    products = 2 * work.shape.experts.count * work.shape.num_hidden_layers * batches
    return Term(COMPILED_BYTES * min(products, COMPILED_PRODUCTS))


def layer_copy(work: Work, share: float = 1.0) -> Term:
    """Return a layer in the compute dtype; nothing if it is computed with the tensors that were read."""
    mixture = work.grid.family.stack.experts
    is_laid_out = mixture is not None and mixture.alternating  # otherwise than it was read
    size = 0 if work.same_dtype and not is_laid_out else share * work.shape.layer_parameters() * work.dtype.itemsize
    return computed(size)


def activations(work: Work, width: int, tokens: int | None = None) -> Term:
    """Return what a batch needs in a layer with FFN width `width`, with the statistics of its neurons."""
    shape, itemsize = work.shape, work.dtype.itemsize
    tokens = work.batch_tokens if tokens is None else tokens
    head = max(shape.head_dim, shape.query_key_size)
    hidden, heads, keys = shape.hidden_size, shape.num_attention_heads * head, shape.num_key_value_heads * head
    positions = 0  # scores of relative positions, causal ones apart, and the buckets of all distances
    if shape.num_buckets:
        positions = work.text.sequence_length**2 * (3 * itemsize * shape.num_attention_heads + BUCKET_BYTES)
    if work.holds_scores:  # of one sequence at a time
        scores = SCORES_WITH_SINKS if shape.sinks else SCORES
        each = FLOAT * work.text.sequence_length**2 * shape.num_attention_heads
        positions += scores * each + SPLIT_BLOCKS * min(each, LARGEST_REUSED_BYTES)
    if work.has_masks:
        positions += MASKS * FLOAT * work.text.sequence_length**2
    norm = 3 * FLOAT * hidden
    attention = max(norm, itemsize * (4 * heads + 3 * keys + 2 * hidden))
    widest = max((sizes.width for sizes in shape.carried), default=0)
    attention = max(attention, CARRIED_COPIES * FLOAT * widest)
    neurons = itemsize * (3 + shape.gated) * width + itemsize * hidden  # also of the last batch
    as_float = FLOAT * (itemsize != FLOAT) + itemsize * shape.mlp_bias
    update = width * (2 * itemsize + as_float) + hidden * (
        2 * itemsize + FLOAT + 2 * DOUBLE * work.schedule.two_streams
    )
    streams = itemsize * hidden * (3 + 3 * work.schedule.two_streams)
    ffn = max(neurons, update) if shape.experts is None else experts(work, width)
    kept_by_heap = tokens * itemsize * hidden < HEAP_BLOCK_BYTES
    passed = attention + ffn if kept_by_heap else max(attention, ffn)
    streams += itemsize * hidden * (shape.num_decoder_layers > 0)  # the memory
    needed: float = tokens * (streams + passed) + positions
    if not shape.causal and not work.on_cuda:
        needed += GAPS_OF_ACTIVATIONS * tokens * (streams + passed) + GAPS_OF_TEXT * sum(work.store_bytes)
    return computed(needed, BATCH)


def experts(work: Work, width: int) -> int:
    """Return the bytes that a token takes at the experts' peak: stock products of all its experts, and one's rows.

    All tokens may go to one expert at once. The stock products sort copies of the inputs and of the outputs.
    """
    sizes, hidden, itemsize = work.shape.experts, work.shape.hidden_size, work.dtype.itemsize
    assert sizes is not None
    stock = itemsize * sizes.per_token * (4 * width + 5 * hidden) + (itemsize + 2 * FLOAT) * sizes.count
    rows = width * (5 * itemsize + FLOAT) + hidden * (3 * itemsize + 2 * FLOAT)
    beside = max(4 * hidden + 4 * sizes.shared(width), hidden + 4 * sizes.dense_width)  # also of layers without experts
    return max(stock, rows) + itemsize * beside


def gram(work: Work, size: int, *, residual: bool) -> Term:
    """Return the finished Gram of `size` columns and the residual towards the dense stream."""
    return computed(FLOAT * size * (size + residual * work.shape.hidden_size))


def sums(work: Work, size: int, *, residual: bool) -> tuple[Term, ...]:
    """Return what `gram` is summed in, and the larger of a panel of products and the finished float32 Gram."""
    numbers = size * (size + residual * work.shape.hidden_size)
    width = DEVICE_PANEL_WIDTH if work.on_cuda else PANEL_WIDTH
    panel = (FLOAT + (not work.on_cuda) * DOUBLE) * min(width, size) * size  # a CPU adds a copy of them in float64
    return computed(DOUBLE * numbers), computed(max(panel, FLOAT * size * size))


def choice(work: Work, size: int, kept: int, selector: SelectorName) -> Term:
    """Return the working memory of the choice of columns, beside their Gram."""
    cost = choice_cost(work, size, kept, selector)
    return computed(cost.bytes, cost.knobs)


def choice_cost(work: Work, size: int, kept: float, selector: SelectorName) -> Cost:
    """Return what a selector takes for `kept` of `size` columns; nothing without one."""
    chosen, method = find_selector(selector), work.method
    if chosen is None:
        return Cost(0)
    sketch_rows = method.rows_of_sketch(work.shape.intermediate_size) if takes_sketch(method) else 0
    return chosen.cost(
        Extent(
            columns=size,
            kept=kept,
            outputs=work.shape.hidden_size,
            pivoting=method.pivoting,
            sketch_rows=sketch_rows,
            weighs_output=work.schedule.weighs_output,
            on_cuda=work.on_cuda,
        )
    )


def neuron_gram(work: Work, size: int) -> Term:
    """Return the Gram of neurons by what they do to the output, beside which pivots are chosen; nothing without it."""
    if not work.schedule.weighs_output:
        return computed(0)
    return computed(neuron_gram_bytes(size, work.shape.hidden_size), ("--set curvature=none",))


def correction(work: Work, size: int, kept: int, *, residual: bool) -> Term:
    """Return the working memory of `correction.correct` beside the Gram: the larger of its solve and of its errors."""
    hidden, rest = work.shape.hidden_size, size - kept
    panel = DOUBLE * min(ENERGY_PANEL, size) * (size + 2 * hidden) + work.on_cuda * FLOAT * hidden * size
    compared = max(DOUBLE * hidden * kept, panel, residual * 2 * DOUBLE * hidden * size)
    if not work.method.solves:
        return computed(DOUBLE * hidden * (2 * size + kept) + compared)
    solve = (FLOAT + DOUBLE) * kept * kept + (FLOAT + 3 * DOUBLE) * kept * rest
    step = DOUBLE * kept * kept + DOUBLE * kept * rest + residual * (FLOAT + 3 * DOUBLE) * kept * hidden
    results = DOUBLE * (kept * rest + (1 + residual) * hidden * kept + 2 * hidden * size)
    return computed(max(solve, step, results + compared))


def directions(work: Work) -> Term:
    """Return the working memory of the principal directions of the largest linear, and of its factors."""
    shape = work.shape
    read = max(shape.intermediate_size, (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim)

    def of_linear(inputs: int, outputs: int, weighed: int) -> Term:
        metric = 2 * weighed**2 * work.schedule.weighs_output
        return computed(FLOAT * (3 * inputs * inputs + 4 * max(inputs, outputs) * inputs + metric))

    readers = of_linear(shape.hidden_size, read, shape.query_key_width)
    return largest(readers, of_linear(work.heads_width, shape.hidden_size, shape.hidden_size))


def output_head(work: Work) -> Term:
    """Return the output head in the compute dtype."""
    return computed(work.shape.vocab_size * work.shape.hidden_size * work.dtype.itemsize)


def predictions(work: Work) -> tuple[Term, ...]:
    """Return logits of two models for one sequence and a panel of the vocabulary, and its rows of the head."""
    shape, length = work.shape, work.text.sequence_length
    panel = min(panel_rows(on_cuda=work.on_cuda), shape.vocab_size)
    logits = computed(FLOAT * length * (5 * panel + 7 * shape.hidden_size), LENGTH)
    copies = 1 + (work.dtype.itemsize != FLOAT)  # for oneDNN
    return logits, computed(FLOAT * copies * panel * shape.hidden_size)


def embedding(work: Work) -> tuple[Term, ...]:
    """Return tables and maps of a reduced embedding, at most as large as it, and what they are computed with."""
    hidden, vocabulary = work.shape.hidden_size, work.shape.vocab_size
    rows = min(PANEL_ROWS, vocabulary)
    return (
        Term(work.outside_bytes),
        computed(3 * DOUBLE * rows * hidden),
        computed(10 * DOUBLE * hidden * hidden + 4 * DOUBLE * vocabulary),
    )


def bases(work: Work) -> Term:
    """Return bases of neighbouring groups, and one while it is read."""
    if work.hidden is None:
        return Term(0)
    return computed(DOUBLE * work.shape.hidden_size**2 * (min(4, work.hidden.num_groups) + 2))


def cast_share(work: Work) -> float:
    """Return the bytes written per byte read if the dtype changes, else 0."""
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    return sizes.get(work.save_dtype, 0) / work.stored_itemsize
