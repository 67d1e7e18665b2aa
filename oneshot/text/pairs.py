"""Sources and targets for an encoder–decoder: given pairs, or texts with gaps and what fills them."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from oneshot.errors import CalibrationError
from oneshot.text.examples import Example, gathered, padded
from oneshot.text.packing import Text, tokenise
from oneshot.text.sources import iter_pairs

TARGET_COLUMN = "target"
MOST_SENTINELS = 100


def load_pairs(
    sources: Sequence[str], tokenizer: Any, *, num_tokens: int, longest: int, seed: int, start_token: int
) -> Text:
    """Read and tokenise sources and targets: `{"text", "target"}`, or texts alone, which get gaps (`span_corruption`).

    Examples keep the tokenizer's special tokens. Pairs are cut to `longest` tokens on either side; longer texts become
    several examples. They are ordered as in `gathered`, by the lengths of both sides: no mask is needed anywhere, and
    statistics are of real tokens only.

    Args:
        sources: each as in `iter_documents`, with tokens as in `shares`. num_tokens: at most so many, sources and
            targets together; fewer, with a warning, if the text is shorter. start_token: the decoder's first token.

    Returns:
        A text whose `decoder` has the start token and all tokens of the target but the last.

    Raises `CalibrationError` if a source cannot be read or holds nothing, and if the tokenizer has no sentinels for a
    text without targets.
    """
    generator = torch.Generator().manual_seed(seed)

    def read(source: str) -> Iterator[Example]:
        for text, target in iter_pairs(source, seed, second=TARGET_COLUMN):
            for tokens, written in _encode(tokenizer, text, target, longest, source, generator):
                yield tokens, [start_token, *written[:-1]]

    examples = gathered(
        sources,
        read,
        lambda example: (len(example[0]), len(example[1])),
        num_tokens=num_tokens,
        seed=seed,
        record="text and target",
    )
    name = "+".join(sources)
    return _text([tokens for tokens, _ in examples], name, _text([target for _, target in examples], name))


def _text(rows: list[list[int]], source: str, decoder: Text | None = None) -> Text:
    return Text(padded(rows), source, torch.tensor([len(row) for row in rows]), decoder=decoder)


def _encode(
    tokenizer: Any, text: str, target: str | None, longest: int, source: str, generator: torch.Generator
) -> Iterator[Example]:
    """Yield the tokens of a source and its target, or of a text with gaps, piece by piece, and what fills these."""
    if target is not None:
        read, written = (
            tokenise(tokenizer, source, side, truncation=True, max_length=longest)["input_ids"]
            for side in (text, target)
        )
        yield read, written
        return
    tokens = tokenise(tokenizer, source, text, add_special_tokens=False)["input_ids"]
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


NOISE_DENSITY = 0.15
MEAN_SPAN = 3.0
SHORTEST = 8  # tokens of a text that is worth a gap


def longest_text(num_sentinels: int) -> int:
    """Return the tokens of a text whose gaps need so many sentinels."""
    return int(num_sentinels * MEAN_SPAN / NOISE_DENSITY)


def corrupt_spans(tokens: list[int], sentinels: list[int], end: int, generator: torch.Generator) -> Example:
    """Return a source and a target, both with `end` as last token.

    A text of n tokens always has the same number of gaps, so that sources and targets of equal texts are equally long.

    Args:
        tokens: at least `SHORTEST`. sentinels: in the order of use, as many as gaps.
    """
    num_noise = round(len(tokens) * NOISE_DENSITY)
    num_spans = max(1, round(num_noise / MEAN_SPAN))
    noise = _partition(num_noise, num_spans, generator)
    kept = _partition(len(tokens) - num_noise, num_spans, generator)
    source: list[int] = []
    target: list[int] = []
    start = 0
    for sentinel, kept_length, noise_length in zip(sentinels, kept, noise, strict=False):
        gap = start + kept_length
        source += [*tokens[start:gap], sentinel]
        start = gap + noise_length
        target += [sentinel, *tokens[gap:start]]
    return [*source, end], [*target, end]


def _partition(total: int, parts: int, generator: torch.Generator) -> list[int]:
    """Return positive lengths with this sum, every partition equally likely."""
    cuts = (torch.randperm(total - 1, generator=generator)[: parts - 1] + 1).sort().values.tolist()
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]
