"""Calibration text that is tokens already: a `.safetensors` file with `input_ids` `(sequences, length)`."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from oneshot.errors import CalibrationError, cause
from oneshot.text.packing import Text
from oneshot.text.token_rows import LABELS, MASK, OTHER_MASKS, TOKENS, Fillings, joined, text_rows

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"


def save_token_ids(token_ids: torch.Tensor, path: Path) -> None:
    """Write token ids `(sequences, length)` of any integer dtype.

    Raises `CalibrationError` for another shape or dtype, and for no tokens.
    """
    _check(token_ids, "Token ids are")
    save_file({TOKENS: token_ids.to("cpu", torch.int64).contiguous()}, path)


def save_token_rows(rows: Sequence[torch.Tensor], path: Path) -> None:
    """Write rows of tokens, int64 of any lengths but 0, with an attention mask if these differ."""
    ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    save_file({TOKENS: ids} if bool(mask.all()) else {TOKENS: ids, MASK: mask}, path)


def has_tokens(source: str) -> bool:
    """Return whether a source is a file of tokens, which needs no tokenizer."""
    return Path(source).suffix == SUFFIX


def load_token_ids(
    source: str, *, num_sequences: int, sequence_length: int, seed: int, fillings: Fillings | None = None
) -> Text:
    """Return sequences of a file of tokens in a seeded random order, each cut to `sequence_length`.

    Padding is left out (`token_rows`). If rows then have several lengths, or are shorter, they are joined in the order
    of the file and cut to `sequence_length`.

    Raises `CalibrationError` for a file that cannot be read, and for one with less than one sequence.
    """
    try:
        with safe_open(source, framework="pt") as file:
            wanted = {TOKENS, *({MASK, LABELS, *OTHER_MASKS} & {*file.keys()})}
            columns = {name: file.get_tensor(name) for name in sorted(wanted)}
    except (OSError, SafetensorError) as error:
        raise CalibrationError(
            f"{source} cannot be read as tokens ({cause(error)}); give a safetensors file with {TOKENS}."
        ) from error
    _check(columns[TOKENS], f"{source} holds")
    rows = text_rows(columns, source, fillings or {})
    lengths = {len(row) for row in rows}
    are_sequences = len(lengths) == 1 and min(lengths) >= sequence_length
    tokens = torch.stack(rows) if are_sequences else joined(rows, sequence_length)
    if tokens.numel() == 0:
        raise CalibrationError(
            f"{source} holds {sum(map(len, rows))} tokens, less than one sequence of {sequence_length}; "
            "give more text or a smaller --sequence-length."
        )
    if int(tokens.min()) < 0:
        raise CalibrationError(f"{source} holds the negative token {int(tokens.min())}; leave out the padding.")
    if len(tokens) < num_sequences:
        logger.warning("%s holds %d sequences of the %d asked for.", source, len(tokens), num_sequences)
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))
    return Text(tokens[order[:num_sequences], :sequence_length].contiguous(), source)


def _check(token_ids: torch.Tensor, subject: str) -> None:
    is_integer = not token_ids.is_floating_point() and not token_ids.is_complex() and token_ids.dtype != torch.bool
    if token_ids.ndim != 2 or not is_integer or token_ids.numel() == 0:
        raise CalibrationError(
            f"{subject} {token_ids.dtype} of shape {tuple(token_ids.shape)}; give integers of shape (sequences, "
            "length)."
        )
