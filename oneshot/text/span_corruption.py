"""Span corruption: from a text to a source with gaps and a target that fills them, as T5 was trained.

Raffel et al. 2020, section 3.1.4 and appendix of the code: 15 % of the tokens are noise, in spans of three on average.
Every span is replaced by a sentinel in the source, and follows its sentinel in the target.
"""

import torch

from oneshot.text.examples import Example

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
