"""Sources and targets for an encoder–decoder: given pairs, or texts with gaps and what fills them."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from oneshot.errors import CalibrationError, cause
from oneshot.text.packing import Text, shares
from oneshot.text.sources import iter_pairs
from oneshot.text.span_corruption import SHORTEST, Example, corrupt_spans, longest_text

logger = logging.getLogger(__name__)

TARGET_COLUMN = "target"
MOST_SENTINELS = 100


def load_pairs(
    sources: Sequence[str], tokenizer: Any, *, num_tokens: int, longest: int, seed: int, start_token: int
) -> Text:
    """Read and tokenise sources and targets: `{"text", "target"}`, or texts alone, which get gaps (`span_corruption`).

    Examples keep the tokenizer's special tokens. Pairs are cut to `longest` tokens on either side; longer texts become
    several examples. Examples whose sources and targets are both equally long follow each other, so that they pass
    a layer together without padding: no mask is needed anywhere, and statistics are of real tokens only. Lengths have
    a seeded order; the one with the most tokens is last.

    Args:
        sources: each as in `iter_documents`; they give equally many tokens. num_tokens: at most so many, sources and
            targets together; fewer, with a warning, if the text is shorter. start_token: of a decoder.

    Returns:
        A text whose `decoder` has the start token and all tokens of the target but the last.

    Raises `CalibrationError` if a source cannot be read or holds nothing, and if the tokenizer has no sentinels for a
    text without targets.
    """
    by_lengths: dict[tuple[int, int], list[Example]] = {}
    generator = torch.Generator().manual_seed(seed)
    for source, wanted in zip(sources, shares(num_tokens, sources), strict=True):
        for read, target in _examples(source, tokenizer, wanted, longest, seed, generator):
            example = read, [start_token, *target[:-1]]
            by_lengths.setdefault((len(read), len(example[1])), []).append(example)
    most = max(by_lengths, key=lambda lengths: (sum(lengths) * len(by_lengths[lengths]), lengths))
    ordered = sorted(by_lengths)
    order = torch.randperm(len(ordered), generator=torch.Generator().manual_seed(seed)).tolist()
    runs = sorted((ordered[place] for place in order), key=lambda lengths: lengths == most)
    examples = [example for lengths in runs for example in by_lengths[lengths]]
    name = "+".join(sources)
    return _text([read for read, _ in examples], name, _text([target for _, target in examples], name))


def _text(rows: list[list[int]], source: str, decoder: Text | None = None) -> Text:
    tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
    lengths = torch.tensor([len(row) for row in rows])
    return Text(nn.utils.rnn.pad_sequence(tensors, batch_first=True), source, lengths, decoder=decoder)


def _examples(
    source: str, tokenizer: Any, num_tokens: int, longest: int, seed: int, generator: torch.Generator
) -> list[Example]:
    """Return the first examples of a source with at most so many tokens together, but at least one."""
    examples: list[Example] = []
    total = 0
    for text, target in iter_pairs(source, seed, second=TARGET_COLUMN):
        for example in _encode(tokenizer, text, target, longest, source, generator):
            total += len(example[0]) + len(example[1])
            if total > num_tokens and examples:
                return examples
            examples.append(example)
    if not examples:
        raise CalibrationError(f"{source} holds no text; give one record with text and target per line.")
    logger.warning("%s holds %d tokens of the %d asked for.", source, total, num_tokens)
    return examples


def _encode(
    tokenizer: Any, text: str, target: str | None, longest: int, source: str, generator: torch.Generator
) -> Iterator[Example]:
    """Yield the tokens of a source and its target, or of a text with gaps, piece by piece, and what fills these."""
    try:
        if target is not None:
            read, written = (
                tokenizer(side, truncation=True, max_length=longest, verbose=False)["input_ids"]
                for side in (text, target)
            )
            yield read, written
            return
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception as error:  # tokenizers raise many unrelated types; the cause is named and chained
        raise CalibrationError(
            f"The tokenizer cannot take the text of {source} ({cause(error)}); copy the model's files again."
        ) from error
    sentinels = _sentinels(tokenizer)
    if not sentinels or tokenizer.eos_token_id is None:
        raise CalibrationError(
            f"{source} has a text without a target, and the tokenizer has no <extra_id_0> to mark gaps in it; give "
            "records with text and target."
        )
    length = max(SHORTEST, min(longest, longest_text(len(sentinels))))
    for start in range(0, len(tokens), length):
        piece = tokens[start : start + length]
        if len(piece) >= SHORTEST:
            yield corrupt_spans(piece, sentinels, tokenizer.eos_token_id, generator)


def _sentinels(tokenizer: Any) -> list[int]:
    """Return the tokens that stand for gaps, in the order of use."""
    vocabulary = tokenizer.get_vocab()
    names = (f"<extra_id_{number}>" for number in range(MOST_SENTINELS))
    return [vocabulary[name] for name in names if name in vocabulary]
