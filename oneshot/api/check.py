"""A quick check of a finished result: held-out text and one answer, before and after; bounded in time and memory."""

import os
from pathlib import Path
from typing import Any

import torch

from oneshot.checkpoint import Checkpoint, locate_checkpoint
from oneshot.config import Config
from oneshot.errors import CalibrationError, OneshotError, OutputError, cause, printable
from oneshot.evaluation import kind_of, load_model, perplexity
from oneshot.export import FORMS
from oneshot.machine import resolve_device, resolve_dtype
from oneshot.machine.scratch import scratch_folder
from oneshot.report.records import Check, Report
from oneshot.text import SELF, has_tokens, load_text, load_tokenizer, rendered, shares, split_sources, token_hash

MOST_LETTERS = 2**15  # of a question in the words of a chat template
QUESTION, OPENING = "Why is the sky blue? Answer in one sentence.", "The sky is blue because"
LONGEST_REASON = 200  # letters
ANSWER_TOKENS = 32
MOST_WINDOWS, LONGEST_WINDOW = 4, 512  # of held-out text
CHECKED_SHARE = 16  # the text of a run has at least so many times the tokens of its check
LOADED_SHARE = 1.2  # of the weights: what a forward pass takes beside them
LOGITS = 4  # float32 copies of a window's logits at a time


def quick_check(config: Config, report: Report) -> Check:
    """Measure the result of a run beside its original, one model in memory at a time.

    It reads text of the same source that the run did not read, and never more than a sixteenth of the run's tokens or
    four windows. A check that is not possible, or a part of it, has a sentence that says why.
    """
    output = Path(config.output).expanduser()
    form = FORMS[config.form]
    if form.opened_by != "transformers":
        return Check(skipped=f"{form.title} is checked by {form.opened_by}.")
    try:
        with scratch_folder(config.machine.offload_dir) as scratch:
            if kind_of(Checkpoint(output).config) != "causal":
                return Check(skipped="The check asks models that write text; oneshot evaluate measures this one.")
            dense = Checkpoint(locate_checkpoint(config.checkpoint, scratch, config.revision))
            return _measured(config, report, dense, output)
    except (OneshotError, OSError, torch.cuda.OutOfMemoryError) as error:
        return Check(skipped=f"The check was not possible ({printable(str(error))[:LONGEST_REASON]}).")


def _measured(config: Config, report: Report, dense: Checkpoint, output: Path) -> Check:
    device = resolve_device(config.machine.device)
    dtype = resolve_dtype(config.machine.dtype, device)
    vocabulary = int(report.dense_shape["vocab_size"])
    logits = LOGITS * LONGEST_WINDOW * vocabulary * torch.float32.itemsize
    needed = round(LOADED_SHARE * report.stored_parameters["dense"] * dtype.itemsize) + logits
    if needed > _free(config, device):
        return Check(
            skipped=f"The check was left out, because the whole original needs {needed / 2**30:.1f} GiB of memory."
        )
    tokenizer = load_tokenizer(dense.folder)
    windows, source = _held_out(config, report, tokenizer)
    perplexities: dict[str, float] = {}
    answers: dict[str, str] = {}
    unasked = ""
    try:
        question, prompt = _question(tokenizer)
    except CalibrationError as error:
        question, prompt, unasked = "", None, f"Nothing was asked ({printable(str(error))[:LONGEST_REASON]})."
    for name, folder in (("dense", dense.folder), ("compressed", output)):
        model = _opened(folder, device, dtype)
        if windows is not None:
            perplexities[name], _ = perplexity(model, windows)
        if prompt is not None:
            answers[name] = _answer(model, tokenizer, prompt)
        del model
    if windows is None:
        return Check(question=question, answers=answers, skipped=unasked)
    return Check(source, windows.numel(), perplexities, question, answers, unasked)


def _opened(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the model of a folder. Raises `OutputError` if transformers does not open it."""
    try:
        return load_model(folder, device=device, dtype=dtype)
    except (OneshotError, OSError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:  # transformers raises many unrelated types; the cause is named and chained
        raise OutputError(f"transformers does not open {folder}: {cause(error)}") from error


def _free(config: Config, device: torch.device) -> int:
    """Return the bytes that the check may take beside what the process holds."""
    import psutil

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if config.machine.max_memory_bytes is not None:
        return config.machine.max_memory_bytes - psutil.Process().memory_info().rss
    return int(psutil.virtual_memory().available)


def _held_out(config: Config, report: Report, tokenizer: Any) -> tuple[torch.Tensor | None, str]:
    """Return windows `(K, length)` of the first source that the run did not read, and its name; None without any."""
    options = config.text
    if report.calibration is None:
        return None, ""
    for source, count in shares(options.num_sequences, split_sources(options.calibration)).items():
        if source == SELF or has_tokens(source):
            continue
        more = max(1, min(MOST_WINDOWS, options.num_sequences // CHECKED_SHARE))
        ids = load_text(
            source, tokenizer, num_sequences=count + more, sequence_length=options.sequence_length, seed=config.seed
        ).token_ids
        alone = count == options.num_sequences
        if len(ids) > count and (not alone or token_hash(ids[:count]) == report.calibration["token_hash"]):
            return ids[count:, :LONGEST_WINDOW].contiguous(), source
    return None, ""


def _question(tokenizer: Any) -> tuple[str, torch.Tensor]:
    """Return what both models are asked, and its tokens `(1, length)`, int64.

    Raises `CalibrationError` if the chat template does not write it within bounds.
    """
    if not tokenizer.chat_template:
        return OPENING, tokenizer(OPENING, return_tensors="pt")["input_ids"]
    chat, arguments = [{"role": "user", "content": QUESTION}], {"add_generation_prompt": True}
    text = rendered(tokenizer, chat, arguments, "a question", MOST_LETTERS)
    return QUESTION, tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]


@torch.inference_mode()
def _answer(model: Any, tokenizer: Any, prompt: torch.Tensor) -> str:
    """Return what a model writes greedily, in at most `ANSWER_TOKENS` tokens."""
    ids = prompt.to(model.device)
    mask = torch.ones_like(ids)
    try:
        written = model.generate(ids, attention_mask=mask, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    except (TypeError, ValueError, RuntimeError) as error:  # of a generation_config.json that does not fit, for example
        raise CalibrationError(f"{type(model).__name__} does not write an answer ({cause(error)}).") from error
    return str(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)).strip()


def weight_bytes(place: str | os.PathLike[str]) -> int | None:
    """Return the bytes of the weight files of a folder or of a file; None for a name on the hub."""
    path = Path(place).expanduser()
    if path.is_file():
        return path.stat().st_size
    sizes = [file.stat().st_size for pattern in ("*.safetensors", "*.gguf") for file in path.glob(pattern)]
    return sum(sizes) if sizes else None
