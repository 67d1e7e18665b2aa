"""Rows of token ids, from files and from memory: which of their tokens are text, and which only fill a row up."""

import logging
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from oneshot.errors import CalibrationError

logger = logging.getLogger(__name__)

TOKENS, MASK, LABELS = "input_ids", "attention_mask", "labels"
UNLABELLED = -100  # of padding, and of prompts
OTHER_MASKS = ("mask", "attn_mask", "input_mask", "padding_mask", "pad_mask", "key_padding_mask")

Fillings = Mapping[int, int]  # a token that fills rows up -> so many of it in a row, and more, are not text


def fillings_of(tokenizer: Any, stated_pad: Any = None) -> Fillings:
    """Return the tokens that may fill up rows that have no mask.

    Only two and more of a token that also ends texts are padding, because one is the end of a text.

    Args:
        tokenizer: None without one. stated_pad: `pad_token_id` of the model's config.
    """
    ends = {getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")}
    pads = {getattr(tokenizer, "pad_token_id", None), stated_pad}
    fillings = {token: 1 for token in pads - ends if isinstance(token, int) and token >= 0}
    return fillings | {token: 2 for token in ends if isinstance(token, int)}


def text_tokens(row: Mapping[str, Any], source: str, fillings: Fillings) -> torch.Tensor:
    """Return the tokens of a row that are text, int64 `(length,)`.

    An `attention_mask` says which are. Without one, a token of `fillings` is padding where the row begins or ends with
    it, and so is one token several times without labels.

    Raises `CalibrationError` for what is not token ids, and for a mask that is not understood.
    """
    ids = _vector(row.get(TOKENS), source, TOKENS)
    if row.get(MASK) is None:
        other = next((name for name in OTHER_MASKS if row.get(name) is not None), None)
        if other is not None:
            raise CalibrationError(f"{source} has a column {other}; name it {MASK}, with 1 for text and 0 for padding.")
        if row.get(LABELS) is not None:
            fillings = _unlabelled(ids, _vector(row[LABELS], source, LABELS)) | dict(fillings)
        return _without_fillings(ids, fillings)
    mask = _vector(row[MASK], source, MASK, floats=True)
    if len(mask) != len(ids) or not bool((mask >= 0).all()):
        raise CalibrationError(
            f"{source} has an {MASK} that does not fit its {TOKENS}; give 1 for every token of text and 0 for padding."
        )
    return ids[mask != 0]


def _vector(values: Any, source: str, name: str, *, floats: bool = False) -> torch.Tensor:
    """Return numbers as a tensor, int64 or float32."""
    try:
        tensor = torch.as_tensor(values).cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CalibrationError(f"{source} holds {reprlib.repr(values)} where {name} should be.") from error
    if tensor.ndim == 2 and len(tensor) == 1:  # a batch of one, as return_tensors makes it
        tensor = tensor[0]
    whole = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
    if tensor.ndim != 1 or (not whole and not floats and tensor.numel() > 0):
        raise CalibrationError(
            f"{source} holds {name} as {tensor.dtype} of shape {tuple(tensor.shape)}; give integers of shape (length,)."
        )
    return tensor.float() if floats else tensor.long()


def _unlabelled(ids: torch.Tensor, labels: torch.Tensor) -> dict[int, int]:
    """Return the tokens that a row begins or ends with at least twice, without labels: it is filled up with them."""
    ends = ((slice(2), 0), (slice(-2, None), -1))
    return {
        int(ids[place]): 1
        for pair, place in ends
        if len(ids) == len(labels) > 1 and bool((labels[pair] == UNLABELLED).all()) and len(ids[pair].unique()) == 1
    }


def _without_fillings(ids: torch.Tensor, fillings: Fillings) -> torch.Tensor:
    for token, least in fillings.items():
        other = (ids != token).nonzero().flatten()
        first, last = (int(other[0]), int(other[-1]) + 1) if len(other) else (len(ids), len(ids))
        kept = least - 1  # of a token that ends texts, one stays
        if first >= least:
            ids, last = ids[first - kept :], last - first + kept
        if len(ids) - last >= least:
            ids = ids[: last + kept]
    return ids


def text_rows(columns: Mapping[str, torch.Tensor], source: str, fillings: Fillings) -> list[torch.Tensor]:
    """Return the text of every row of tensors `(rows, length)`, without rows that have none.

    Raises as `text_tokens`, and for columns of different shapes.
    """
    shape = columns[TOKENS].shape
    for name, tensor in columns.items():
        if tensor.shape != shape:
            raise CalibrationError(f"{source} holds {name} of shape {tuple(tensor.shape)} beside {tuple(shape)}.")
    rows = (
        text_tokens({name: tensor[number] for name, tensor in columns.items()}, source, fillings)
        for number in range(shape[0])
    )
    found = [row for row in rows if len(row)]
    given, kept = columns[TOKENS].numel(), sum(map(len, found))
    if kept < given and MASK not in columns:
        logger.warning(
            "%d of the %d tokens of %s fill its rows up and are left out; give an %s to say which are text.",
            given - kept,
            given,
            source,
            MASK,
        )
    return found


def joined(rows: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """Return rows of several lengths one after the other, cut to `(sequences, length)`; the rest is left out."""
    together = torch.cat(list(rows)) if rows else torch.zeros(0, dtype=torch.int64)
    return together[: len(together) // length * length].view(-1, length)
