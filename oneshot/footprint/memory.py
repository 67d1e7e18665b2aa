"""Bytes that the stages of a run hold at their fullest, term by term as the code makes its tensors.

Sums are meant to be a little above what is measured and never below it. What torch, BLAS, the tokenizer and the heap
keep for themselves is `SLACK_BYTES` and `HEAP_SHARE` of the rest.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from oneshot.config import AUTO
from oneshot.fold import PANEL_ROWS
from oneshot.footprint.work import Work
from oneshot.layerwise.latency import WIDTHS
from oneshot.layerwise.profiling import EMBEDDING_PROBES, PROBE_SEQUENCES
from oneshot.output_head import VOCABULARY_PANEL
from oneshot.recipes import WEIGHT_SELECTORS
from oneshot.sampling import DOCUMENT_TOKENS, GENERATED_TOGETHER, SELF

SLACK_BYTES = 128 * 2**20
HEAP_SHARE = 1.08
HEAP_BLOCK_BYTES = 32 * 2**20  # smaller blocks stay in glibc's heap when they are freed
DEVICE_SLACK_BYTES = 384 * 2**20  # workspaces of cuBLAS and cuSOLVER
REPORT_BYTES = 64 * 2**20  # matplotlib draws a finished run
HUB_TEXT_BYTES = 256 * 2**20  # a shuffle buffer of documents, and pyarrow's
TEXT_FACTOR = 180  # bytes for a byte of a text file that is tokenised as one document
FLOAT, DOUBLE = 4, 8

BATCH = ("--batch-size", "--sequence-length")
LENGTH = ("--sequence-length",)


@dataclass(frozen=True)
class Term:
    """Bytes of one kind in a stage; on the compute device or always on the host; options that would make them fewer."""

    bytes: float
    computed: bool = False
    knobs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stage:
    """What is in memory at the fullest moment of a stage."""

    name: str
    terms: tuple[Term, ...]

    def total(self, *, computed: bool) -> float:
        """Bytes of the terms on the compute device, or of those that are always on the host."""
        return sum(term.bytes for term in self.terms if term.computed == computed)

    def knobs(self) -> tuple[str, ...]:
        """Options that would lower this stage by a tenth at least, the most helpful first."""
        total = sum(term.bytes for term in self.terms)
        helpful = sorted((term for term in self.terms if term.knobs), key=lambda term: -term.bytes)
        return tuple(dict.fromkeys(knob for term in helpful if term.bytes > total / 10 for knob in term.knobs))


def stages(work: Work) -> list[Stage]:
    """The stages of a run, without the activation stores."""
    found = [Stage("the libraries", ())]
    if work.texts:
        found += [_writing(work) if source == SELF else _reading(source) for source in work.texts]
        embedded = 3 * work.batch_tokens * work.shape.hidden_size * work.dtype.itemsize
        compressed = Term(2 * work.outside_bytes if work.may_reduce_embedding else 0)  # its parts, and what they make
        stage = (*_read(work.outside_bytes), compressed, Term(embedded, computed=True, knobs=BATCH))
        found.append(Stage("the embedding", stage))
    if work.config.budget == "latency":
        found.append(_latency(work))
    if work.profiled_kinds:
        found += _profile(work)
    if work.plan is None:
        return found
    found.append(Stage("the report", (Term(REPORT_BYTES),)))
    if work.may_reduce_embedding:
        found.append(Stage("reducing the embedding", (*_read(work.outside_bytes), *_reduction(work))))
    if work.slices:
        found += _hidden_size(work)
    found.append(_outside(work))
    found += _layers(work)
    return found


def scratch_bytes(work: Work) -> int:
    """Bytes of files that a run keeps in its scratch folder: Grams and directions of the residual stream."""
    if work.hidden is None:
        return 0
    return work.shape.hidden_size**2 * (FLOAT * len(work.hidden.group_of) + DOUBLE * work.hidden.num_groups)


def _read(size: float) -> tuple[Term, ...]:
    """A tensor that is read: its copy, and the pages of the file that it is copied from."""
    return (Term(2 * size),)


def _tensors(work: Work) -> tuple[Term, ...]:
    """The tensors of a layer, and those of the next one while they are read."""
    return (Term(work.layer_bytes), *_read(work.layer_bytes))


def _layer_copy(work: Work, share: float = 1.0) -> Term:
    """A layer in the dtype of the streams; none where it is computed with the tensors that were read."""
    shared = work.device.type == "cpu" and work.dtype.itemsize == work.stored_itemsize
    return Term(0 if shared else share * work.shape.layer_parameters() * work.dtype.itemsize, computed=True)


def _activations(work: Work, width: int, tokens: int | None = None) -> Term:
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


def _statistics(work: Work, size: int, *, residual: bool) -> Term:
    """The Gram of `size` columns and what the dense stream wants beyond."""
    return Term(FLOAT * size * (size + residual * work.shape.hidden_size), computed=True)


def _held_out(work: Work, size: int, *, residual: bool) -> tuple[Term, ...]:
    """Where the ridge is chosen: the statistics of a slice of the text, and those of the rest in the end."""
    if work.config.damping != AUTO or not work.recipe.solves:
        return ()
    return (_statistics(work, size, residual=residual),) * 2


def _sketch(work: Work) -> tuple[Term, ...]:
    """The sketch `S A`."""
    if work.recipe.sketch == "none" or work.recipe.ffn == "none":
        return ()
    rows = work.config.sketch_size or 2 * work.shape.intermediate_size
    return (Term(FLOAT * rows * work.shape.intermediate_size, computed=True, knobs=("--sketch-size",)),)


def _pivoting(work: Work, size: int, kept: int, selector: str) -> Term:
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


def _correction(work: Work, size: int, kept: int, *, residual: bool) -> Term:
    """Working memory of `factorise.correct` beside the Gram: of its solve or of the errors that follow."""
    hidden, rest = work.shape.hidden_size, size - kept
    if not work.recipe.solves:
        return Term(DOUBLE * hidden * (2 * size + kept), computed=True)
    solve = (FLOAT + DOUBLE) * kept * kept + (FLOAT + 3 * DOUBLE) * kept * rest
    step = DOUBLE * kept * kept + DOUBLE * kept * rest + residual * (FLOAT + 3 * DOUBLE) * kept * hidden
    results = DOUBLE * (kept * rest + (1 + residual) * hidden * kept + hidden * size)
    errors = results + DOUBLE * hidden * size * (1 + 2 * residual) + DOUBLE * 1024 * (size + 2 * hidden)
    return Term(max(solve, step, errors), computed=True)


def _up_proj(work: Work, kept: int) -> tuple[Term, ...]:
    """Both factors of the preconditioner, what they are made of, and the steps of conjugate gradients."""
    hidden = work.shape.hidden_size
    factors = (2 * FLOAT + DOUBLE) * kept * kept + (FLOAT + DOUBLE) * hidden * hidden
    return Term(factors, computed=True), Term((6 * FLOAT + 3 * DOUBLE) * kept * hidden, computed=True)


def _reading(source: str) -> Stage:
    """Reading and tokenising a text."""
    size = HUB_TEXT_BYTES
    if source == "builtin":
        size = 0
    elif Path(source).suffix and os.path.isfile(source):
        size = TEXT_FACTOR * os.path.getsize(source)
    return Stage("reading the text", (Term(size, knobs=("--calibration",)),))


def _writing(work: Work) -> Stage:
    """Letting the model write the text."""
    shape, itemsize = work.shape, work.dtype.itemsize
    documents = min(GENERATED_TOGETHER, math.ceil(work.num_tokens / DOCUMENT_TOKENS))
    cache = shape.stack().kv_bytes_per_token(itemsize) * documents * 2 * DOCUMENT_TOKENS
    logits = 4 * FLOAT * documents * shape.vocab_size
    parameters = shape.stack().stored_parameters() * itemsize
    return Stage(
        "letting the model write the text (--calibration self)",
        (
            Term(work.model_bytes, knobs=("--calibration",)),
            Term(parameters, computed=True, knobs=("--calibration",)),
            Term(2 * cache + logits, computed=True),
        ),
    )


def _latency(work: Work) -> Stage:
    """The first layer cut to every size that is timed."""
    shape = work.shape
    sizes = shape.heads_per_group + shape.num_key_value_heads - 1 if work.removable_heads else 1
    one = work.layer_bytes + shape.layer_parameters() * work.dtype.itemsize
    copies = Term((sizes + WIDTHS) * one, knobs=("--budget",))
    batch = _activations(work, shape.intermediate_size, work.config.sequence_length)
    return Stage("measuring the latency of layers (--budget latency)", (*_tensors(work), copies, batch))


def _profile(work: Work) -> list[Stage]:
    """The dense pass that the profile is made in; its probes pile up layer after layer."""
    shape, itemsize, length = work.shape, work.dtype.itemsize, work.config.sequence_length
    size, heads = shape.intermediate_size + shape.mlp_bias, shape.num_attention_heads * shape.head_dim
    states = PROBE_SEQUENCES * length * shape.hidden_size * itemsize
    probes = Term((work.profiled_kinds * shape.num_hidden_layers + 2) * states, computed=True, knobs=LENGTH)
    grams = (_statistics(work, size, residual=False), _statistics(work, heads + shape.output_bias, residual=False))
    layer = (*_tensors(work), _layer_copy(work), *grams, probes)
    batch = _activations(work, shape.intermediate_size)
    curves = Term(3 * DOUBLE * size * size + 2 * DOUBLE * shape.hidden_size * size, computed=True)
    correction = max((_correction(work, size, kept, residual=False) for kept in (size // 2, 3 * size // 4)), key=_bytes)
    logits = (Term(work.outside_bytes), _output_head(work), *_predictions(work), probes)
    return [
        *(_profiled_embedding(work, probes) if work.profiles_embedding else []),
        Stage("the profile's statistics", (*layer, batch)),
        Stage("the profile's error curves", (*layer, max(curves, correction, key=_bytes), _layer_copy(work))),
        Stage("the profile's output divergences", logits),
    ]


def _output_head(work: Work) -> Term:
    """The output head in the dtype of the streams."""
    return Term(work.shape.vocab_size * work.shape.hidden_size * work.dtype.itemsize, computed=True)


def _predictions(work: Work) -> tuple[Term, ...]:
    """Logits of two models for one sequence, a panel of the vocabulary at a time, and its rows of the head."""
    shape, length = work.shape, work.config.sequence_length
    panel = min(VOCABULARY_PANEL, shape.vocab_size)
    logits = Term(FLOAT * length * (4 * panel + 6 * shape.hidden_size), computed=True, knobs=LENGTH)
    return logits, Term(FLOAT * (work.dtype.itemsize != FLOAT) * panel * shape.hidden_size, computed=True)


def _profiled_embedding(work: Work, probes: Term) -> list[Stage]:
    """A reduced embedding on its way through the dense model, while the blocks' `probes` wait; both output heads."""
    shape, length = work.shape, work.config.sequence_length
    head = _output_head(work)
    states = Term(3 * EMBEDDING_PROBES * length * shape.hidden_size * work.dtype.itemsize, computed=True, knobs=LENGTH)
    expanded = Term(work.outside_bytes)
    held = (head, states, expanded, probes)
    walk = (*_tensors(work), _layer_copy(work), _activations(work, shape.intermediate_size, length))
    return [
        Stage("the profile's embedding", (*held, *_read(work.outside_bytes), *_reduction(work))),
        Stage("the embedding's probes", (*held, Term(work.outside_bytes), *walk)),
        Stage("the embedding's divergence", (*held, head, *_predictions(work))),
    ]


