"""Evaluation of checkpoints side by side, by the kind of the model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oneshot.checkpoint import Checkpoint, open_gguf, stating_class
from oneshot.config import EvaluationOptions
from oneshot.errors import ConfigError
from oneshot.evaluation.by_example import evaluate_examples
from oneshot.evaluation.by_window import evaluate_windows
from oneshot.evaluation.comparison import Evaluation
from oneshot.evaluation.kinds import kind_of
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
    **options: Any,
) -> list[Evaluation]:
    """Evaluate checkpoints on the same text: in order, then the baseline.

    Models that write text are evaluated on windows (`evaluate_windows`). Encoders and encoder–decoders are evaluated on
    examples (`evaluate_examples`), and have neither tasks nor latency.

    Args:
        checkpoints: folders, `.gguf` files and names on the hub.
        texts: sources.
        baseline: the checkpoint to compare with; None: none.
        revision: branch, tag or commit of the checkpoints' hub names; None: the main branch.
        baseline_revision: the same of the baseline's.
        options: fields of `EvaluationOptions`.

    Raises a subclass of `OneshotError` for everything that a user can mend.
    """
    asked = EvaluationOptions.of(**options)
    if baseline is None and baseline_revision is not None:
        raise ConfigError(f"--baseline-revision {baseline_revision} needs a --baseline; give one, or leave it out.")
    for text in texts:
        joined = "+" in text and shown(text) == text and not exists(Path(text.partition(":")[0]).expanduser())
        if text == SELF or joined:
            raise ConfigError(
                f"--text {text} is for --calibration alone, where a model writes text (self) and + joins sources; give "
                "--text once for each text."
            )
    where = resolve_device(asked.device)
    compute = resolve_dtype(asked.dtype, where)
    has_baseline, names = baseline is not None, [*checkpoints, *([] if baseline is None else [baseline])]
    with scratch_folder() as scratch:
        located = [Checkpoint(open_folder(name, scratch, revision)) for name in checkpoints]
        if baseline is not None:
            located.append(Checkpoint(open_folder(baseline, scratch, baseline_revision)))
        kind = asked.kind
        if kind is None:
            kinds = [kind_of(stating_class(one).config) for one in located]
            kind = kinds[0]
            other = next(
                (name for name, one in zip(names, kinds, strict=True) if (one == "causal") != (kind == "causal")), None
            )
            if other is not None:
                writing, silent = (names[0], other) if kind == "causal" else (other, names[0])
                raise ConfigError(f"{writing} writes text, but {silent} does not; give models of one kind.")
        if kind == "causal":
            results = evaluate_windows(names, located, texts, asked, has_baseline, device=where, dtype=compute)
            return [_with_file_bytes(result) for result in results]
        if asked.tasks:
            raise ConfigError(f"--tasks are for models that write text, not for {kind}; leave them out.")
        return evaluate_examples(names, located, texts, kind, asked, has_baseline, device=where, dtype=compute)


def _with_file_bytes(result: Evaluation) -> Evaluation:
    """Return the result with the bytes of the GGUF file, of which its model was a converted copy."""
    own = own_gguf(result.checkpoint)
    if own is not None:
        return replace(result, file_bytes=own.stat().st_size)
    gguf = open_gguf(result.checkpoint)
    return result if gguf is None else replace(result, file_bytes=gguf.file_bytes)
