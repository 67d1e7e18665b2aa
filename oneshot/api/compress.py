"""`oneshot.compress`, `oneshot.predict` and `oneshot.profile`: a run on names or on objects in memory."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

from oneshot import pipeline
from oneshot.api.check import CHECK, check_result
from oneshot.api.inputs import Request, request
from oneshot.api.result import Result
from oneshot.config import Config, refuse_prompt
from oneshot.errors import ConfigError
from oneshot.machine.durable import write_whole
from oneshot.max_loss import compress_within
from oneshot.parsing import launched_rank
from oneshot.planning import Profile
from oneshot.report.progress import Shown, Tracker
from oneshot.report.records import Footprint, Report
from oneshot.settings import RECIPE_NAME, recipe_text

Output = str | os.PathLike[str] | None
NO_OPTIONS = ("model", "output", "tokenizer", "progress", "prompt", "settings")  # arguments that are not options


@overload
def compress(model: Any, output: Output = None, *, sparsity: Sequence[float], **options: Any) -> list[Result]: ...


@overload
def compress(model: Any, output: Output = None, *, sparsity: float | None = None, **options: Any) -> Result: ...


def compress(
    model: Any,
    output: Output = None,
    *,
    sparsity: float | Sequence[float] | None = None,
    params: str | int | None = None,
    max_size: str | int | None = None,
    max_loss: str | float | None = None,
    calibration: Any = None,
    form: str | None = None,
    recipe: str | None = None,
    tokenizer: Any = None,
    num_sequences: int | None = None,
    sequence_length: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    dtype: Any = None,
    max_memory: str | int | None = None,
    save_dtype: Any = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: Shown = True,
    prompt: str | None = None,
    **settings: Any,
) -> Result | list[Result]:
    """Make a model smaller, in one run and without training, and return where it is and what it took.

    A model in memory is not changed: it is written to a temporary folder and read from there layer by layer. The
    smaller model is on disk; `Result.load` opens it.

    Args:
        model: a folder of safetensors, a `.gguf` file, a name on the hub, or a model of transformers.
        output: the folder to write, which must not exist; None: `NAME-oneshot-0.20` in the working folder.
        sparsity: fraction of the stored parameters to remove; of a list, every fraction has a result, a `Result` of
            its own in the list that is returned, and a folder `sparsity-0.10` and so on in `output`.
        params: stored parameters to keep at most, such as `"900M"`.
        max_size: bytes of the weight files at most, such as `"2GB"`.
        max_loss: rise of the perplexity that is allowed, such as `"5%"` or 0.05: the run finds the size, and checks it
            on texts of several kinds. Give one of the four.
        calibration: text like the one that the model will read: a source as on the command line (default `"c4"`), a
            path, a list of strings or of chats, a `datasets.Dataset`, a `DataLoader`, or token ids `(sequences,
            length)`. A list of paths, of names of files and of short names of data sets is read as these sources,
            joined by `+`. Beside one text also an eighth of `"builtin"` is read, unless it is a file that is
            named twice, `"my.jsonl+my.jsonl"`, or token ids.
        form: `auto`, `stock`, `per-layer`, `nemotron-nas` or `gguf`.
        recipe: a named method.
        tokenizer: tokenizer of a model in memory; None: the one that lies where the model came from.
        num_sequences: calibration sequences.
        sequence_length: tokens of each.
        seed: seed of all random choices.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        dtype: dtype of the computation.
        max_memory: bound of the host memory, such as `"8GiB"`.
        save_dtype: dtype of the stored weights; None: the input's.
        overwrite: replace the output.
        resume: continue an interrupted run.
        progress: whether bars are shown, or a function that is called with a `Progress` instead.
        prompt: a question that both models answer at the end. The answers, and the perplexity of both on text that the
            run did not read, are in `Result.report.check`; None leaves this check out, except of `max_loss`.
        settings: any other field of `Method`, `Target`, `MachineOptions` or `Config`, as `ffn="obs"`.

    Raises a subclass of `OneshotError` with one sentence for everything that a user can mend.
    """
    given = {name: value for name, value in locals().items() if name not in NO_OPTIONS} | settings
    first, several = _split(sparsity)
    given |= {"sparsity": first, "overwrite": overwrite or None, "resume": resume or None}
    with request(model, output, tokenizer, given, several=several is not None) as asked:
        refuse_prompt(prompt, asked.config.form)
        ending = [CHECK] * len(several or [first]) if prompt or max_loss is not None else []
        with Tracker(progress, ending=ending) as tracker:
            if several is None and asked.config.target.max_loss is not None:
                check = partial(check_result, tracker=tracker, question=prompt, words=asked.words)
                configs = [asked.config]
                reports = [compress_within(asked.config, check, show_progress=tracker)]
            elif several is None:
                configs, reports = [asked.config], [pipeline.compress(asked.config, show_progress=tracker)]
            else:
                reports = pipeline.compress_sizes(asked.config, several, show_progress=tracker)
                configs = pipeline.configs_of(asked.config, several)
            if prompt and launched_rank() == 0 and asked.config.target.max_loss is None:
                pairs = zip(configs, reports, strict=True)
                reports = [check_result(*pair, tracker, question=prompt, words=asked.words) for pair in pairs]
        results = [_result(asked, config, report) for config, report in zip(configs, reports, strict=True)]
        return results[0] if several is None else results


def _split(sparsity: Any) -> tuple[Any, list[float] | None]:
    """Return the sparsity, or the first one, and all if a list is given. Raises `ConfigError` for an empty list."""
    if not isinstance(sparsity, list | tuple):
        return sparsity, None
    if not sparsity:
        raise ConfigError("The list of sparsities is empty; give at least one, such as [0.1, 0.2].")
    return sparsity[0], list(sparsity)


def _result(asked: Request, config: Config, report: Report) -> Result:
    """Return a finished result, whose recipe names what was in memory."""
    folder = Path(config.output).expanduser()
    if asked.in_memory:
        write_whole(folder / RECIPE_NAME, recipe_text(config, in_memory=asked.in_memory))
    return Result(folder, report, None if "checkpoint" in asked.in_memory else config.checkpoint)


@overload
def predict(model: Any, output: Output = None, *, sparsity: Sequence[float], **options: Any) -> list[Footprint]: ...


@overload
def predict(model: Any, output: Output = None, *, sparsity: float | None = None, **options: Any) -> Footprint: ...


def predict(
    model: Any, output: Output = None, *, sparsity: Any = None, tokenizer: Any = None, **options: Any
) -> Footprint | list[Footprint]:
    """Return what `compress` with these options would take: memory, disk, parameters and time; nothing is written.

    Takes the options of `compress`; for several sparsities it returns a list. An output in the way is a warning.
    Raises as `compress` for everything else that is known before the first weight is read.
    """
    first, several = _split(sparsity)
    with request(model, output, tokenizer, {"sparsity": first} | options, several=several is not None) as asked:
        if several is None:
            return pipeline.predict(asked.config)
        return [pipeline.predict(config) for config in pipeline.configs_of(asked.config, several)]


def profile(
    model: Any, output: Output = None, *, tokenizer: Any = None, progress: Shown = True, **options: Any
) -> Profile:
    """Measure once what smaller sizes cost, for several results: `compress(…, profile=output)` plans from it.

    Takes the options of `compress` on the text and the machine; a size is not needed. Without an output the folder is
    `NAME-profile` in the working folder. Raises `OneshotError` as `compress`.
    """
    with request(model, output, tokenizer, {"sparsity": 0.0} | options, ending="-profile") as asked:
        return pipeline.profile(asked.config, show_progress=progress)
