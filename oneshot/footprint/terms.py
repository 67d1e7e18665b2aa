"""Bytes that single computations of a run hold, as the code makes its tensors."""

from dataclasses import dataclass

from oneshot.config import AUTO
from oneshot.fold import PANEL_ROWS
from oneshot.footprint.work import Work
from oneshot.output_head import VOCABULARY_PANEL
from oneshot.recipes import WEIGHT_SELECTORS

HEAP_BLOCK_BYTES = 32 * 2**20  # smaller blocks stay in glibc's heap when they are freed
FLOAT, DOUBLE = 4, 8

BATCH = ("--batch-size", "--sequence-length")
LENGTH = ("--sequence-length",)


@dataclass(frozen=True)
class Term:
    """Bytes of one kind in a stage; on the compute device or always on the host; options that would make them fewer."""

    bytes: float
    computed: bool = False
    knobs: tuple[str, ...] = ()


def read(size: float) -> tuple[Term, ...]:
    """A tensor that is read: its copy, and the pages of the file that it is copied from."""
    return (Term(2 * size),)


def layer(work: Work) -> tuple[Term, ...]:
    """The tensors of a layer, and those of the next one while they are read."""
    return (Term(work.layer_bytes), *read(work.layer_bytes))


def layer_copy(work: Work, share: float = 1.0) -> Term:
    """A layer in the dtype of the streams; none where it is computed with the tensors that were read."""
    shared = work.device.type == "cpu" and work.dtype.itemsize == work.stored_itemsize
    return Term(0 if shared else share * work.shape.layer_parameters() * work.dtype.itemsize, computed=True)


def activations(work: Work, width: int, tokens: int | None = None) -> Term:
    """What a batch needs on its way through a layer with FFN width `width`, statistics of its neurons included."""
    shape, itemsize = work.shape, work.dtype.itemsize
    tokens = work.batch_tokens if tokens is None else tokens
    hidden, heads = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    norm = 3 * FLOAT * hidden
    attention = max(norm, itemsize * (4 * heads + 3 * keys + 2 * hidden))
    neurons = itemsize * (3 + shape.gated) * width + itemsize * hidden  # those of the last batch among them
    as_float = FLOAT * (itemsize != FLOAT) + itemsize * shape.mlp_bias
    update = width * (2 * itemsize + as_float) + hidden * (2 * itemsize + FLOAT + 2 * DOUBLE * work.two_streams)
    streams = itemsize * hidden * (3 + 3 * work.two_streams)
    ffn = max(neurons, update)
    kept_by_heap = tokens * itemsize * hidden < HEAP_BLOCK_BYTES
    passed = attention + ffn if kept_by_heap else max(attention, ffn)
    return Term(tokens * (streams + passed), computed=True, knobs=BATCH)


def gram(work: Work, size: int, *, residual: bool) -> Term:
    """The Gram of `size` columns and what the dense stream wants beyond."""
    return Term(FLOAT * size * (size + residual * work.shape.hidden_size), computed=True)


def held_out(work: Work, size: int, *, residual: bool) -> tuple[Term, ...]:
    """Where the ridge is chosen: the statistics of a slice of the text, and those of the rest in the end."""
    if work.config.damping != AUTO or not work.recipe.solves:
        return ()
    return (gram(work, size, residual=residual),) * 2


def sketch(work: Work) -> tuple[Term, ...]:
    """The sketch `S A`."""
    if work.recipe.sketch == "none" or work.recipe.ffn == "none":
        return ()
    rows = work.config.sketch_size or 2 * work.shape.intermediate_size
    return (Term(FLOAT * rows * work.shape.intermediate_size, computed=True, knobs=("--sketch-size",)),)


