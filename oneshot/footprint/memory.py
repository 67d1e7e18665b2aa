"""Peak bytes of the stages of a run: sums of terms.

The sums should be a little above the measured peaks and never below. `SLACK_BYTES`, and `HEAP_SHARE` of the rest, stand
for what torch, BLAS, the tokenizer and the heap keep.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from oneshot.compression.fold import PANEL_ROWS
from oneshot.footprint import terms
from oneshot.footprint.terms import (
    BATCH,
    DOUBLE,
    FLOAT,
    LENGTH,
    Term,
)
from oneshot.footprint.work import Work
from oneshot.profiling.embedding import EMBEDDING_PROBES
from oneshot.profiling.latency import WIDTHS
from oneshot.profiling.probes import PROBE_SEQUENCES, probes_per_layer
from oneshot.text import size_of_records
from oneshot.text.self_written import DOCUMENT_TOKENS, SELF, document_bytes

SLACK_BYTES = 128 * 2**20
HEAP_SHARE = 1.08
DEVICE_SLACK_BYTES = 384 * 2**20  # workspaces of cuBLAS and cuSOLVER
REPORT_BYTES = 64 * 2**20  # matplotlib draws a finished run
LOADED_BYTES = 10 * 10**9  # two files of the usual size
HUB_TEXT_BYTES = 256 * 2**20  # a shuffle buffer of documents, and pyarrow's
VOCABULARY_BYTES = 6000  # a token of the tokenizer, while a GGUF file is written
TEXT_FACTOR = 180  # bytes for a byte of a document that is tokenised at once, such as a text file
RECORD_BYTES = 400  # of a record beside its text, which takes up to four bytes a letter and its line
RECORD_FACTOR = 5


@dataclass(frozen=True)
class Stage:
    """The memory at the peak of a stage. `has_states`: whether hidden states may be stored meanwhile."""

    name: str
    terms: tuple[Term, ...]
    has_states: bool = True

    def total(self, *, computed: bool) -> float:
        """Return the bytes on the compute device (`computed`), or of what is always on the host."""
        return sum(term.bytes for term in self.terms if term.computed == computed)

    def knobs(self) -> tuple[str, ...]:
        """Return the options that would lower this stage by a tenth or more, the most helpful first."""
        total = sum(term.bytes for term in self.terms)
        helpful = sorted((term for term in self.terms if term.knobs), key=lambda term: -term.bytes)
        return tuple(dict.fromkeys(knob for term in helpful if term.bytes > total / 10 for knob in term.knobs))


def stages(work: Work) -> list[Stage]:
    """Return the stages of a run, without the activation stores."""
    listed = [Stage("the libraries", ())]
    if work.source_tokens:
        for source in work.source_tokens:
            listed += _writing(work) if source == SELF else [_reading(source)]
        embedded = 3 * work.batch_tokens * work.shape.hidden_size * work.dtype.itemsize
        reduced = Term(
            2 * work.outside_bytes if work.schedule.may_rank_embedding else 0
        )  # its tables and maps, and their product
        stage = (*terms.read(work.outside_bytes), reduced, Term(embedded, computed=True, knobs=BATCH))
        listed.append(Stage("the embedding", stage))
    if work.measures_latency:
        listed.append(_latency(work))
    if work.schedule.makes_profile:
        listed += _profile(work)
    if work.plan is None:
        return listed
    listed.append(Stage("the report", (Term(REPORT_BYTES),)))
    if work.grid.writes_vocabulary:
        vocabulary = Term(VOCABULARY_BYTES * work.shape.vocab_size)
        listed.append(Stage("writing the GGUF file", (vocabulary, *terms.read(work.outside_bytes))))
    if work.schedule.may_rank_embedding:
        listed.append(Stage("reducing the embedding", (*terms.read(work.outside_bytes), *terms.embedding(work))))
    if work.schedule.finds_subspaces:
        listed += _hidden_size(work)
    listed.append(_outside(work))
    listed += _layers(work)
    return listed


def scratch_bytes(work: Work) -> int:
    """Return the bytes of scratch files: Grams and directions of the residual stream."""
    if work.hidden is None:
        return 0
    return work.shape.hidden_size**2 * (FLOAT * len(work.hidden.group_of) + DOUBLE * work.hidden.num_groups)


def _reading(source: str) -> Stage:
    """Return the stage that reads and tokenises a text."""
    size = HUB_TEXT_BYTES
    if source == "builtin":
        size = 0
    elif Path(source).suffix in (".jsonl", ".json") and os.path.isfile(source):
        number, longest = size_of_records(Path(source))
        size = RECORD_BYTES * number + RECORD_FACTOR * os.path.getsize(source) + TEXT_FACTOR * longest
    elif Path(source).suffix and os.path.isfile(source):
        size = TEXT_FACTOR * os.path.getsize(source)
    return Stage("reading the text", (Term(size, knobs=("--calibration",)),), has_states=False)


def _writing(work: Work) -> list[Stage]:
    """Return the stages that load the model and let it write text."""
    shape, itemsize, knobs = work.shape, work.dtype.itemsize, ("--calibration",)
    documents = min(work.documents_together, math.ceil(work.num_tokens / DOCUMENT_TOKENS))
    parameters = shape.stack().stored_parameters() * itemsize
    # on the host the mapped file is the model unless its dtype changes
    is_mapped = work.device.type == "cpu" and itemsize == work.stored_itemsize
    # a device takes tensor by tensor, and pages of a mapped file are the system's to take back
    loaded = Term(min(work.model_bytes, LOADED_BYTES) if work.on_cuda else work.model_bytes, knobs=knobs)
    copied = Term(0 if is_mapped else parameters, computed=True, knobs=knobs)
    model = loaded if is_mapped else copied
    return [
        Stage("loading the model to write text (--calibration self)", (loaded, copied), has_states=False),
        Stage(
            "letting the model write the text (--calibration self)",
            (model, Term(documents * document_bytes(shape, work.dtype), computed=True)),
            has_states=False,
        ),
    ]


def _latency(work: Work) -> Stage:
    """Return the stage that times the first layer, cut to several sizes."""
    shape = work.shape
    sizes = (
        shape.heads_per_group + shape.num_key_value_heads - 1 if work.grid.family.reason_against("heads") is None else 1
    )
    one = work.layer_bytes + shape.layer_parameters() * work.dtype.itemsize
    copies = Term((sizes + WIDTHS) * one, knobs=("--set budget=",))
    batch = terms.activations(work, shape.intermediate_size, work.text.sequence_length)
    return Stage("measuring the latency of layers (--set budget=latency)", (*terms.layer(work), copies, batch))


def _profile(work: Work) -> list[Stage]:
    """Return the stages of the profile's dense pass; each layer adds probes."""
    shape, itemsize, length = work.shape, work.dtype.itemsize, work.text.sequence_length
    size, heads = shape.intermediate_size + shape.mlp_bias, shape.num_attention_heads * shape.head_dim
    states = PROBE_SEQUENCES * length * shape.hidden_size * itemsize
    probes = Term(
        (probes_per_layer(work.schedule.profiled_kinds) * shape.num_hidden_layers + 2) * states,
        computed=True,
        knobs=LENGTH,
    )
    grams = (terms.gram(work, size, residual=False), terms.gram(work, heads + shape.output_bias, residual=False))
    counted = (
        *terms.sums(work, size, residual=False),
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
    curves = Term(max((FLOAT + DOUBLE) * size * size, DOUBLE * size * size + weights), computed=True)
    reduced = Term(work.on_cuda * work.layer_bytes, computed=True)
    if linears:
        curves = max(curves, terms.directions(work), key=terms.size_of)
    correction = max(
        (terms.correction(work, size, kept, residual=False) for kept in (size // 2, 3 * size // 4)), key=terms.size_of
    )
    logits = (Term(work.outside_bytes), terms.output_head(work), *terms.predictions(work), probes)
    if work.grid.family.head is None:  # last states are compared, without a head
        logits = (Term(3 * FLOAT * length * shape.hidden_size, computed=True, knobs=LENGTH), probes)
    return [
        *(
            _profiled_embedding(work, probes)
            if (work.schedule.makes_profile and work.schedule.profiles_embedding)
            else []
        ),
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


def _hidden_size(work: Work) -> list[Stage]:
    """Return the stages that find the residual stream's principal directions."""
    hidden, square = work.shape.hidden_size, work.shape.hidden_size**2
    rows = Term(3 * FLOAT * work.batch_tokens * hidden, computed=True, knobs=BATCH)
    grams = Term((DOUBLE + 4 * FLOAT) * square, computed=True)
    batch = terms.activations(work, work.shape.intermediate_size)
    return [
        Stage("the statistics of the hidden size", (*terms.layer(work), terms.layer_copy(work), grams, batch, rows)),
        Stage("the directions of the hidden size", (Term((9 * DOUBLE + FLOAT) * square, computed=True),)),
    ]


def _outside(work: Work) -> Stage:
    """Return the stage that writes the embedding and the head."""
    size, bases = work.outside_bytes, terms.bases(work)
    if not work.schedule.finds_subspaces and not work.grid.replaces_layer_norms:
        return Stage("writing the embedding", (*terms.read(size), Term(terms.cast_share(work) * size)))
    panels = Term(
        3 * DOUBLE * min(PANEL_ROWS, work.shape.vocab_size) * work.shape.hidden_size
        + DOUBLE * work.shape.hidden_size**2,
        computed=True,
    )
    return Stage("folding the embedding and the head", (Term((4 + terms.cast_share(work)) * size), panels, bases))


def _layers(work: Work) -> list[Stage]:
    """Return the stages of a layer, each at the kept width that takes the most."""
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
    inner = plan.reduces_values or plan.reduces_queries_keys or work.method.plans_inner_sizes
    reshapes = work.method.reduces_heads or inner or work.method.plans_ranks
    corrects_slices = work.schedule.finds_subspaces and work.schedule.two_streams
    follows = corrects_slices or (work.method.heads_correction == "two-stream" and work.schedule.two_streams)
    base = (*terms.layer(work), terms.bases(work))
    if work.schedule.finds_subspaces:
        base = (*base, Term(2 * FLOAT * hidden * (heads + size), computed=True))
    attention_share = 1 - (2 + shape.gated) * width * hidden / shape.layer_parameters()
    if reshapes:
        base = (*base, Term(attention_share * work.layer_bytes, computed=True))
    copies = (terms.layer_copy(work), terms.layer_copy(work, 1.0 if reshapes or work.schedule.finds_subspaces else 0.0))
    share = 1 - (1 - kept / width) * (1 - attention_share)
    folded = (Term(share * work.layer_bytes, computed=True), Term(DOUBLE * hidden * kept, computed=True))
    batch = terms.activations(work, width)
    target = Term(2 * work.batch_tokens * hidden * work.dtype.itemsize, computed=True, knobs=BATCH)
    listed = []
    if work.method.plans_ranks:
        read = [term for count in (hidden, heads) for term in terms.sums(work, count, residual=False)]
        found = (terms.gram(work, hidden, residual=False), terms.gram(work, heads, residual=False))
        listed.append(Stage("the statistics of the ranks", (*base, *copies, *read, batch)))
        listed.append(Stage("the linears of low rank", (*base, *copies, *found, terms.directions(work))))
    if work.schedule.streams and work.schedule.solves_heads:
        gram = terms.gram(work, heads, residual=follows)
        chosen = terms.pivoting(work, heads, heads, work.method.heads)
        half = terms.correction(work, heads, heads // 2, residual=follows)
        weighted = Term(4 * DOUBLE * heads * heads, computed=True) if work.method.heads == "id" else Term(0)
        solved = max(chosen, half, weighted, key=terms.size_of)
        slices = terms.held_out(work, heads, residual=follows)
        counted = (
            *terms.sums(work, heads, residual=follows),
            *terms.held_out_sums(work, heads, residual=follows),
        )
        listed.append(Stage("the statistics of the heads", (*base, *copies, *counted, batch)))
        listed.append(Stage("the factorisation of the heads", (*base, *copies, gram, *slices, batch, solved)))
    if work.schedule.streams:
        gram = terms.gram(work, size, residual=work.schedule.two_streams)
        slices = terms.held_out(work, size, residual=work.schedule.two_streams)
        counted = (
            *terms.sums(work, size, residual=work.schedule.two_streams),
            *terms.held_out_sums(work, size, residual=work.schedule.two_streams),
        )
        listed.append(
            Stage("the statistics of the neurons", (*base, *copies, *counted, *terms.sketch_sums(work), batch))
        )
        if work.schedule.two_streams:
            finished = Term(4 * FLOAT * hidden * size, computed=True)
            gathered = (*base, *copies, gram, *slices, *terms.sketch_sums(work))
            listed.append(Stage("the residual of the neurons", (*gathered, target, finished)))
        solved = max(
            terms.pivoting(work, width, kept, work.method.ffn),
            terms.correction(work, size, kept_size, residual=work.schedule.two_streams),
            key=terms.size_of,
        )
        held = (*base, gram, *slices, *terms.sketch(work), solved, target)
        listed.append(Stage("the factorisation of the neurons", held))
        if work.schedule.corrects_up:
            both = (
                terms.layer_copy(work),
                terms.layer_copy(work, share),
                terms.activations(work, width),
                terms.activations(work, kept),
            )
            counted = terms.sums(work, kept_size, residual=True)
            again = (
                terms.gram(work, kept_size, residual=True),
                terms.correction(work, kept_size, kept_size, residual=True),
            )
            listed += [
                Stage("the correction of up_proj", (*base, *folded, *both, *terms.up_proj(work, kept))),
                Stage("the statistics of down_proj behind it", (*base, *folded, *both, *counted)),
                Stage("the correction of down_proj behind it", (*base, *folded, *both, *again)),
            ]
        moving = (*base, *folded, terms.layer_copy(work, share), target, terms.activations(work, kept))
        listed.append(Stage("moving the streams on", moving))
    elif work.method.reduces_ffn:
        chosen = terms.pivoting(work, width, kept, work.method.ffn)
        solved = max(chosen, terms.correction(work, size, kept_size, residual=False), key=terms.size_of)
        listed.append(Stage("choosing neurons", (*base, solved)))
    product = Term(2 * DOUBLE * hidden * (width + hidden), computed=True) if work.schedule.finds_subspaces else Term(0)
    written = 2 if work.schedule.finds_subspaces else 1  # folded layers are float32 before they are cast
    out = Term((2 + written + terms.cast_share(work)) * share * work.layer_bytes)
    listed.append(Stage("writing a layer", (*base, *folded, out, product)))
    return listed
