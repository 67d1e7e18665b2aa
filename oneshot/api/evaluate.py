"""`oneshot.evaluate`: quality, sizes and latency of models beside a baseline, on names or on objects in memory."""

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from oneshot.api.models import save_model
from oneshot.api.texts import listed_sources, save_text
from oneshot.api.words import python_words
from oneshot.errors import CalibrationError
from oneshot.evaluation import Evaluation, Evaluations
from oneshot.evaluation import evaluate as evaluate_checkpoints
from oneshot.machine import usual_settings
from oneshot.machine.scratch import scratch_folder


def evaluate(model: Any, text: Any = (), *, baseline: Any = None, tokenizer: Any = None, **options: Any) -> Evaluations:
    """Measure a model, and a baseline beside it.

    Args:
        model: a folder, a `.gguf` file, a name on the hub, or a model of transformers.
        baseline: the same.
        text: a source as on the command line, a list of files and of short names of data sets, or text in memory as
            `compress` takes it for calibration. Without text and tasks a model that writes text is measured on the
            built-in text.
        tokenizer: tokenizer of models in memory; None: the one that lies where the model came from.
        options: as on the command line, with underscores, such as `sequence_length`, `max_windows`, `tasks`, `dtype`.

    Returns the numbers of the model, then the baseline's; text in memory is called `given-text.jsonl` there. A list of
    strings counts as sources if each names a file or is the short name of a data set. Raises `OneshotError` for what
    cannot be opened or read.
    """
    with usual_settings(), scratch_folder() as scratch, python_words(scratch):

        def named(given: Any, place: str) -> str:
            if isinstance(given, str | os.PathLike):
                return os.fspath(given)
            (scratch / place).mkdir()
            return str(save_model(given, tokenizer, scratch / place))

        evaluations = evaluate_checkpoints(
            [named(model, "model")],
            _sources(text, scratch),
            baseline=None if baseline is None else named(baseline, "baseline"),
            **options,
        )
        return Evaluations(_without(scratch, evaluation) for evaluation in evaluations)


def _without(scratch: Path, evaluation: Evaluation) -> Evaluation:
    """Return an evaluation whose names of objects in memory are not paths in the scratch folder, which is gone."""

    def short(name: str) -> str:
        return name.removeprefix(f"{scratch}{os.sep}")

    changes: dict[str, Any] = {"checkpoint": short(evaluation.checkpoint)}
    for field in fields(evaluation):
        value = getattr(evaluation, field.name)
        if isinstance(value, dict):
            changes[field.name] = {short(name): found for name, found in value.items()}
    return replace(evaluation, **changes)


def _sources(text: Any, scratch: Path) -> list[str]:
    """Return the names of sources; text in memory is written to a file."""
    if isinstance(text, str | os.PathLike):
        return [os.fspath(text)]
    sources = [] if isinstance(text, list | tuple) and not text else listed_sources(text)
    if sources is not None:
        return sources
    source, sizes = save_text(text, scratch, num_sequences=1, seed=0)
    if sizes:
        raise CalibrationError("Token ids are for calibration; give evaluate the texts.")
    return [source]
