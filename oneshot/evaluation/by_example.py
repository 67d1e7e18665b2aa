"""Evaluation on examples, of encoders and encoder–decoders; one model is in memory at a time."""

from collections.abc import Sequence
from typing import Any

import torch

from oneshot.architecture import StackShape
from oneshot.checkpoint import Checkpoint
from oneshot.config import EvaluationOptions
from oneshot.errors import CalibrationError, ConfigError
from oneshot.evaluation.comparison import Evaluation, TextRecord
from oneshot.evaluation.examples import Examples, Reading
from oneshot.evaluation.kinds import EXAMPLES, Kind, load_as
from oneshot.evaluation.models import refuse_other_tokenizers, sizes_of
from oneshot.export import stated_shape
from oneshot.families import FAMILIES
from oneshot.text import load_tokenizer, token_hash

EXAMPLES_TOGETHER = 8  # unless a batch size is given


def evaluate_examples(
    names: Sequence[str],
    checkpoints: Sequence[Checkpoint],
    sources: Sequence[str],
    kind: Kind,
    asked: EvaluationOptions,
    with_baseline: bool,
    *,
    device: torch.device,
    dtype: torch.dtype | str,
) -> list[Evaluation]:
    """Evaluate checkpoints on the same examples, in order; with a baseline, it is the last one.

    The baseline runs first. Its predictions are kept, and the model is freed before the next is loaded.

    Args:
        names: labels of the checkpoints. sources: files or data sets with examples, as in `read_rows`.
        asked: its sequence length is an example's longest, if the models and their tokenizer can take so many, and its
            windows are examples of a source.

    Raises `CheckpointError`, `CalibrationError` and `ConfigError`.
    """
    for name, checkpoint in zip(names, checkpoints, strict=True):
        reason = EXAMPLES[kind].reason_against(checkpoint.config)
        if sources and reason is not None:
            raise ConfigError(f"{name} {reason}")
        reason = EXAMPLES[kind].reason_against_comparing(checkpoints[0].config, checkpoint.config)
        if sources and reason is not None:
            raise ConfigError(f"{names[0]} and {name} {reason}")
    first = checkpoints[0]
    tokenizer = load_tokenizer(first.folder)
    longest = _longest(checkpoints, tokenizer, asked.sequence_length)
    reading = Reading(tokenizer, longest, asked.max_windows, first.config, first.folder)
    examples = {source: EXAMPLES[kind].read(source, reading) for source in sources}
    tokens = (token for read in examples.values() for token in read.known)
    refuse_other_tokenizers(names, checkpoints, tokenizer, tokens)
    hashes = {source: token_hash(torch.tensor(read.tokens, dtype=torch.int64)) for source, read in examples.items()}
    records = {name: TextRecord(read.count, len(read.tokens), hashes[name]) for name, read in examples.items()}
    measures: dict[int, dict[str, dict[str, float]]] = {}
    dense: dict[str, Any] = dict.fromkeys(sources)
    last, batch_size = len(checkpoints) - 1, asked.batch_size or EXAMPLES_TOGETHER
    for place in [last, *range(last)] if with_baseline else range(len(checkpoints)):
        predictions = _predictions(checkpoints[place], examples, kind, batch_size, device, dtype)
        beside = dict.fromkeys(sources) if place == last and with_baseline else dense
        measures[place] = {
            source: read.numbers(predictions[source], beside[source]) for source, read in examples.items()
        }
        if place == last and with_baseline:
            dense = predictions
    return [
        _evaluation(name, checkpoint, measures[place], records)
        for place, (name, checkpoint) in enumerate(zip(names, checkpoints, strict=True))
    ]


@torch.inference_mode()
def _predictions(
    checkpoint: Checkpoint,
    examples: dict[str, Examples],
    kind: Kind,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype | str,
) -> dict[str, Any]:
    """Return what a model predicts for every source; the model is freed."""
    if not examples:
        return {}
    model = load_as(kind, checkpoint.folder, checkpoint.config, device, dtype)
    rows = model.get_input_embeddings().num_embeddings
    for source, read in examples.items():
        if max(read.known) >= rows:
            raise CalibrationError(
                f"The tokenizer gives tokens of {source} that {checkpoint.folder} has no embedding for; give models "
                "with one tokenizer, the one that belongs to them."
            )
    return {source: read.predict(model, batch_size) for source, read in examples.items()}


def _longest(checkpoints: Sequence[Checkpoint], tokenizer: Any, longest: int) -> int:
    """Return the tokens that an example may have: what is asked for, the tokenizer's limit, or the positions."""
    stated = [checkpoint.config.get("max_position_embeddings") for checkpoint in checkpoints]
    learned = [_sizes(checkpoint)[1] for checkpoint in checkpoints]  # RoBERTa's config also states rows that are unused
    limits = [limit for limit in (*stated, *learned) if isinstance(limit, int) and limit > 0]
    return min(longest, tokenizer.model_max_length, *limits)


def _evaluation(
    name: str, checkpoint: Checkpoint, measures: dict[str, dict[str, float]], records: dict[str, TextRecord]
) -> Evaluation:
    """Return the record of a checkpoint; sizes of layers only if its family is known."""
    shape, _ = _sizes(checkpoint)
    return Evaluation(
        checkpoint=name,
        stored_parameters=checkpoint.num_parameters,
        layer_parameters=None if shape is None else shape.all_layer_parameters(),
        file_bytes=checkpoint.num_bytes,
        flops_per_token=None if shape is None else shape.flops_per_token(),
        kv_bytes_per_token=None,
        perplexity={},
        tokens_scored={},
        measures=measures or None,
        texts=records,
    )


def _sizes(checkpoint: Checkpoint) -> tuple[StackShape | None, int]:
    """Return `sizes_of` the checkpoint; None and 0 if its family is not known."""
    if stated_shape(checkpoint.config) is None and checkpoint.config.get("model_type") not in FAMILIES:
        return None, 0
    return sizes_of(checkpoint)
