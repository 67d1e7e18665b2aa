"""Models and tokenizers that are compared: loading them for inference, their latency, and one text for all."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oneshot.architecture import StackShape
from oneshot.checkpoint import Checkpoint, as_opened, identify, load_whole, name_outputs_, rounds_inputs
from oneshot.checkpoint.safe_files import read_config
from oneshot.errors import CalibrationError
from oneshot.export import model_classes, renamed_ranks, stated_shape
from oneshot.report.display import progress_bar
from oneshot.text import holds_tokenizer, load_tokenizer

LATENCY_ROUNDS = 5


def load_model(folder: Path, *, device: torch.device, dtype: torch.dtype | str) -> Any:
    """Load the model of a local checkpoint for inference; `dtype="auto"` is the stored dtype.

    A checkpoint with a modelling file is read by this package's own class. The file in the folder is not run. Weights
    that were quantised are dequantised, but where linears of compressed-tensors also round what they read.
    """
    config = as_opened(read_config(folder))
    _, model_class = model_classes(config)
    older, stored = renamed_ranks(config), Checkpoint(folder)
    model: Any
    if older.keys() & stored.shapes.keys():
        weights = {older.get(name, name): tensor for name, tensor in stored.read(stored.shapes).items()}
        own = model_class.config_class.from_pretrained(folder, local_files_only=True)
        model = model_class.from_pretrained(None, config=own, state_dict=weights, dtype=dtype)
    elif rounds_inputs(config):
        model = model_class.from_pretrained(folder, local_files_only=True, dtype=dtype)
    else:
        model = load_whole(model_class, folder, dtype=dtype)
    name_outputs_(model)
    _save_with_code(model)
    return model.to(device).eval()


def _save_with_code(model: Any) -> None:
    """Let `save_pretrained` of a model with a modelling file also write that file, as if transformers had opened it."""
    for auto_class, name in (getattr(model.config, "auto_map", None) or {}).items():
        for own in (type(model.config), type(model)):
            if own.__name__ == name.rpartition(".")[2]:
                own.register_for_auto_class(auto_class)


@torch.inference_mode()
def measure_latency(
    models: Sequence[Any], token_ids: torch.Tensor, *, decode_tokens: int, rounds: int = LATENCY_ROUNDS
) -> list[tuple[float, float]]:
    """Return median seconds of one prefill of `token_ids (n, L)` and of one decoding step, for each model.

    The models take turns in every round, so noise of the machine affects all of them.
    """
    prefills: list[list[float]] = [[] for _ in models]
    decodes: list[list[float]] = [[] for _ in models]
    for _ in progress_bar(range(rounds + 1), "timing", unit="round"):
        for position, model in enumerate(models):
            ids = token_ids.to(next(model.parameters()).device)
            output, seconds = _timed(partial(model, ids, use_cache=True, logits_to_keep=1))
            prefills[position].append(seconds)
            cache, step = cached(output), ids[:, -1:]
            started = time.perf_counter()
            for _ in range(decode_tokens):
                step = model(step, **cache, use_cache=True).logits[:, -1:].argmax(-1)
            step.tolist()  # waits for the device
            decodes[position].append((time.perf_counter() - started) / decode_tokens)
    # the first round warms up
    return [
        (statistics.median(prefill[1:]), statistics.median(decode[1:]))
        for prefill, decode in zip(prefills, decodes, strict=True)
    ]


def cached(output: Any) -> dict[str, Any]:
    """Return the argument by which a call goes on from the output of another: its cache."""
    name = "cache" if "cache" in output else "past_key_values"  # as transformers had it before 5.24, and has until 5.40
    return {name: output[name]}


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - started


def refuse_other_tokenizers(
    names: Sequence[str], checkpoints: Sequence[Checkpoint], tokenizer: Any, tokens: Iterable[int]
) -> None:
    """Raise `CalibrationError` if a token id means different text in two of the models.

    Models that lie without a tokenizer are taken to have the first one's, which is `tokenizer`.
    """
    ids = sorted(set(tokens))
    for name, checkpoint in zip(names[1:], checkpoints[1:], strict=True):
        if not holds_tokenizer(checkpoint.folder):
            continue
        if load_tokenizer(checkpoint.folder).convert_ids_to_tokens(ids) != tokenizer.convert_ids_to_tokens(ids):
            raise CalibrationError(
                f"The tokenizers of {names[0]} and {name} differ, so the same numbers are "
                "other texts to the two models; compare models of one tokenizer, or evaluate each alone."
            )


def sizes_of(checkpoint: Checkpoint) -> tuple[StackShape, int]:
    """Return the sizes of a checkpoint, and how many learned positions its tokens may have; 0 without a table of them.

    A checkpoint with layers of different sizes states them itself. The table of a stock model may have unused rows.
    """
    stated = stated_shape(checkpoint.config)
    if stated is not None:
        return stated, stated.num_positions
    shape = identify(checkpoint).shape
    return shape.stack(), shape.num_positions
