"""Evaluation on windows of text, of models that write it: quality, tasks, sizes and latency."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from oneshot.architecture import StackShape
from oneshot.checkpoint import Checkpoint
from oneshot.config import EvaluationOptions
from oneshot.errors import CalibrationError, ConfigError
from oneshot.evaluation.comparison import Evaluation, TextRecord, text_record
from oneshot.evaluation.models import load_model, measure_latency, refuse_other_tokenizers, sizes_of
from oneshot.evaluation.scoring import TextScore, relative_score, score_windows
from oneshot.evaluation.tasks import load_documents, run_tasks, task_manager
from oneshot.report.display import tell_file
from oneshot.tasks import expanded
from oneshot.text import (
    BUILTIN,
    ChatRenderer,
    bos_of,
    holds_tokenizer,
    iter_documents,
    load_tokenizer,
    pack,
    warn_if_long,
)

PREFILL_TOKENS = 512  # timed, unless learned positions allow fewer
BUILTIN_WINDOWS = 8  # without a text of the user's

logger = logging.getLogger(__name__)


def load_windows(text: str, tokenizer: Any, *, sequence_length: int, max_windows: int | None) -> torch.Tensor:
    """Return a text's first windows, int64 `(windows, sequence_length)`, with documents in their stored order."""
    return pack(
        iter_documents(text, None, ChatRenderer(tokenizer)),
        tokenizer,
        num_sequences=max_windows,
        sequence_length=sequence_length,
        source=text,
    )


