"""A quick check of a finished result: held-out text and one answer, before and after; bounded in time and memory."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oneshot.checkpoint import IMPORTANCE_NAME, Checkpoint, GgufCheckpoint, locate_checkpoint, open_gguf
from oneshot.config import Config, TextOptions
from oneshot.errors import CalibrationError, OneshotError, OutputError, cause, printable
from oneshot.evaluation import kind_of, load_model, perplexity, perplexity_of, was_cut
from oneshot.export import FORMS
from oneshot.footprint.check import ANSWER_TOKENS, LONGEST_WINDOW, num_windows
from oneshot.machine import resolve_device
from oneshot.machine.dtype import COMPUTE_DTYPES
from oneshot.machine.memory import peak_bytes, peak_device_bytes, release_heap, reset_peak
from oneshot.parsing import full_dtype
from oneshot.report.additions import add_check
from oneshot.report.progress import Tracker
from oneshot.report.records import Check, Report
from oneshot.report.words import CUT, LANGUAGES
from oneshot.text import (
    SELF,
    has_tokens,
    kind_windows,
    known_languages,
    load_text,
    load_tokenizer,
    passage_nats,
    passages,
    prompt_ids,
    shares,
    split_sources,
    token_hash,
    whole_letters,
)

MOST_LETTERS = 2**15  # of a question in the words of a chat template
QUESTION, OPENING = "Why is the sky blue? Answer in one sentence.", "The sky is blue because"
LONGEST_REASON = 200  # letters
CHECK = "checking the result on held-out text"  # the stage of a run
Step = Callable[[str], None]  # is told what the check does now


def check_result(
    config: Config, report: Report, tracker: Tracker, *, question: str | None, words: Callable[[str], str] = str
) -> Report:
    """Measure a finished result as `quick_check`, add what it says to the result's files, and return the report.

    `words`: puts a sentence on what was left out into the words of the user's language.
    """
    tracker.enter(CHECK)
    check = quick_check(config, report, question=question, step=partial(tracker.step, brief=True))
    check = replace(check, skipped=words(check.skipped))
    return add_check(Path(config.output).expanduser(), report, check)


def quick_check(config: Config, report: Report, *, question: str | None = None, step: Step = lambda _: None) -> Check:
    """Measure the result of a run beside its original, one model in memory at a time.

    It reads text of the same source that the run did not read, and, above one window, never more than a sixteenth of
    the run's tokens or four windows; and four short texts of different kinds, because a run may keep one kind and lose
    another. Passages in the other languages that the original knows are a fifth kind. A check that is not possible,
    that needs more memory than is allowed, or a part of it, has a sentence that says why.

    Args:
        question: what both models are asked; None: the built-in question. A model without a chat template goes on with
            it. step: is told what the check does now.
    """
    started = time.perf_counter()
    release_heap()
    reset_peak()
    check = _checked(config, report, question, step)
    return replace(
        check, seconds=time.perf_counter() - started, peak_bytes=peak_bytes(), peak_device_bytes=peak_device_bytes()
    )


def _checked(config: Config, report: Report, question: str | None, step: Step) -> Check:
    output = Path(config.output).expanduser()
    form = FORMS[report.config["form"]]
    if form.opened_by != "transformers":
        return Check(skipped=f"{form.title} is checked by {form.opened_by}.")
    try:
        if kind_of(Checkpoint(output).config) != "causal":
            return Check(skipped="The check asks models that write text; oneshot evaluate measures this one.")
        return _measured(config, report, output, question, step)
    except (OneshotError, OSError, torch.cuda.OutOfMemoryError) as error:
        return Check(skipped=f"The check was not possible ({printable(str(error))[:LONGEST_REASON]}).")


def _measured(config: Config, report: Report, output: Path, asked: str | None, step: Step) -> Check:
    device = resolve_device(config.machine.device)
    dtype = COMPUTE_DTYPES[full_dtype(str(report.fingerprint["dtype"]))]  # as in the run
    reason = _too_large(config, report, device)
    if reason is not None:
        return Check(skipped=reason)
    gguf = open_gguf(config.checkpoint)  # read as it is: converting it again takes a disk, and pages of float32
    folder = output if gguf is not None else locate_checkpoint(config.checkpoint, Path(), config.revision)
    if kind_of(Checkpoint(folder).config) != "causal":  # its class may leave out a head that the result has
        return Check(
            skipped="The check compares models that write text, and the original's config states no such class."
        )
    tokenizer = load_tokenizer(folder)  # a result has its original's
    windows, source = _held_out(config, report, tokenizer)
    by_kind = kind_windows(tokenizer, min(config.text.sequence_length, LONGEST_WINDOW))
    kinds: dict[str, dict[str, float]] = {kind: {} for kind in by_kind}
    spoken = passages(tokenizer)
    perplexities: dict[str, float] = {}
    answers: dict[str, str] = {}
    unasked = ""
    try:
        question, prompt = _question(tokenizer, asked)
    except CalibrationError as error:
        question, prompt, unasked = "", None, f"Nothing was asked ({printable(str(error))[:LONGEST_REASON]})."
    models: list[tuple[str, Path | GgufCheckpoint]] = [
        ("compressed", output),
        ("dense", folder if gguf is None else gguf),
    ]
    del gguf  # its file is closed when its model is there
    while models:
        name, place = models.pop()
        step("checking the original" if name == "dense" else "checking the result")
        model = _opened(place, device, dtype)
        del place
        if windows is not None:
            perplexities[name], _ = perplexity(model, windows, has_bar=False)
        for kind, text in by_kind.items():
            kinds[kind][name], _ = perplexity(model, text, has_bar=False)
        nats = passage_nats(model, spoken)
        if name == "dense":
            spoken = {language.name: spoken[language.name] for language in known_languages(nats)}
        if spoken:
            kinds.setdefault(LANGUAGES, {})[name] = _together(nats, spoken)
        if prompt is not None:
            answers[name] = _answer(model, tokenizer, prompt)
        del model
        release_heap()
    if windows is None:
        return Check(question=question, answers=answers, skipped=unasked, kinds=kinds)
    return Check(source, windows.numel(), perplexities, question, answers, unasked, kinds=kinds)


def _together(nats: Mapping[str, float], spoken: Mapping[str, list[int]]) -> float:
    """Return the perplexity of all these passages together. Raises `CheckpointError` if they have none."""
    return perplexity_of(sum(nats[language] for language in spoken) / sum(len(ids) - 1 for ids in spoken.values()))


def _opened(place: Path | GgufCheckpoint, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the model of a folder or a file. Raises `OutputError` if transformers does not open it."""
    load = place.load if isinstance(place, GgufCheckpoint) else partial(load_model, place)
    try:
        return load(device=device, dtype=dtype)
    except (OneshotError, OSError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:  # transformers raises many unrelated types; the cause is named and chained
        where = place.folder if isinstance(place, GgufCheckpoint) else place
        raise OutputError(f"transformers does not open {where}: {cause(error)}") from error


def _too_large(config: Config, report: Report, device: torch.device) -> str | None:
    """Return the sentence on a check that needs more memory than is allowed; None if it fits."""
    import psutil

    footprint = report.footprint
    assert footprint is not None, "every run predicts its footprint"
    host, where = config.machine.max_memory_bytes, "allowed (--max-memory)"
    if host is None:
        host, where = psutil.Process().memory_info().rss + psutil.virtual_memory().available, "free"
    if footprint.check_bytes > host:
        needed, allowed = footprint.check_bytes, host
    elif device.type == "cuda" and footprint.check_device_bytes > _free_on(config, device):
        needed, allowed, where = footprint.check_device_bytes, _free_on(config, device), "free on the device"
    else:
        return None
    return (
        f"The check was left out, because it loads the whole original and needs {needed / 2**30:.1f} GiB of memory, "
        f"and {allowed / 2**30:.1f} GiB is {where}."
    )


def _free_on(config: Config, device: torch.device) -> int:
    """Return the bytes of a CUDA device that the check may take."""
    free = int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)
    return min(free, config.machine.max_device_memory_bytes or free)


