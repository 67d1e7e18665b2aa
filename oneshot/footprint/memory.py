"""Peak bytes of the stages of a run: sums of terms.

The sums should be a little above the measured peaks and never below. `SLACK_BYTES`, and `HEAP_SHARE` of the rest, stand
for what torch, BLAS, the tokenizer and the heap keep.
"""

import math
import os
from dataclasses import replace

from oneshot.compression.fold import PANEL_ROWS
from oneshot.export.result_sensitivity import SENSITIVITY_TOKENS
from oneshot.footprint import terms
from oneshot.footprint.layer_memory import layer_stages
from oneshot.footprint.profile_memory import curvature_stages, profile_stages
from oneshot.footprint.terms import BATCH, DOUBLE, FLOAT, Stage, Term, computed, largest
from oneshot.footprint.work import Work
from oneshot.profiling import IMPORTANCE_TOKENS
from oneshot.profiling.latency import RANKS, WIDTHS
from oneshot.text import PIECE_BYTES, RECORDS, TABLES, ending_of, file_of, size_of_records
from oneshot.text.languages import LONGEST_PASSAGE
from oneshot.text.self_written import DOCUMENT_TOKENS, SELF, document_bytes, passage_bytes

SLACK_BYTES = 128 * 2**20
HEAP_SHARE = 1.08
# with SLACK_BYTES alone a run on an H100 took 0.5 GB more: libraries and kernels load meanwhile
CUDA_SLACK_BYTES = 768 * 2**20
DEVICE_SLACK_BYTES = 384 * 2**20  # workspaces of cuBLAS and cuSOLVER
REPORT_BYTES = 16 * 2**20  # jinja2 and the page
LOADED_BYTES = 10 * 10**9  # two files of the usual size
HUB_TEXT_BYTES = 256 * 2**20  # a shuffle buffer of documents, and pyarrow's
VOCABULARY_BYTES = 6000  # a token of the tokenizer, while a GGUF file is written
TEXT_FACTOR = 180  # bytes for a byte of a document that is tokenised at once, such as a text file
RECORD_BYTES = 400  # of a record beside its text, which takes up to four bytes a letter and its line
RECORD_FACTOR = 5


def stages(work: Work) -> list[Stage]:
    """Return the stages of a run, without the activation stores."""
    return stages_outside_layers(work) + stages_of_layers(work)


def stages_of_layers(work: Work) -> list[Stage]:
    """Return the stages that profile and compress the layers, which groups of experts change."""
    return (profile_stages(work) if work.schedule.makes_profile else []) + layer_stages(work)


def stages_outside_layers(work: Work) -> list[Stage]:
    """Return the other stages; it reads how large the texts are."""
    listed = [Stage("the libraries", ())]
    if work.source_tokens:
        for source in work.source_tokens:
            listed += _writing(work) if source == SELF else [_reading(source)]
        embedded = 3 * work.batch_tokens * work.shape.hidden_size * work.dtype.itemsize
        # its tables and maps, and their product
        reduced = Term(2 * work.outside_bytes if work.schedule.may_rank_tables else 0)
        stage = (*terms.read(work.outside_bytes), reduced, computed(embedded, BATCH))
        listed.append(Stage("the embedding", stage))
    if work.measures_latency:
        listed.append(_latency(work))
    if work.schedule.measures_curvature:
        listed += curvature_stages(work)
    if work.schedule.measures_importance:
        listed += _importance(work)
    if work.plan is None:
        return listed
    listed.append(Stage("the report", (Term(REPORT_BYTES),)))
    if work.grid.writes_vocabulary:
        vocabulary = Term(VOCABULARY_BYTES * work.shape.vocab_size)
        listed.append(Stage("writing the GGUF file", (vocabulary, *terms.read(work.outside_bytes))))
    if work.schedule.may_rank_tables:
        listed.append(Stage("reducing the embedding", (*terms.read(work.outside_bytes), *terms.embedding(work))))
    if work.schedule.finds_subspaces:
        listed += _hidden_size(work)
    listed.append(_outside(work))
    return listed


def _reading(source: str) -> Stage:
    """Return the stage that reads and tokenises a text."""
    size, (path, _) = HUB_TEXT_BYTES, file_of(source)
    if source == "builtin":
        size = 0
    elif ending_of(path.name) in RECORDS and os.path.isfile(path):
        number, longest, total = size_of_records(path)
        size = RECORD_BYTES * number + RECORD_FACTOR * total + TEXT_FACTOR * min(longest, PIECE_BYTES)
    elif ending_of(path.name) in TABLES and os.path.isfile(path):
        size = TEXT_FACTOR * path.stat().st_size
    elif os.path.isfile(path):
        size = TEXT_FACTOR * min(path.stat().st_size, PIECE_BYTES)
    return Stage("reading the text", (Term(size, knobs=("--calibration",)),), has_states=False)