def pivoting(work: Work, size: int, kept: int, selector: str) -> Term:
    """Working memory of the choice of columns, beside their Gram."""
    square, output = size * size, work.shape.hidden_size * size
    if selector in WEIGHT_SELECTORS or selector not in ("id", "obs", "leverage"):
        return Term(2 * DOUBLE * output, computed=True)
    if selector == "obs":
        return Term((FLOAT + 3 * DOUBLE) * square + 2 * DOUBLE * output, computed=True)
    if selector == "leverage":
        return Term(3 * DOUBLE * square, computed=True)
    if work.recipe.sketch != "none":
        rows = work.config.sketch_size or 2 * work.shape.intermediate_size
        matrices = 2 if work.recipe.pivoting in ("cholesky", "qr") else 4
        return Term(DOUBLE * (matrices * rows * size + square), computed=True, knobs=("--sketch-size",))
    if work.recipe.pivoting in ("grouped", "tournament"):
        return Term(DOUBLE * (2 * square + 4 * size * kept), computed=True)
    if work.device.type == "cpu":
        return Term(DOUBLE * square, computed=True)
    return Term(DOUBLE * (4 * square + 2 * kept * size), computed=True)


def correction(work: Work, size: int, kept: int, *, residual: bool) -> Term:
    """Working memory of `factorise.correct` beside the Gram: of its solve or of the errors that follow."""
    hidden, rest = work.shape.hidden_size, size - kept
    if not work.recipe.solves:
        return Term(DOUBLE * hidden * (2 * size + kept), computed=True)
    solve = (FLOAT + DOUBLE) * kept * kept + (FLOAT + 3 * DOUBLE) * kept * rest
    step = DOUBLE * kept * kept + DOUBLE * kept * rest + residual * (FLOAT + 3 * DOUBLE) * kept * hidden
    results = DOUBLE * (kept * rest + (1 + residual) * hidden * kept + hidden * size)
    errors = results + DOUBLE * hidden * size * (1 + 2 * residual) + DOUBLE * 1024 * (size + 2 * hidden)
    return Term(max(solve, step, errors), computed=True)


def up_proj(work: Work, kept: int) -> tuple[Term, ...]:
    """Both factors of the preconditioner, what they are made of, and the steps of conjugate gradients."""
    hidden = work.shape.hidden_size
    factors = (2 * FLOAT + DOUBLE) * kept * kept + (FLOAT + DOUBLE) * hidden * hidden
    return Term(factors, computed=True), Term((6 * FLOAT + 3 * DOUBLE) * kept * hidden, computed=True)


def output_head(work: Work) -> Term:
    """The output head in the dtype of the streams."""
    return Term(work.shape.vocab_size * work.shape.hidden_size * work.dtype.itemsize, computed=True)


def predictions(work: Work) -> tuple[Term, ...]:
    """Logits of two models for one sequence, a panel of the vocabulary at a time, and its rows of the head."""
    shape, length = work.shape, work.config.sequence_length
    panel = min(VOCABULARY_PANEL, shape.vocab_size)
    logits = Term(FLOAT * length * (4 * panel + 6 * shape.hidden_size), computed=True, knobs=LENGTH)
    return logits, Term(FLOAT * (work.dtype.itemsize != FLOAT) * panel * shape.hidden_size, computed=True)


def embedding(work: Work) -> tuple[Term, ...]:
    """Tables and maps of a reduced embedding, at most as large as it; what they are found with."""
    hidden, vocabulary = work.shape.hidden_size, work.shape.vocab_size
    rows = min(PANEL_ROWS, vocabulary)
    return (
        Term(work.outside_bytes),
        Term(3 * DOUBLE * rows * hidden),
        Term(10 * DOUBLE * hidden * hidden + 4 * DOUBLE * vocabulary, computed=True),
    )


def bases(work: Work) -> Term:
    """Bases of neighbouring groups, and one while it is read."""
    if work.hidden is None:
        return Term(0)
    return Term(DOUBLE * work.shape.hidden_size**2 * (min(4, work.hidden.num_groups) + 2), computed=True)


def cast_share(work: Work) -> float:
    """Bytes of what is written by bytes of what was read, where its dtype changes."""
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    return sizes.get(work.config.save_dtype, 0) / work.stored_itemsize


def size_of(term: Term) -> float:
    return term.bytes
