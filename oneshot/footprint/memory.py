"""Bytes that the stages of a run hold at their fullest: the sums of their terms.

Sums are meant to be a little above what is measured and never below it. What torch, BLAS, the tokenizer and the heap
keep for themselves is `SLACK_BYTES` and `HEAP_SHARE` of the rest.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from oneshot.fold import PANEL_ROWS
from oneshot.footprint import terms
from oneshot.footprint.terms import (
    BATCH,
    DOUBLE,
    FLOAT,
    LENGTH,
    Term,
)
from oneshot.footprint.work import Work
from oneshot.layerwise.latency import WIDTHS
from oneshot.layerwise.profiling import EMBEDDING_PROBES, PROBE_SEQUENCES
from oneshot.sampling import DOCUMENT_TOKENS, GENERATED_TOGETHER, SELF

SLACK_BYTES = 128 * 2**20
HEAP_SHARE = 1.08
DEVICE_SLACK_BYTES = 384 * 2**20  # workspaces of cuBLAS and cuSOLVER
REPORT_BYTES = 64 * 2**20  # matplotlib draws a finished run
HUB_TEXT_BYTES = 256 * 2**20  # a shuffle buffer of documents, and pyarrow's
TEXT_FACTOR = 180  # bytes for a byte of a text file that is tokenised as one document


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
        stage = (*terms.read(work.outside_bytes), compressed, Term(embedded, computed=True, knobs=BATCH))
        found.append(Stage("the embedding", stage))
    if work.config.budget == "latency":
        found.append(_latency(work))
    if work.profiled_kinds:
        found += _profile(work)
    if work.plan is None:
        return found
    found.append(Stage("the report", (Term(REPORT_BYTES),)))
    if work.may_reduce_embedding:
        found.append(Stage("reducing the embedding", (*terms.read(work.outside_bytes), *terms.embedding(work))))
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
    batch = terms.activations(work, shape.intermediate_size, work.config.sequence_length)
    return Stage("measuring the latency of layers (--budget latency)", (*terms.layer(work), copies, batch))


def _profile(work: Work) -> list[Stage]:
    """The dense pass that the profile is made in; its probes pile up layer after layer."""
    shape, itemsize, length = work.shape, work.dtype.itemsize, work.config.sequence_length
    size, heads = shape.intermediate_size + shape.mlp_bias, shape.num_attention_heads * shape.head_dim
    states = PROBE_SEQUENCES * length * shape.hidden_size * itemsize
    probes = Term((work.profiled_kinds * shape.num_hidden_layers + 2) * states, computed=True, knobs=LENGTH)
    grams = (terms.gram(work, size, residual=False), terms.gram(work, heads + shape.output_bias, residual=False))
    layer = (*terms.layer(work), terms.layer_copy(work), *grams, probes)
    batch = terms.activations(work, shape.intermediate_size)
    curves = Term(3 * DOUBLE * size * size + 2 * DOUBLE * shape.hidden_size * size, computed=True)
    correction = max(
        (terms.correction(work, size, kept, residual=False) for kept in (size // 2, 3 * size // 4)), key=terms.size_of
    )
    logits = (Term(work.outside_bytes), terms.output_head(work), *terms.predictions(work), probes)
    return [
        *(_profiled_embedding(work, probes) if work.profiles_embedding else []),
        Stage("the profile's statistics", (*layer, batch)),
        Stage(
            "the profile's error curves", (*layer, max(curves, correction, key=terms.size_of), terms.layer_copy(work))
        ),
        Stage("the profile's output divergences", logits),
    ]


def _profiled_embedding(work: Work, probes: Term) -> list[Stage]:
    """A reduced embedding on its way through the dense model, while the blocks' `probes` wait; both output heads."""
    shape, length = work.shape, work.config.sequence_length
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


def _hidden_size(work: Work) -> list[Stage]:
    """The dense pass for the residual stream's principal directions, and their computation."""
    hidden, square = work.shape.hidden_size, work.shape.hidden_size**2
    rows = Term(3 * FLOAT * work.batch_tokens * hidden, computed=True, knobs=BATCH)
    grams = Term(5 * FLOAT * square, computed=True)
    batch = terms.activations(work, work.shape.intermediate_size)
    return [
        Stage("the statistics of the hidden size", (*terms.layer(work), terms.layer_copy(work), grams, batch, rows)),
        Stage("the directions of the hidden size", (Term((9 * DOUBLE + FLOAT) * square, computed=True),)),
    ]


