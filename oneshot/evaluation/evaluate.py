"""Evaluation of checkpoints side by side, by the kind of the model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from oneshot.checkpoint import Checkpoint, open_gguf
from oneshot.errors import ConfigError
from oneshot.evaluation.by_example import evaluate_examples
from oneshot.evaluation.by_window import evaluate_windows
from oneshot.evaluation.comparison import Evaluation
from oneshot.evaluation.kinds import Kind, kind_of
from oneshot.export import open_folder, own_gguf
from oneshot.machine import resolve_device, resolve_dtype
from oneshot.machine.scratch import scratch_folder
from oneshot.text import SELF, exists
from oneshot.text.files import shown


def evaluate(
    checkpoints: Sequence[str],
    texts: Sequence[str],
    *,
    baseline: str | None = None,
    revision: str | None = None,
    baseline_revision: str | None = None,
    sequence_length: int = 1024,
    max_windows: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    prefill_tokens: int | None = None,
    decode_tokens: int = 32,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    include_path: str | None = None,
    kind: Kind | None = None,
    batch_size: int = 8,
) -> list[Evaluation]:
    """Evaluate checkpoints on the same text: in order, then the baseline.

    Models that write text are evaluated on windows (`evaluate_windows`); `decode_tokens=0` leaves their latency out,
    and `prefill_tokens=None` times 512 tokens, or as many as learned positions allow.
    Encoders and encoder–decoders are evaluated on examples, `batch_size` at a time (`evaluate_examples`), and have
    neither tasks nor latency. `revision`, `baseline_revision`: branch, tag or commit of the checkpoints' hub names, and
    of the baseline's; None: the main branch. `kind=None`: the kind that the first checkpoint's class has.

    Raises a subclass of `OneshotError` for everything that a user can mend.
    """
    if baseline is None and baseline_revision is not None:
        raise ConfigError(f"--baseline-revision {baseline_revision} needs a --baseline; give one, or leave it out.")
    if prefill_tokens is not None and prefill_tokens < 1:
        raise ConfigError(f"--prefill-tokens {prefill_tokens} is out of range: give at least 1.")
    if decode_tokens < 0:
        raise ConfigError(f"--decode-tokens {decode_tokens} is out of range: give 0 or more.")
    for text in texts:
        joined = "+" in text and shown(text) == text and not exists(Path(text.partition(":")[0]).expanduser())
        if text == SELF or joined:
            raise ConfigError(
                f"--text {text} is for --calibration alone, where a model writes text (self) and + joins sources; give "
                "--text once for each text."
            )
    where = resolve_device(device)
    compute = resolve_dtype(dtype, where)
    names = [*checkpoints, baseline] if baseline is not None else [*checkpoints]
    with scratch_folder() as scratch:
        located = [Checkpoint(open_folder(name, scratch, revision)) for name in checkpoints]
        if baseline is not None:
            located.append(Checkpoint(open_folder(baseline, scratch, baseline_revision)))
        if kind is None:
            kind = kind_of(located[0].config)
            if baseline is not None and (kind == "causal") != (kind_of(located[-1].config) == "causal"):
                writing, other = (names[0], baseline) if kind == "causal" else (baseline, names[0])
                raise ConfigError(f"{writing} writes text, but {other} does not; give a baseline of the same kind.")
        if kind == "causal":
            results = evaluate_windows(
                names,
                located,
                texts,
                with_baseline=baseline is not None,
                sequence_length=sequence_length,
                max_windows=max_windows,
                prefill_tokens=prefill_tokens,
                decode_tokens=decode_tokens,
                tasks=tasks,
                limit=limit,
                include_path=include_path,
                device=where,
                dtype=compute,
            )
            return [_with_file_bytes(result) for result in results]
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


def _with_file_bytes(result: Evaluation) -> Evaluation:
    """Return the result with the bytes of the GGUF file, of which its model was a converted copy."""
    own = own_gguf(result.checkpoint)
    if own is not None:
        return replace(result, file_bytes=own.stat().st_size)
    gguf = open_gguf(result.checkpoint)
    return result if gguf is None else replace(result, file_bytes=gguf.file_bytes)