def evaluate_windows(
    names: Sequence[str],
    checkpoints: Sequence[Checkpoint],
    texts: Sequence[str],
    asked: EvaluationOptions,
    with_baseline: bool,
    *,
    device: torch.device,
    dtype: torch.dtype | str,
) -> list[Evaluation]:
    """Evaluate checkpoints on the same windows, in order; with a baseline, it is the last one.

    All models are in memory at once, and freed before the tasks. Without texts and tasks they read a few windows of the
    built-in text.

    Args:
        names: labels of the checkpoints.

    Raises `CheckpointError`, `CalibrationError` and `ConfigError`.
    """
    sequence_length, max_windows, decode_tokens = asked.sequence_length, asked.max_windows, asked.decode_tokens
    tasks, manager, batch_size = asked.tasks, None, asked.batch_size or 1
    if tasks:  # a wrong name is refused before hours of scoring
        manager = task_manager(tasks, asked.include_path)
        load_documents(tasks, manager)
    sizes = [sizes_of(checkpoint) for checkpoint in checkpoints]
    shapes, positions = [shape for shape, _ in sizes], [most for _, most in sizes]
    if not texts and not tasks:
        logger.warning("No --text is given: the models read the text %s. Your own text says more.", BUILTIN)
        texts, max_windows = (BUILTIN,), max_windows or BUILTIN_WINDOWS
        sequence_length = min([sequence_length, *(most for most in positions if most > 0)])
    if texts:
        _refuse_beyond_positions(names, positions, sequence_length, f"--sequence-length {sequence_length}")
    if (prefill_tokens := asked.prefill_tokens) is None:
        prefill_tokens = max(1, min([PREFILL_TOKENS, *(most - decode_tokens for most in positions if most > 0)]))
    if decode_tokens > 0:
        lengths = f"--prefill-tokens {prefill_tokens} with --decode-tokens {decode_tokens}"
        _refuse_beyond_positions(names, positions, prefill_tokens + decode_tokens, lengths)
    tokenizer = load_tokenizer(checkpoints[0].folder)
    windows = {
        text: load_windows(text, tokenizer, sequence_length=sequence_length, max_windows=max_windows) for text in texts
    }
    _refuse_unknown_tokens(names, shapes, windows)
    tokens = (token for ids in windows.values() for token in ids.unique().tolist())
    refuse_other_tokenizers(names, checkpoints, tokenizer, tokens)
    models = [load_model(checkpoint.folder, device=device, dtype=dtype) for checkpoint in checkpoints]
    for name, model in zip(names, models, strict=True) if texts else ():
        warn_if_long(sequence_length, getattr(model.config.get_text_config(), "max_position_embeddings", None), name)
    scores = _scores(models, windows, with_baseline=with_baseline, batch_size=batch_size)
    latencies: Sequence[tuple[float | None, float | None]] = [(None, None)] * len(models)
    if decode_tokens > 0:
        ids = next(iter(windows.values())).flatten() if windows else torch.ones(1).long()
        ids = ids.repeat(-(-prefill_tokens // len(ids)))[:prefill_tokens]  # a short text several times
        latencies = measure_latency(models, ids.unsqueeze(0), decode_tokens=decode_tokens)
    del models
    records = {text: text_record(ids) for text, ids in windows.items()}
    results = []
    for name, checkpoint, shape, score, latency in zip(names, checkpoints, shapes, scores, latencies, strict=True):
        result = _evaluation(name, checkpoint, shape, score, latency, records)
        own = load_tokenizer(checkpoint.folder) if holds_tokenizer(checkpoint.folder) else tokenizer
        result = replace(result, bos=bos_of(own, checkpoint.folder))
        if tasks:
            tell_file(f"asking {Path(name).name} the tasks {', '.join(expanded(tasks))} …")
            found = run_tasks(
                checkpoint.folder,
                tasks,
                limit=asked.limit,
                include_path=asked.include_path,
                device=device,
                dtype=dtype,
                manager=manager,
                batch_size=batch_size,
            )
            result = replace(result, tasks=found)
        results.append(result)
    if not with_baseline or not windows:
        return results
    *compared, dense = results
    return [*(_beside(result, dense) for result in compared), dense]


def _refuse_beyond_positions(names: Sequence[str], positions: Sequence[int], length: int, option: str) -> None:
    """Raise `ConfigError` if a model has learned positions, and fewer than the tokens that an option asks for."""
    for name, most in zip(names, positions, strict=True):
        if 0 < most < length:
            raise ConfigError(f"{option} is beyond the {most} positions of {name}; give less.")


def _refuse_unknown_tokens(
    names: Sequence[str], shapes: Sequence[StackShape], windows: dict[str, torch.Tensor]
) -> None:
    for name, shape in zip(names, shapes, strict=True):
        for text, ids in windows.items():
            if int(ids.max()) >= shape.vocab_size:
                raise CalibrationError(
                    f"The tokenizer of {names[0]} gives tokens of {text} that {name} has no "
                    "embedding for; give models with one tokenizer, the one that belongs to them."
                )


def _scores(
    models: list[Any], windows: dict[str, torch.Tensor], *, with_baseline: bool, batch_size: int
) -> list[dict[str, TextScore]]:
    """Return every model's scores by text; the last model is the baseline, if there is one."""
    compared, baseline = (models[:-1], models[-1]) if with_baseline else (models, None)
    by_text = {
        text: score_windows(compared, ids, baseline=baseline, batch_size=batch_size) for text, ids in windows.items()
    }
    return [{text: of_models[place] for text, of_models in by_text.items()} for place in range(len(models))]


def _evaluation(
    name: str,
    checkpoint: Checkpoint,
    shape: StackShape,
    score: dict[str, TextScore],
    latency: tuple[float | None, float | None],
    records: dict[str, TextRecord],
) -> Evaluation:
    """Return the record of a checkpoint, without tasks."""
    return Evaluation(
        checkpoint=name,
        stored_parameters=checkpoint.num_parameters,
        layer_parameters=shape.all_layer_parameters(),
        file_bytes=checkpoint.num_bytes,
        flops_per_token=shape.flops_per_token(),
        kv_bytes_per_token=shape.kv_bytes_per_token(),
        perplexity={text: value.perplexity for text, value in score.items()},
        tokens_scored={text: value.tokens_scored for text, value in score.items()},
        top1_agreement=_known({text: value.top1_agreement for text, value in score.items()}),
        kl_divergence=_known({text: value.kl_divergence for text, value in score.items()}),
        acceptance=_known({text: value.acceptance for text, value in score.items()}),
        prefill_seconds=latency[0],
        decode_seconds=latency[1],
        texts=records,
    )


def _known(values: dict[str, float | None]) -> dict[str, float] | None:
    """Return the known values; None if there are none."""
    return {text: value for text, value in values.items() if value is not None} or None


def _beside(result: Evaluation, baseline: Evaluation) -> Evaluation:
    """Return the result with its score relative to the baseline."""
    score, _, worst_ratio = relative_score(result.perplexity, baseline.perplexity)
    return replace(result, score=score, worst_ratio=worst_ratio)