def _reduction(work: Work) -> tuple[Term, ...]:
    """Tables and maps of a reduced embedding, at most as large as it; what they are found with."""
    hidden, vocabulary = work.shape.hidden_size, work.shape.vocab_size
    rows = min(PANEL_ROWS, vocabulary)
    return (
        Term(work.outside_bytes),
        Term(3 * DOUBLE * rows * hidden),
        Term(10 * DOUBLE * hidden * hidden + 4 * DOUBLE * vocabulary, computed=True),
    )


def _hidden_size(work: Work) -> list[Stage]:
    """The dense pass for the residual stream's principal directions, and their computation."""
    hidden, square = work.shape.hidden_size, work.shape.hidden_size**2
    rows = Term(3 * FLOAT * work.batch_tokens * hidden, computed=True, knobs=BATCH)
    grams = Term(5 * FLOAT * square, computed=True)
    batch = _activations(work, work.shape.intermediate_size)
    return [
        Stage("the statistics of the hidden size", (*_tensors(work), _layer_copy(work), grams, batch, rows)),
        Stage("the directions of the hidden size", (Term((9 * DOUBLE + FLOAT) * square, computed=True),)),
    ]


def _bases(work: Work) -> Term:
    """Bases of neighbouring groups, and one while it is read."""
    if work.hidden is None:
        return Term(0)
    return Term(DOUBLE * work.shape.hidden_size**2 * (min(4, work.hidden.num_groups) + 2), computed=True)