def _writing(work: Work) -> list[Stage]:
    """Return the stages that load the model and let it write text."""
    shape, itemsize, knobs = work.shape, work.dtype.itemsize, ("--calibration",)
    documents = min(work.documents_together, math.ceil(work.num_tokens / DOCUMENT_TOKENS))
    passage = passage_bytes(shape, work.dtype) + terms.activations(work, shape.intermediate_size, LONGEST_PASSAGE).bytes
    written = max(documents * document_bytes(shape, work.dtype), passage)
    parameters = shape.stack().stored_parameters() * itemsize
    # on the host the mapped file is the model unless its dtype changes
    is_mapped = work.device.type == "cpu" and itemsize == work.stored_itemsize
    # a device takes tensor by tensor, and pages of a mapped file are the system's to take back
    loaded = Term(min(work.model_bytes, LOADED_BYTES) if work.on_cuda else work.model_bytes, knobs=knobs)
    copied = computed(0 if is_mapped else parameters, knobs)
    model = loaded if is_mapped else copied
    return [
        Stage("loading the model to write text (--calibration self)", (loaded, copied), has_states=False),
        Stage("letting the model write the text (--calibration self)", (model, computed(written)), has_states=False),
    ]


def _latency(work: Work) -> Stage:
    """Return the stage that times a layer, cut to several sizes, and one with each carried mixer."""
    shape = work.shape
    sizes = (
        shape.heads_per_group + shape.num_key_value_heads - 1 if work.grid.family.reason_against("heads") is None else 1
    )
    sizes += len(shape.carried)
    one = work.layer_bytes + shape.layer_parameters() * work.dtype.itemsize
    ranked = 2 * RANKS * (shape.intermediate_size + shape.hidden_size) * shape.hidden_size * work.dtype.itemsize
    copies = Term((sizes + WIDTHS) * one + ranked, knobs=("--budget",))
    batch = terms.activations(work, shape.intermediate_size, work.text.sequence_length)
    return Stage("measuring the latency of layers (--budget latency)", (*terms.layer(work), copies, batch))


def _importance(work: Work) -> list[Stage]:
    """Return the stages of the importance matrix; a result's layers and embedding are read in float32."""
    shape, itemsize = work.shape, work.dtype.itemsize
    one = shape.hidden_size * itemsize * work.text.sequence_length
    sequences = work.text.num_sequences
    if work.plan is not None:
        sequences = min(math.ceil(IMPORTANCE_TOKENS / work.text.sequence_length), sequences)
    batch, inputs = terms.activations(work, shape.intermediate_size), 2 * FLOAT * work.batch_tokens
    squares = computed(inputs * max(shape.intermediate_size, shape.hidden_size), BATCH)
    restored = 0 if work.plan is None else FLOAT * shape.layer_parameters()
    table = 0 if work.plan is None else 2 * FLOAT * shape.vocab_size * shape.hidden_size
    layer = (*terms.layer(work), terms.layer_copy(work), Term(2 * restored), batch, squares)
    listed = [Stage("the importance matrix", layer), Stage("the embedding of the importance matrix", (Term(table),))]
    listed = [replace(stage, own_stores=((one + shape.lent) * sequences,)) for stage in listed]
    if work.schedule.chooses_types:
        number = one * min(math.ceil(SENSITIVITY_TOKENS / work.text.sequence_length), work.text.num_sequences)
        graph = computed(2 * batch.bytes, BATCH)
        of_head = computed((DOUBLE + 2 * FLOAT) * shape.hidden_size**2)
        stores = (number,) * (shape.num_hidden_layers + 1)
        listed.append(Stage("the sensitivity of tensors", (*layer, graph, of_head, Term(table)), own_stores=stores))
        sizes = (
            shape.hidden_size,
            shape.hidden_size,
            shape.num_attention_heads * shape.head_dim,
            shape.intermediate_size,
        )
        all_numbers, most = sum(size**2 for size in sizes), max(sizes) ** 2
        # sums and what they are finished into; then a factor: shrunk, twice in float64, and as it is used
        grams = largest(
            computed((DOUBLE + FLOAT) * all_numbers), computed(FLOAT * all_numbers + (2 * FLOAT + 2 * DOUBLE) * most)
        )
        states = ((one + shape.lent) * sequences,)
        listed.append(Stage("rounding the tensors of layers", (*layer, grams, Term(2 * restored)), own_stores=states))
        listed.append(Stage("rounding the embedding", (Term(2 * table),), own_stores=states))
    return listed


def _hidden_size(work: Work) -> list[Stage]:
    """Return the stages that find the residual stream's principal directions."""
    hidden, square = work.shape.hidden_size, work.shape.hidden_size**2
    rows = computed(3 * FLOAT * work.batch_tokens * hidden, BATCH)
    grams = computed((DOUBLE + 4 * FLOAT) * square)
    batch = terms.activations(work, work.shape.intermediate_size)
    return [
        Stage("the statistics of the hidden size", (*terms.layer(work), terms.layer_copy(work), grams, batch, rows)),
        Stage("the directions of the hidden size", (computed((9 * DOUBLE + FLOAT) * square),)),
    ]


def _outside(work: Work) -> Stage:
    """Return the stage that writes the embedding and the head."""
    size, bases = work.outside_bytes, terms.bases(work)
    if not work.schedule.finds_subspaces and not work.grid.replaces_layer_norms:
        cast = terms.cast_share(work)
        table = (1 + cast) * work.token_table_bytes  # mapped
        return Stage("writing the embedding", (Term(max((2 + cast) * size, size + table)),))
    panels = computed(
        3 * DOUBLE * min(PANEL_ROWS, work.shape.vocab_size) * work.shape.hidden_size
        + DOUBLE * work.shape.hidden_size**2
    )
    return Stage("folding the embedding and the head", (Term((4 + terms.cast_share(work)) * size), panels, bases))