def _held_out(config: Config, report: Report, tokenizer: Any) -> tuple[torch.Tensor | None, str]:
    """Return windows `(K, length)` of the first source that the run did not read, and its name; None without any."""
    options = TextOptions(**report.config["text"])
    if report.calibration is None:
        return None, ""
    for source, count in shares(options.num_sequences, split_sources(report.calibration["source"])).items():
        if source == SELF or has_tokens(source):
            continue
        more = num_windows(options.num_sequences)
        ids = load_text(
            source, tokenizer, num_sequences=count + more, sequence_length=options.sequence_length, seed=config.seed
        ).token_ids
        alone = count == options.num_sequences
        if len(ids) > count and (not alone or token_hash(ids[:count]) == report.calibration["token_hash"]):
            return ids[count:, :LONGEST_WINDOW].contiguous(), source
    return None, ""


def _question(tokenizer: Any, asked: str | None) -> tuple[str, torch.Tensor]:
    """Return what both models are asked, and its tokens `(1, length)`, int64; `asked` replaces the built-in question.

    Raises `CalibrationError` if the chat template does not write it within bounds.
    """
    if asked is not None:
        asked = whole_letters(asked)  # Python keeps bytes of an argument that are not UTF-8 as surrogates
    if not tokenizer.chat_template:
        opening = asked or OPENING
        return opening, tokenizer(opening, return_tensors="pt")["input_ids"]
    question = asked or QUESTION
    return question, prompt_ids(tokenizer, [{"role": "user", "content": question}], "a question", MOST_LETTERS)


@torch.inference_mode()
def _answer(model: Any, tokenizer: Any, prompt: torch.Tensor) -> str:
    """Return what a model writes greedily, in at most `ANSWER_TOKENS` tokens; `CUT` follows if it did not end there."""
    ids = prompt.to(model.device)
    mask = torch.ones_like(ids)
    try:
        written = model.generate(ids, attention_mask=mask, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    except (TypeError, ValueError, RuntimeError) as error:  # of a generation_config.json that does not fit, for example
        raise CalibrationError(f"{type(model).__name__} does not write an answer ({cause(error)}).") from error
    answer = written[0, ids.shape[1] :]
    text = str(tokenizer.decode(answer, skip_special_tokens=True)).strip()
    return text + CUT if text and was_cut(model, answer, ANSWER_TOKENS) else text


def weight_bytes(place: str | os.PathLike[str]) -> int | None:
    """Return the bytes of the weight files of a folder or of a file; None for a name on the hub."""
    path = Path(place).expanduser()
    if path.is_file():
        return path.stat().st_size
    files = [file for pattern in ("*.safetensors", "*.gguf") for file in path.glob(pattern)]
    sizes = [file.stat().st_size for file in files if file.name != IMPORTANCE_NAME]
    return sum(sizes) if sizes else None