def _outside(work: Work) -> Stage:
    """The embedding and the head on their way into the result."""
    size, bases = work.outside_bytes, _bases(work)
    if not work.slices and (work.plan is None or work.plan.tier == "stock"):
        return Stage("writing the embedding", (*_read(size), Term(_cast_share(work) * size)))
    panels = Term(
        3 * DOUBLE * min(PANEL_ROWS, work.shape.vocab_size) * work.shape.hidden_size
        + DOUBLE * work.shape.hidden_size**2
    )
    return Stage("folding the embedding and the head", (Term((4 + _cast_share(work)) * size), panels, bases))


def _cast_share(work: Work) -> float:
    """Bytes of what is written by bytes of what was read, where its dtype changes."""
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    return sizes.get(work.config.save_dtype, 0) / work.stored_itemsize


def _layers(work: Work) -> list[Stage]:
    """The layers on their way through the compressor, at the kept width that takes the most."""
    by_width = [_layers_at(work, width) for width in work.kept_widths]
    return [
        max(same, key=lambda stage: sum(term.bytes for term in stage.terms)) for same in zip(*by_width, strict=True)
    ]


def _layers_at(work: Work, kept: int) -> list[Stage]:
    assert work.plan is not None
    shape, hidden, plan = work.shape, work.shape.hidden_size, work.plan
    width = shape.intermediate_size
    size, kept_size = width + shape.mlp_bias, kept + shape.mlp_bias
    heads = shape.num_attention_heads * shape.head_dim + shape.output_bias
    reduces_heads = work.recipe.heads != "none" or plan.value_size is not None
    reshapes = reduces_heads or plan.query_key_size is not None
    corrects_slices = work.slices and work.two_streams
    base = (*_tensors(work), _bases(work))
    if work.slices:
        base = (*base, Term(2 * FLOAT * hidden * (heads + size), computed=True))
    attention_share = 1 - (2 + shape.gated) * width * hidden / shape.layer_parameters()
    if reshapes:
        base = (*base, Term(attention_share * work.layer_bytes, computed=True))
    copies = (_layer_copy(work), _layer_copy(work, 1.0 if reshapes or work.slices else 0.0))
    share = 1 - (1 - kept / width) * (1 - attention_share)
    folded = (Term(share * work.layer_bytes), Term(DOUBLE * hidden * kept, computed=True))
    batch = _activations(work, width)
    wanted = Term(2 * work.batch_tokens * hidden * work.dtype.itemsize, computed=True, knobs=BATCH)
    found = []
    if work.streams_text and (reduces_heads or corrects_slices):
        gram = _statistics(work, heads, residual=corrects_slices)
        chosen = _pivoting(work, heads, heads, work.recipe.heads)
        half = _correction(work, heads, heads // 2, residual=corrects_slices)
        weighted = Term(4 * DOUBLE * heads * heads, computed=True) if work.recipe.heads == "id" else Term(0)
        solved = max(chosen, half, weighted, key=_bytes)
        slices = _held_out(work, heads, residual=corrects_slices)
        found.append(Stage("the factorisation of the heads", (*base, *copies, gram, *slices, batch, solved)))
    if work.streams_text:
        gram = _statistics(work, size, residual=work.two_streams)
        slices = _held_out(work, size, residual=work.two_streams)
        gathered = (*base, *copies, gram, *slices[:1], *_sketch(work), batch)
        found.append(Stage("the statistics of the neurons", gathered))
        solved = max(
            _pivoting(work, width, kept, work.recipe.ffn),
            _correction(work, size, kept_size, residual=work.two_streams),
            key=_bytes,
        )
        terms = (*base, gram, *slices, *_sketch(work), solved, wanted)
        found.append(Stage("the factorisation of the neurons", terms))
        if work.corrects_up:
            both = (_layer_copy(work), _layer_copy(work, share), _activations(work, width), _activations(work, kept))
            again = _statistics(work, kept_size, residual=True), _correction(work, kept_size, kept_size, residual=True)
            found += [
                Stage("the correction of up_proj", (*base, *folded, *both, *_up_proj(work, kept))),
                Stage("the correction of down_proj behind it", (*base, *folded, *both, *again)),
            ]
        moving = (*base, *folded, _layer_copy(work, share), wanted, _activations(work, kept))
        found.append(Stage("moving the streams on", moving))
    elif work.recipe.ffn != "none":
        chosen = _pivoting(work, width, kept, work.recipe.ffn)
        solved = max(chosen, _correction(work, size, kept_size, residual=False), key=_bytes)
        found.append(Stage("choosing neurons", (*base, solved)))
    product = Term(2 * DOUBLE * hidden * (width + hidden), computed=True) if work.slices else Term(0)
    written = 2 if work.slices else 1  # folded layers are float32 before they are cast
    out = Term((2 + written + _cast_share(work)) * share * work.layer_bytes)
    found.append(Stage("writing a layer", (*base, *folded, out, product)))
    return found


def _bytes(term: Term) -> float:
    return term.bytes
