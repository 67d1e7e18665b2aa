"""Extractive question answering: exact match and F1, as SQuAD 1.1 defines them."""

import re
import reprlib
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from oneshot.errors import CalibrationError
from oneshot.evaluation.examples import Examples, Inputs, Reading, text_of
from oneshot.text import tokenise

STRIDE = 128  # tokens that two windows of a long context share
LONGEST_ANSWER = 30  # tokens
COLUMNS = {"context": "context", "question": "question", "answers": "answers"}
ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class Answers(Examples):
    """Examples `context, question, answers`; long contexts are read in overlapping windows.

    Attributes:
        inputs: windows. example_of: the example of each window. spans: for each token of a window, where it lies in the
            context, `(first, last + 1)`; None for tokens of the question and special ones.
    """

    inputs: Inputs
    example_of: list[int]
    spans: list[list[tuple[int, int] | None]]
    contexts: list[str]
    answers: list[list[str]]

    @classmethod
    def read(cls, source: str, reading: Reading) -> "Answers":
        rows = reading.rows(source, COLUMNS)
        contexts = [text_of(row, "context", source) for row in rows]
        encoded: list[tuple[list[int], list[int]]] = []
        example_of: list[int] = []
        spans: list[list[tuple[int, int] | None]] = []
        for place, row in enumerate(rows):
            question = text_of(row, "question", source).strip()
            for ids, types, where in _windows(reading, question, contexts[place], source):
                encoded.append((ids, types))
                example_of.append(place)
                spans.append(where)
        return cls(Inputs.of(encoded), example_of, spans, contexts, [_answers(row["answers"], source) for row in rows])

    @property
    def count(self) -> int:
        return len(self.contexts)

    def predict(self, model: Any, batch_size: int) -> list[str]:
        """Return the part of each context that has the largest sum of start and end logits."""
        best = [(-float("inf"), "")] * self.count
        for windows, arguments in self.inputs.batches(model, batch_size):
            output = model(**arguments)
            starts, ends = output.start_logits.double().cpu(), output.end_logits.double().cpu()
            for row, window in enumerate(windows):
                spans, example = self.spans[window], self.example_of[window]
                score, first, last = best_span(starts[row], ends[row], [span is not None for span in spans])
                if score > best[example][0]:
                    start, end = spans[first], spans[last]
                    assert start is not None
                    assert end is not None
                    best[example] = score, self.contexts[example][start[0] : end[1]]
        return [text for _, text in best]

    def numbers(self, texts: list[str], dense: list[str] | None) -> dict[str, float]:
        """Return exact match and F1, each the best over an example's answers, and agreement beside a baseline."""
        scores = [
            (normalised(text) in map(normalised, answers), max(token_f1(text, answer) for answer in answers))
            for text, answers in zip(texts, self.answers, strict=True)
        ]
        numbers = {
            "exact match": sum(exact for exact, _ in scores) / self.count,
            "F1": sum(f1 for _, f1 in scores) / self.count,
        }
        if dense is not None:
            numbers["agreement"] = sum(one == other for one, other in zip(texts, dense, strict=True)) / self.count
        return numbers


def best_span(starts: torch.Tensor, ends: torch.Tensor, allowed: Sequence[bool]) -> tuple[float, int, int]:
    """Return the score, the first and the last token of the span with the largest sum of two logits.

    Args:
        starts, ends: logits `(L,)`, or longer with padding. allowed: for each of the L tokens, if it can be in a span.
    """
    length = len(allowed)
    inside = torch.tensor(allowed)
    scores = starts[:length, None] + ends[None, :length]
    possible = inside[:, None] & inside[None, :]
    possible &= torch.ones(length, length, dtype=torch.bool).triu().tril(LONGEST_ANSWER - 1)
    scores = scores.masked_fill(~possible, -torch.inf)
    place = int(scores.argmax())
    first, last = divmod(place, length)
    return float(scores[first, last]), first, last


def normalised(text: str) -> str:
    """Return a text without capitals, punctuation, articles and additional spaces (SQuAD's official script)."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(ARTICLES.sub(" ", plain).split())


def token_f1(text: str, answer: str) -> float:
    """Return the F1 of the words of a text and of an answer, both normalised."""
    words, wanted = normalised(text).split(), normalised(answer).split()
    common = sum((Counter(words) & Counter(wanted)).values())
    return 2 * common / (len(words) + len(wanted)) if common else 0.0


def _answers(value: Any, source: str) -> list[str]:
    """Return the answers of a row: a text, a list of texts, or SQuAD's record with a list `text`."""
    if isinstance(value, dict):
        value = value.get("text")
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise CalibrationError(
            f"{source} holds the answers {reprlib.repr(value)}; give every question at least one, as a list of texts."
        )
    return texts


def _windows(
    reading: Reading, question: str, context: str, source: str
) -> list[tuple[list[int], list[int], list[tuple[int, int] | None]]]:
    """Return the tokens, types and places in the context of every window that has tokens of the context."""
    tokenizer = reading.tokenizer
    if not tokenizer.is_fast:
        raise CalibrationError("The tokenizer does not say where a token lies in its text; give a tokenizer.json.")
    room = reading.longest - len(tokenizer(question, " ")["input_ids"])
    if room < 1:
        raise CalibrationError(
            f"{source} holds the question {reprlib.repr(question)}, which fills all {reading.longest} tokens; give a "
            "larger --sequence-length or shorter questions."
        )
    encoded = tokenise(
        tokenizer,
        source,
        question,
        context,
        truncation="only_second",
        max_length=reading.longest,
        stride=min(STRIDE, room // 2),
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=True,
    )
    windows = []
    for number, (ids, types) in enumerate(zip(encoded["input_ids"], encoded["token_type_ids"], strict=True)):
        offsets, parts = encoded["offset_mapping"][number], encoded.sequence_ids(number)
        spans = [(*offset,) if part == 1 else None for offset, part in zip(offsets, parts, strict=True)]
        if any(spans):
            windows.append((ids, types, spans))
    if not windows:
        raise CalibrationError(f"{source} holds the context {reprlib.repr(context)} without a token; mend that row.")
    return windows
