"""What the check of a finished result takes (`api.check`), which holds the original and then the result."""

import math
from dataclasses import replace

import torch

from oneshot.checkpoint import GgufCheckpoint
from oneshot.export.saving import SAVED_DTYPES
from oneshot.footprint import terms
from oneshot.footprint.rates import Rates
from oneshot.footprint.seconds import STEP_FACTOR, STEP_SECONDS, operations_of_token
from oneshot.footprint.terms import FLOAT, LENGTH, Stage, Term, computed
from oneshot.footprint.work import Work
from oneshot.text import NUM_KINDS, NUM_LANGUAGES, PASSAGE_TOKENS, TOKENS_OF_A_KIND
from oneshot.text.languages import LONGEST_PASSAGE
from oneshot.text.self_written import passage_bytes

LONGEST_WINDOW = 512  # tokens of held-out text that pass a model together
MOST_WINDOWS = 4
CHECKED_SHARE = 16  # the text of a run has at least so many times the tokens of its check
ANSWER_TOKENS = 60
CHECK_START_SECONDS = 2.0  # the text is read again
LOGITS = 2  # float32 copies of a window's logits


def num_windows(num_sequences: int) -> int:
    """Return how many windows of held-out text the check of a run with so many sequences reads at most."""
    return max(1, min(MOST_WINDOWS, num_sequences // CHECKED_SHARE))


def check_stages(work: Work, gguf: GgufCheckpoint | None, result_bytes: int) -> list[Stage]:
    """Return the stages of the check; none for models that do not write text.

    Args:
        gguf: the file that the original is in. result_bytes: bytes of the result's weights.
    """
    shape, family, plan = work.shape, work.grid.family, work.plan
    if plan is None or not shape.causal or not shape.has_head or family.decoder is not None:
        return []
    saved = work.dtype if work.save_dtype == "keep" else SAVED_DTYPES.get(work.save_dtype)
    keeps_dtype = work.save_dtype == "keep" and not work.same_dtype
    window = min(work.text.sequence_length, LONGEST_WINDOW)
    narrower = work.device.type == "cpu" and (plan.reduces_values or plan.reduces_queries_keys)
    one = replace(
        work,
        text=replace(work.text, num_sequences=1, sequence_length=window),
        holds_scores=work.holds_scores or narrower or work.method.plans_inner_sizes,
    )
    logits = shape.vocab_size * window * (work.dtype.itemsize + LOGITS * FLOAT)
    passed = (
        terms.activations(one, shape.intermediate_size, max(window, LONGEST_PASSAGE)),
        computed(max(logits, passage_bytes(shape, work.dtype)), LENGTH),
    )

    def of_model(name: str, parameters: int, read: float, *, is_mapped: bool) -> list[Stage]:
        # pages of the files count as read, and are the model itself if it is mapped
        copied = parameters * work.dtype.itemsize
        on_device = computed(work.on_cuda * copied)
        loaded = (Term(read), Term(0 if is_mapped else copied), on_device)
        held = (Term(0 if work.on_cuda else read if is_mapped else copied), on_device)
        return [
            Stage(f"loading the {name} for the check", loaded, has_states=False),
            Stage(f"the check of the {name}", (*held, *passed), has_states=False),
        ]

    original_bytes = float(work.model_bytes)
    if gguf is not None:  # the pages of the file, and what one tensor takes while it is dequantised
        largest = max(map(math.prod, gguf.shapes.values()))
        original_bytes = gguf.file_bytes + terms.DEQUANTISED * torch.float32.itemsize * largest
    same = work.same_dtype and shape.experts is None  # files hold experts one by one, and the class together
    parameters = shape.stack().stored_parameters()
    original = of_model("original", parameters, original_bytes, is_mapped=same and gguf is None)
    is_mapped = saved == work.dtype and not keeps_dtype and shape.experts is None
    result = of_model("result", work.grid.stack(plan).stored_parameters(), result_bytes, is_mapped=is_mapped)
    return [*original, *result]


def check_seconds(work: Work, rates: Rates) -> float:
    """Return the seconds of the check of a result, in which two models score windows and answer a question."""
    forward, layers = operations_of_token(work, rates), work.shape.num_hidden_layers
    head = work.head_operations
    scored = num_windows(work.text.num_sequences) * min(work.text.sequence_length, LONGEST_WINDOW)
    scored += NUM_KINDS * TOKENS_OF_A_KIND + NUM_LANGUAGES * PASSAGE_TOKENS
    answered = ANSWER_TOKENS * (STEP_SECONDS * layers if rates.on_device else 0.0)
    if not rates.on_device:  # each token reads all weights
        answered = ANSWER_TOKENS * STEP_FACTOR * (layers * forward + head) / rates.stream
    return CHECK_START_SECONDS + 2 * (scored * (layers * forward + head) / rates.stream + answered)
