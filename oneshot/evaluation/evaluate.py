"""Evaluation of checkpoints side by side: quality, sizes and latency."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from oneshot.checkpoint import Checkpoint, identify, locate_checkpoint
from oneshot.errors import CalibrationError, ConfigError
from oneshot.evaluation.by_example import evaluate_examples
from oneshot.evaluation.comparison import Evaluation, text_record
from oneshot.evaluation.kinds import Kind, kind_of
from oneshot.evaluation.models import load_model, measure_latency
from oneshot.evaluation.scoring import relative_score, score_windows
from oneshot.evaluation.tasks import run_tasks, task_manager
from oneshot.export import stated_shape
from oneshot.families import StackShape
from oneshot.machine import resolve_device, resolve_dtype
from oneshot.text import iter_documents, load_tokenizer, pack


def load_windows(text: str, tokenizer: Any, *, sequence_length: int, max_windows: int | None) -> torch.Tensor:
    """Return a text's first windows, int64 `(windows, sequence_length)`, with documents in their stored order."""
    return pack(
        iter_documents(text, seed=None),
        tokenizer,
        num_sequences=max_windows,
        sequence_length=sequence_length,
        source=text,
    )


def evaluate(
    checkpoints: Sequence[str],
    texts: Sequence[str],
    *,
    baseline: str | None = None,
    sequence_length: int = 1024,
    max_windows: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    prefill_tokens: int = 512,
    decode_tokens: int = 32,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    include_path: str | None = None,
    kind: Kind | None = None,
    batch_size: int = 8,
) -> list[Evaluation]:
    """Evaluate checkpoints on the same windows: in order, then the baseline. All are in memory at once.

    `decode_tokens=0` leaves the latency out. Encoders and encoder–decoders are evaluated on examples, `batch_size` at a
    time, and one model is in memory at a time: see `evaluate_examples`. They have neither tasks nor latency.
    `kind=None`: the kind that the first checkpoint's class has.

    Raises a subclass of `OneshotError` for everything that a user can mend.
    """
    where = resolve_device(device)
    compute = resolve_dtype(dtype, where)
    names = [*checkpoints, baseline] if baseline is not None else [*checkpoints]
    with tempfile.TemporaryDirectory(prefix="oneshot-") as scratch:
        located = [Checkpoint(locate_checkpoint(name, Path(scratch))) for name in names]
        kind = kind_of(located[0].config) if kind is None else kind
        if kind != "causal":
            if tasks:
                raise ConfigError(f"--tasks are for models that write text, not for {kind}; leave them out.")
            return evaluate_examples(
                names,
                located,
                texts,
                kind,
                with_baseline=baseline is not None,
                longest=sequence_length,
                limit=max_windows,
                batch_size=batch_size,
                device=where,
                dtype=compute,
            )
        manager = (
            task_manager(tasks, include_path) if tasks else None
        )  # a wrong name is refused before hours of scoring
        opened = [(checkpoint, _shape(checkpoint)) for checkpoint in located]
        folders = [checkpoint.folder for checkpoint in located]
        tokenizer = load_tokenizer(folders[0])
        windows = {
            text: load_windows(text, tokenizer, sequence_length=sequence_length, max_windows=max_windows)
            for text in texts
        }
        for folder, (_, shape) in zip(folders, opened, strict=True):
            for text, ids in windows.items():
                if int(ids.max()) >= shape.vocab_size:
                    raise CalibrationError(
                        f"The tokenizer in {folders[0]} gives tokens of {text} that {folder} has no embedding for; "
                        "give models with one tokenizer, the one that belongs to them."
                    )
        loaded = [load_model(folder, device=where, dtype=compute) for folder in folders]
        models, reference = (loaded[:-1], loaded[-1]) if baseline is not None else (loaded, None)
        scores = {text: score_windows(models, ids, baseline=reference) for text, ids in windows.items()}
        latencies: list[tuple[float | None, float | None]] = [(None, None)] * len(loaded)
        if decode_tokens > 0:
            prompt = (
                next(iter(windows.values()))[:1, :prefill_tokens] if windows else torch.ones(1, prefill_tokens).long()
            )
            latencies = list(measure_latency(loaded, prompt, decode_tokens=decode_tokens))
        del loaded, models, reference
        records = {text: text_record(ids) for text, ids in windows.items()}
        results = []
        for position, (name, (checkpoint, shape)) in enumerate(zip(names, opened, strict=True)):
            score = {text: of_models[position] for text, of_models in scores.items()}
            results.append(
                Evaluation(
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
                    prefill_seconds=latencies[position][0],
                    decode_seconds=latencies[position][1],
                    tasks=run_tasks(
                        checkpoint.folder,
                        tasks,
                        limit=limit,
                        include_path=include_path,
                        device=where,
                        dtype=compute,
                        manager=manager,
                    )
                    if tasks
                    else None,
                    texts=records,
                )
            )
    if baseline is None or not windows:
        return results
    *compared, dense = results
    return [*(_beside(result, dense) for result in compared), dense]


def _known(values: dict[str, float | None]) -> dict[str, float] | None:
    """Return the known values; None if there are none."""
    return {text: value for text, value in values.items() if value is not None} or None


def _beside(result: Evaluation, baseline: Evaluation) -> Evaluation:
    """Return the result with its score relative to the baseline."""
    score, _, worst_ratio = relative_score(result.perplexity, baseline.perplexity)
    return replace(result, score=score, worst_ratio=worst_ratio)


def _shape(checkpoint: Checkpoint) -> StackShape:
    """Return the sizes of a checkpoint; one with layers of different sizes states them itself."""
    return stated_shape(checkpoint.config) or identify(checkpoint).shape.stack()
