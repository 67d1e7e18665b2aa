"""From documents to packed token sequences, with a content hash."""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oneshot.errors import CalibrationError, cause
from oneshot.text.sources import iter_documents

logger = logging.getLogger(__name__)


def token_hash(token_ids: torch.Tensor) -> str:
    """Return the SHA-256 of int64 tokens."""
    return hashlib.sha256(token_ids.numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Text:
    """Packed token sequences `(num_sequences, sequence_length)`, int64, and the name of their source."""

    token_ids: torch.Tensor
    source: str

    @property
    def token_hash(self) -> str:
        """Return the SHA-256 of the tokens' bytes."""
        return token_hash(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer that is stored beside the weights. Raises `CalibrationError` without one."""
    from transformers import AutoTokenizer

    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise CalibrationError(f"{folder} does not hold a tokenizer; copy the model's tokenizer files there.")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the readers of tokenizers raise many unrelated types; the cause is named and chained
        raise CalibrationError(
            f"The tokenizer in {folder} cannot be read ({cause(error)}); copy the model's files again."
        ) from error


def special_tokens(tokenizer: Any, vocab_size: int) -> list[int]:
    """Return the tokens that mark structure, such as a chat's turns."""
    marks = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return [mark for mark in marks if mark < vocab_size]


def load_text(source: str, tokenizer: Any, *, num_sequences: int, sequence_length: int, seed: int) -> Text:
    """Read, shuffle and tokenise the documents of a source, join them and cut them into sequences.

    Args:
        source: as in `iter_documents`.
        num_sequences: at most this many sequences; fewer, with a warning, if the text is shorter.
        sequence_length: tokens in each.

    Returns:
        `token_ids` int64 `(num_sequences, sequence_length)`, the same for the same seed and text.

    Raises `CalibrationError` if the source cannot be read or holds less than one sequence.
    """
    documents = iter_documents(source, seed)
    token_ids = pack(documents, tokenizer, num_sequences=num_sequences, sequence_length=sequence_length, source=source)
    if len(token_ids) < num_sequences:
        logger.warning("%s holds %d sequences of the %d asked for.", source, len(token_ids), num_sequences)
    return Text(token_ids, source)


def split_sources(calibration: str) -> list[str]:
    """Split `"c4+self"` into `["c4", "self"]`; plus signs in the name of an existing file do not split it."""
    sources, parts = [], calibration.split("+")
    while parts:
        files = [count for count in range(2, len(parts) + 1) if Path("+".join(parts[:count])).exists()]
        count = max(files, default=1)
        sources.append("+".join(parts[:count]))
        parts = parts[count:]
    return sources


def shares(num_sequences: int, sources: Sequence[str]) -> list[int]:
    """Return how many sequences each source gives: equally many, the first ones one more if that does not divide.

    Raises `CalibrationError` if there are fewer sequences than sources.
    """
    least, more = divmod(num_sequences, len(sources))
    if least == 0:
        raise CalibrationError(
            f"{num_sequences} sequences are too few for the {len(sources)} sources {' and '.join(sources)}; "
            "give more --num-sequences."
        )
    return [least + (number < more) for number in range(len(sources))]


def mix(parts: Sequence[Text], seed: int) -> Text:
    """Return the sequences of several sources in one seeded random order, so that any first part has all kinds."""
    if len(parts) == 1:
        return parts[0]
    together = torch.cat([part.token_ids for part in parts])
    token_ids = together[torch.randperm(len(together), generator=torch.Generator().manual_seed(seed))]
    return Text(token_ids, "+".join(part.source for part in parts))


def pack(
    documents: Iterable[str], tokenizer: Any, *, num_sequences: int | None, sequence_length: int, source: str
) -> torch.Tensor:
    """Join tokenised documents and cut them into `(num_sequences, sequence_length)`; None takes all of them."""
    needed = None if num_sequences is None else num_sequences * sequence_length
    token_ids: list[int] = []
    for document in documents:
        try:
            token_ids.extend(tokenizer(document + "\n\n", verbose=False)["input_ids"])
        except Exception as error:  # tokenizers raise many unrelated types; the cause is named and chained
            raise CalibrationError(
                f"The tokenizer cannot take the text of {source} ({cause(error)}); copy the model's files again."
            ) from error
        if needed is not None and len(token_ids) >= needed:
            break
    complete = len(token_ids) // sequence_length
    if complete == 0:
        raise CalibrationError(
            f"{source} holds {len(token_ids)} tokens, less than one sequence of {sequence_length}; "
            "give more text or a smaller --sequence-length."
        )
    if num_sequences is not None:
        complete = min(complete, num_sequences)
    return torch.tensor(token_ids[: complete * sequence_length], dtype=torch.int64).view(complete, sequence_length)