def _outside(work: Work) -> Stage:
    """The embedding and the head on their way into the result."""
    size, bases = work.outside_bytes, terms.bases(work)
    if not work.slices and (work.plan is None or work.plan.tier == "stock"):
        return Stage("writing the embedding", (*terms.read(size), Term(terms.cast_share(work) * size)))
    panels = Term(
        3 * DOUBLE * min(PANEL_ROWS, work.shape.vocab_size) * work.shape.hidden_size
        + DOUBLE * work.shape.hidden_size**2
    )
    return Stage("folding the embedding and the head", (Term((4 + terms.cast_share(work)) * size), panels, bases))


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
    base = (*terms.layer(work), terms.bases(work))
    if work.slices:
        base = (*base, Term(2 * FLOAT * hidden * (heads + size), computed=True))
    attention_share = 1 - (2 + shape.gated) * width * hidden / shape.layer_parameters()
    if reshapes:
        base = (*base, Term(attention_share * work.layer_bytes, computed=True))
    copies = (terms.layer_copy(work), terms.layer_copy(work, 1.0 if reshapes or work.slices else 0.0))
    share = 1 - (1 - kept / width) * (1 - attention_share)
    folded = (Term(share * work.layer_bytes), Term(DOUBLE * hidden * kept, computed=True))
    batch = terms.activations(work, width)
    wanted = Term(2 * work.batch_tokens * hidden * work.dtype.itemsize, computed=True, knobs=BATCH)
    found = []
    if work.streams_text and (reduces_heads or corrects_slices):
        gram = terms.gram(work, heads, residual=corrects_slices)
        chosen = terms.pivoting(work, heads, heads, work.recipe.heads)
        half = terms.correction(work, heads, heads // 2, residual=corrects_slices)
        weighted = Term(4 * DOUBLE * heads * heads, computed=True) if work.recipe.heads == "id" else Term(0)
        solved = max(chosen, half, weighted, key=terms.size_of)
        slices = terms.held_out(work, heads, residual=corrects_slices)
        found.append(Stage("the factorisation of the heads", (*base, *copies, gram, *slices, batch, solved)))
    if work.streams_text:
        gram = terms.gram(work, size, residual=work.two_streams)
        slices = terms.held_out(work, size, residual=work.two_streams)
        gathered = (*base, *copies, gram, *slices[:1], *terms.sketch(work), batch)
        found.append(Stage("the statistics of the neurons", gathered))
        solved = max(
            terms.pivoting(work, width, kept, work.recipe.ffn),
            terms.correction(work, size, kept_size, residual=work.two_streams),
            key=terms.size_of,
        )
        held = (*base, gram, *slices, *terms.sketch(work), solved, wanted)
        found.append(Stage("the factorisation of the neurons", held))
        if work.corrects_up:
            both = (
                terms.layer_copy(work),
                terms.layer_copy(work, share),
                terms.activations(work, width),
                terms.activations(work, kept),
            )
            again = (
                terms.gram(work, kept_size, residual=True),
                terms.correction(work, kept_size, kept_size, residual=True),
            )
            found += [
                Stage("the correction of up_proj", (*base, *folded, *both, *terms.up_proj(work, kept))),
                Stage("the correction of down_proj behind it", (*base, *folded, *both, *again)),
            ]
        moving = (*base, *folded, terms.layer_copy(work, share), wanted, terms.activations(work, kept))
        found.append(Stage("moving the streams on", moving))
    elif work.recipe.ffn != "none":
        chosen = terms.pivoting(work, width, kept, work.recipe.ffn)
        solved = max(chosen, terms.correction(work, size, kept_size, residual=False), key=terms.size_of)
        found.append(Stage("choosing neurons", (*base, solved)))
    product = Term(2 * DOUBLE * hidden * (width + hidden), computed=True) if work.slices else Term(0)
    written = 2 if work.slices else 1  # folded layers are float32 before they are cast
    out = Term((2 + written + terms.cast_share(work)) * share * work.layer_bytes)
    found.append(Stage("writing a layer", (*base, *folded, out, product)))
    return found
