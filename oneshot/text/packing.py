"""From documents to packed token sequences, with a content hash."""

import hashlib
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from oneshot.errors import CalibrationError, cause
from oneshot.text.chats import ChatRenderer, added_start
from oneshot.text.files import exists
from oneshot.text.sources import iter_documents

logger = logging.getLogger(__name__)

SHOWN_SOURCES = 4  # in a sentence
NO_ROWS = slice(0, 0)  # of a batch that is not placed yet
UNUSED = re.compile(r"unused|reserved")  # in names such as <unused7> and <|reserved_special_token_7|>


def warn_if_long(sequence_length: int, positions: int | None, name: str) -> None:
    """Warn if sequences are longer than those that a model was made for, which rotary positions allow.

    `positions`: of its config, None or 0 if that states none. `name`: what the model is called.
    """
    if positions and sequence_length > positions:
        logger.warning(
            "--sequence-length %d is beyond the %d positions that %s is made for; give a smaller one.",
            sequence_length,
            positions,
            name,
        )


def token_hash(token_ids: torch.Tensor) -> str:
    """Return the SHA-256 of int64 tokens."""
    return hashlib.sha256(token_ids.numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class Batch:
    """Sequences of one length that pass a layer together.

    Attributes:
        rows: their tokens among all tokens of a part of the text.
        token_ids: int64 `(sequences, length)`. token_types: int64 of the same shape; None for single texts.
        decoder: what a decoder reads beside these sequences, also of one length. source: the sequences of the source,
            in a decoder's own batch.
    """

    rows: slice
    token_ids: torch.Tensor
    token_types: torch.Tensor | None = None
    decoder: "Batch | None" = None
    source: "Batch | None" = None


@dataclass(frozen=True)
class Text:
    """Token sequences `(num_sequences, longest)`, int64, and the name of their source.

    Packed sequences are all of one length. Examples for an encoder have their own `lengths`, and equally long ones
    follow each other, so that they can pass a layer together without padding.

    Attributes:
        lengths: int64 `(num_sequences,)`; None if all tokens count. token_types: which text of a pair a token is of,
            as `token_ids`; None for single texts. decoder: what a decoder reads beside each sequence; it has `lengths`.
    """

    token_ids: torch.Tensor
    source: str
    lengths: torch.Tensor | None = None
    token_types: torch.Tensor | None = None
    decoder: "Text | None" = None

    @property
    def token_hash(self) -> str:
        """Return the SHA-256 of the tokens' bytes."""
        parts = [self.token_ids, self.lengths, self.token_types]
        if self.decoder is not None:
            parts += [self.decoder.token_ids, self.decoder.lengths]
        return token_hash(torch.cat([part.flatten() for part in parts if part is not None]))

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all sequences, a decoder's included."""
        own = self.token_ids.numel() if self.lengths is None else int(self.lengths.sum())
        return own if self.decoder is None else own + self.decoder.num_tokens

    @property
    def num_sequences(self) -> int:
        return len(self.token_ids)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence."""
        return self.token_ids.shape[1]

    def part(self, sequences: slice) -> "Text":
        """Return some of the sequences."""
        lengths, types = self.lengths, self.token_types
        return Text(
            self.token_ids[sequences],
            self.source,
            None if lengths is None else lengths[sequences],
            None if types is None else types[sequences],
            None if self.decoder is None else self.decoder.part(sequences),
        )

    def first(self, num_tokens: int) -> "Text":
        """Return the first sequences that together have at least so many tokens, or all."""
        if self.lengths is None:
            return self.part(slice(-(-num_tokens // self.longest)))
        before = self.lengths.cumsum(0) - self.lengths
        return self.part(slice(int((before < num_tokens).sum())))

    def last(self, num_sequences: int) -> "Text":
        """Return the last sequences of one length, at most half of all: so many, or more that are shorter."""
        count = num_sequences
        if self.lengths is not None:
            length = int(self.lengths[-1])
            alike = int((self.lengths == length).flip(0).long().cumprod(0).sum())
            count = min(alike, num_sequences * self.longest // length)
        return self.part(slice(self.num_sequences - max(1, min(count, self.num_sequences // 2)), None))

    def batches(self, size: int) -> list[Batch]:
        """Return all sequences in batches of at most `size` of the longest ones, or as many tokens of shorter ones.

        All sequences of a batch have one length, and so have those that a decoder reads beside them.
        """
        lengths = self._length_list()
        beside = [0] * len(lengths) if self.decoder is None else self.decoder._length_list()
        longest = self.longest if self.decoder is None else max(self.longest, self.decoder.longest)
        listed, start = list[Batch](), 0
        while start < len(lengths):
            length, decoder_length = lengths[start], beside[start]
            limit = start + max(1, size * longest // max(length, decoder_length))
            stop = start + 1
            while stop < min(limit, len(lengths)) and (lengths[stop], beside[stop]) == (length, decoder_length):
                stop += 1
            types = None if self.token_types is None else self.token_types[start:stop, :length]
            read = None
            if self.decoder is not None:
                read = Batch(NO_ROWS, self.decoder.token_ids[start:stop, :decoder_length])
            listed.append(Batch(NO_ROWS, self.token_ids[start:stop, :length], types, decoder=read))
            start = stop
        return placed(listed)

    def _length_list(self) -> list[int]:
        return [self.longest] * self.num_sequences if self.lengths is None else self.lengths.tolist()


def placed(batches: Iterable[Batch]) -> list[Batch]:
    """Return batches whose rows start at 0 and follow each other, and so do their decoders' rows."""
    listed, row, decoder_row = list[Batch](), 0, 0
    for batch in batches:
        own = replace(batch, rows=slice(row, row + batch.token_ids.numel()))
        row = own.rows.stop
        if batch.decoder is not None:
            rows = slice(decoder_row, decoder_row + batch.decoder.token_ids.numel())
            own = replace(own, decoder=replace(batch.decoder, rows=rows, source=own))
            decoder_row = rows.stop
        listed.append(own)
    return listed


def num_rows(batches: Sequence[Batch]) -> int:
    """Return the rows of `placed` batches together; 0 without batches."""
    return batches[-1].rows.stop if batches else 0


def special_tokens(tokenizer: Any, vocab_size: int) -> list[int]:
    """Return the tokens that mark structure, such as a chat's turns, in ascending order.

    They are the tokens that the tokenizer adds to its words, without blanks, and without those whose name says that
    nothing uses them, unless the chat template or the tokenizer itself names one.
    """
    template = str(tokenizer.chat_template)
    marks = set(tokenizer.all_special_ids)
    for number, token in tokenizer.added_tokens_decoder.items():
        name = token.content.replace("\u2581", " ").strip()
        if name and (name in template or not UNUSED.search(name)):
            marks.add(number)
    return sorted(mark for mark in marks if mark < vocab_size)


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
    documents = iter_documents(source, seed, ChatRenderer(tokenizer))
    token_ids = pack(documents, tokenizer, num_sequences=num_sequences, sequence_length=sequence_length, source=source)
    if len(token_ids) < num_sequences:
        logger.warning("%s holds %d sequences of the %d asked for.", source, len(token_ids), num_sequences)
    return Text(token_ids, source)


def tokenise(tokenizer: Any, source: str, *texts: Any, **options: Any) -> Any:
    """Return what a tokenizer makes of texts. Raises `CalibrationError` with their source if it cannot take them."""
    try:
        return tokenizer(*texts, verbose=False, **options)
    except Exception as error:  # tokenizers raise many unrelated types; the cause is named and chained
        raise CalibrationError(
            f"The tokenizer cannot take the text of {source} ({cause(error)}); copy the model's files again."
        ) from error


def split_sources(calibration: str) -> list[str]:
    """Split `"c4+self"` into `["c4", "self"]`; plus signs in the name of an existing file do not split it.

    Raises `CalibrationError` for a source without a name.
    """
    sources, parts = [], calibration.split("+")
    while parts:
        files = [count for count in range(2, len(parts) + 1) if exists("+".join(parts[:count]))]
        count = max(files, default=1)
        sources.append("+".join(parts[:count]))
        parts = parts[count:]
    if not all(sources):
        raise CalibrationError(f"--calibration {calibration!r} has a source without a name; give one, such as builtin.")
    return sources


def shares(num_sequences: int, sources: Sequence[str]) -> dict[str, int]:
    """Return how many sequences each source gives: equally many, the first ones one more if that does not divide.

    A source that is named twice gives twice as many, all of them different.

    Raises `CalibrationError` if there are fewer sequences than names of sources.
    """
    least, more = divmod(num_sequences, len(sources))
    if least == 0:
        named = " and ".join([*sources[:SHOWN_SOURCES], *["so on"] * (len(sources) > SHOWN_SOURCES)])
        raise CalibrationError(
            f"{num_sequences} sequences are too few for the {len(sources)} sources {named}; give more --num-sequences, "
            "or join files."
        )
    counts = dict.fromkeys(sources, 0)
    for number, source in enumerate(sources):
        counts[source] += least + (number < more)
    return counts


def mix(parts: Sequence[Text], seed: int, name: str) -> Text:
    """Return the sequences of several sources in one seeded random order, so that any first part has all kinds.

    `name`: of the mixture.
    """
    if len(parts) == 1:
        return parts[0]
    assert all(part.lengths is None for part in parts)
    together = torch.cat([part.token_ids for part in parts])
    token_ids = together[torch.randperm(len(together), generator=torch.Generator().manual_seed(seed))]
    return Text(token_ids, name)


def pack(
    documents: Iterable[str | list[int]],
    tokenizer: Any,
    *,
    num_sequences: int | None,
    sequence_length: int,
    source: str,
) -> torch.Tensor:
    """Join documents, texts or tokens, and cut them into `(num_sequences, sequence_length)`; None takes all of them.

    A window begins with BOS if the tokenizer puts it before texts (`cut_windows`).
    """
    needed = None if num_sequences is None else num_sequences * sequence_length
    token_ids: list[int] = []
    for document in documents:
        tokens = document if isinstance(document, list) else tokenise(tokenizer, source, document + "\n\n")["input_ids"]
        token_ids.extend(tokens)
        if needed is not None and len(token_ids) >= needed:
            break
    windows = cut_windows(token_ids[:needed], sequence_length, added_start(tokenizer))
    if not windows:
        raise CalibrationError(
            f"{source} holds {len(token_ids)} tokens, less than one sequence of {sequence_length}; "
            "give more text or a smaller --sequence-length."
        )
    return torch.tensor(windows[:num_sequences], dtype=torch.int64)


def cut_windows(token_ids: list[int], length: int, start: int | None) -> list[list[int]]:
    """Cut tokens into windows of `length`; each begins with the token `start`, which is added where it is not there.

    Models that were trained with BOS before every text predict badly without it. `start=None`: the tokenizer adds none,
    and the windows are the tokens.
    """
    windows: list[list[int]] = []
    place = 0
    while place < len(token_ids):
        added = [] if start is None or token_ids[place] == start else [start]
        window = added + token_ids[place : place + length - len(added)]
        if len(window) < length:
            break
        windows.append(window)
        place += length - len(added)
    return windows
