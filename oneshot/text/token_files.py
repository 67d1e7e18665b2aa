"""Calibration text that is tokens already: a `.safetensors` file with `input_ids` `(sequences, length)`."""

import logging
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from oneshot.errors import CalibrationError, cause
from oneshot.text.packing import Text

logger = logging.getLogger(__name__)

TOKENS, SUFFIX = "input_ids", ".safetensors"


def save_token_ids(token_ids: torch.Tensor, path: Path) -> None:
    """Write token ids `(sequences, length)` of any integer dtype.

    Raises `CalibrationError` for another shape or dtype, and for no tokens.
    """
    is_integer = not token_ids.is_floating_point() and not token_ids.is_complex() and token_ids.dtype != torch.bool
    if token_ids.ndim != 2 or not is_integer or token_ids.numel() == 0:
        shape = tuple(token_ids.shape)
        raise CalibrationError(
            f"Token ids are {token_ids.dtype} of shape {shape}; give integers of shape (sequences, length)."
        )
    save_file({TOKENS: token_ids.to("cpu", torch.int64).contiguous()}, path)


def has_tokens(source: str) -> bool:
    """Return whether a source is a file of tokens, which needs no tokenizer."""
    return Path(source).suffix == SUFFIX


def load_token_ids(source: str, *, num_sequences: int, sequence_length: int, seed: int) -> Text:
    """Return sequences of a file of tokens in a seeded random order, each cut to `sequence_length`.

    Raises `CalibrationError` for a file that cannot be read, and for sequences that are shorter.
    """
    try:
        with safe_open(source, framework="pt") as file:
            token_ids = file.get_tensor(TOKENS)
    except (OSError, SafetensorError) as error:
        raise CalibrationError(
            f"{source} cannot be read as tokens ({cause(error)}); give a safetensors file with {TOKENS}."
        ) from error
    if token_ids.ndim != 2 or token_ids.dtype != torch.int64 or token_ids.shape[1] < sequence_length:
        raise CalibrationError(
            f"{source} holds {token_ids.dtype} of shape {tuple(token_ids.shape)}; give int64 of shape (sequences, "
            f"length) with a length of at least {sequence_length}, or a smaller --sequence-length."
        )
    if int(token_ids.min()) < 0:
        raise CalibrationError(f"{source} holds the negative token {int(token_ids.min())}; leave out the padding.")
    if len(token_ids) < num_sequences:
        logger.warning("%s holds %d sequences of the %d asked for.", source, len(token_ids), num_sequences)
    order = torch.randperm(len(token_ids), generator=torch.Generator().manual_seed(seed))
    return Text(token_ids[order[:num_sequences], :sequence_length].contiguous(), source)
