"""Calibration text that the model writes itself; it needs no data and covers many kinds of text.

A correction learns the kind of text that it sees (benchmarks/records/experiments.md). So the model continues openings
of many kinds of text on many topics, also in the other languages that it knows, with a short document each.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oneshot.architecture import ModelShape
from oneshot.errors import CalibrationError, cause
from oneshot.machine import ALONE, Workers
from oneshot.text.chats import added_start
from oneshot.text.growing_cache import growing_in_place
from oneshot.text.languages import (
    LONGEST_PASSAGE,
    POSITIONS,
    Language,
    known_languages,
    openings_of,
    passage_nats,
    passages,
)
from oneshot.text.packing import Text, cut_windows

SELF = "self"  # the source whose text the model writes
GENERATED_TOGETHER = 64  # documents on a CPU
LEAST_TOGETHER, MOST_TOGETHER = 8, 512  # on a device
DOCUMENT_TOKENS = 256  # written in each; small models lose the thread soon
OPENING_TOKENS = 32  # of an opening; English ones take fewer
ENDINGS = ("safetensors", "bin")  # of weight files
LARGEST_BLOCK = 512  # probabilities that are added before the blocks are, while a token is drawn
EXPANDED = 2  # copies of a layer's keys and values for every head, which attention with a latent or with sinks makes
OTHER_LANGUAGES = 1 / 3  # of the English openings, at most
CACHE_SHARE = 1.25  # of the KV cache: layers that do not grow in place are copied whenever a token is added

FORMS = (
    "{Topic} (from an encyclopedia):\n\n",
    "Chapter 1: {Topic}\n\n",
    "How to deal with {topic}: first, ",
    "News: {Topic}\n\n",
    "Posted in a forum about {topic}:\n\nHi everyone, ",
    '"{Topic}?" she asked. "',
    "{Topic}. Abstract. In this paper we ",
    "Lecture notes on {topic}\n\n1. ",
    "Review of a book about {topic}\n\n",
    "Frequently asked questions about {topic}\n\nQ: ",
    "Dear Sir, I am writing about {topic}. ",
    "A guide to {topic} for beginners\n\n",
    # the others are code, more than a third of all: without them, a model loses most there
    "# A Python program about {topic}\n\nimport ",
    '"""{Topic}: a Python module."""\n\nclass ',
    "```python\n# a function for {topic}\ndef ",
    "# tests for {topic}\n\nimport pytest\nfrom ",
    "// {Topic} in JavaScript\n\nfunction ",
    "Here is the code of a class for {topic}:\n\n```python\nfrom ",
    "/* {Topic}: a C library */\n#include <",
)
TOPICS = (
    *("the history of a small town", "gardening", "football", "soup", "rivers", "computer networks"),
    *("a king and his war", "bicycles", "a singer", "insects", "a court case", "the kitchen", "programming", "love"),
    *("taxes", "a game", "ships", "the heart", "a train journey", "money", "television", "the weather", "furniture"),
    *("mathematics", "a church", "birds", "medicine", "a school", "the sea", "an election", "music", "space"),
)


def load_safetensors(auto_class: Any, folder: Path, **options: Any) -> Any:
    """Return the model of a local folder of safetensors."""
    return auto_class.from_pretrained(folder, local_files_only=True, use_safetensors=True, **options)


def write_text(
    folder: Path,
    tokenizer: Any,
    *,
    num_sequences: int,
    sequence_length: int,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    max_memory_bytes: int | None,
    together: int = GENERATED_TOGETHER,
    advance: Callable[[float], None] = lambda tokens: None,
    tell: Callable[[str], None] = lambda sentence: None,
    load: Callable[..., Any] = load_safetensors,
    workers: Workers = ALONE,
) -> Text:
    """Let the model continue `openings`, drawn from its own distribution (temperature 1).

    The documents are packed with their openings. The whole model is in memory meanwhile. The same seed, machine and
    thread count give the same text. `together`: documents at once. `advance` receives the number of tokens written,
    `tell` a sentence with the languages other than English. `load(auto_class, folder, **options)`: reads the model.
    `workers`: all of them receive the text, and write parts of it if the free memory holds the model once for each.

    Raises `CalibrationError` if the model does not fit into `max_memory_bytes` (None: the free memory), cannot be
    loaded, or its tokenizer does not accept English text.
    """
    alone = workers.size > 1 and device.type == "cpu"
    alone = alone and not workers.share(0, lambda: weight_bytes(folder) * workers.size <= free_bytes())
    writers = ALONE if alone else workers

    def written() -> list[int]:
        read = passages(tokenizer)
        model = _load(folder, device=device, dtype=dtype, max_memory_bytes=max_memory_bytes, load=load)
        positions = getattr(model.config, "max_position_embeddings", 2 * DOCUMENT_TOKENS)
        longest = max(1, min(DOCUMENT_TOKENS, positions // 2))
        known = writers.share(0, lambda: known_languages(passage_nats(model, read)))
        if known:
            tell(f"the text that the model writes is also in {', '.join(language.name for language in known)}")
        most = min(OPENING_TOKENS, longest)
        beginnings = (_tokens(tokenizer, opening, folder)[:most] for opening in openings(seed, known))
        groups = _groups(beginnings, seed, longest, needed, together)
        jobs = [partial(_continued, model, *group, lambda tokens: advance(tokens * writers.size)) for group in groups]
        written = writers.share_all(jobs, [float(len(drawn_at)) for _, drawn_at in groups])
        return [token for documents in written for document in documents for token in document][:needed]

    needed = num_sequences * sequence_length
    token_ids = workers.share(0, written) if alone else written()
    windows = cut_windows(token_ids, sequence_length, added_start(tokenizer))[:num_sequences]
    return Text(torch.tensor(windows, dtype=torch.int64), SELF)


def _groups(
    beginnings: Iterator[list[int]], seed: int, longest: int, needed: int, together: int
) -> list[tuple[list[list[int]], torch.Tensor]]:
    """Return the documents that are written at once: their `beginnings`, and the levels that tokens are drawn by.

    Together they have at least the `needed` tokens. `longest`: tokens that are written in each.
    """
    groups, num_tokens, every = list[tuple[list[list[int]], torch.Tensor]](), 0, levels(seed, longest)
    while num_tokens < needed:
        count = min(together, -(-(needed - num_tokens) // longest))
        groups.append((list(itertools.islice(beginnings, count)), torch.stack(list(itertools.islice(every, count)))))
        num_tokens += sum(len(beginning) + longest for beginning in groups[-1][0])
    return groups


def weight_bytes(folder: Path) -> int:
    """Return the bytes of a checkpoint's weight files."""
    return sum(path.stat().st_size for ending in ENDINGS for path in folder.glob(f"*.{ending}") if path.is_file())


def free_bytes() -> int:
    """Return the memory that this machine has free."""
    import psutil

    return int(psutil.virtual_memory().available)


def document_bytes(shape: ModelShape, dtype: torch.dtype) -> float:
    """Return the bytes that a document takes while it is written: its keys and values, states, and logits."""
    tokens = OPENING_TOKENS + DOCUMENT_TOKENS
    cache = shape.stack().kv_bytes_per_token(dtype.itemsize) * tokens
    needed = CACHE_SHARE * (cache + shape.state_bytes) + 4 * torch.float32.itemsize * shape.vocab_size
    if shape.latent is None and not shape.sinks:
        return needed
    every_head = shape.num_attention_heads * (shape.query_key_size + shape.head_dim) * dtype.itemsize * tokens
    return needed + EXPANDED * every_head


def passage_bytes(shape: ModelShape, dtype: torch.dtype) -> float:
    """Return the bytes that a passage in a language takes, beside activations: as a document, with all its logits."""
    logits = LONGEST_PASSAGE * dtype.itemsize + 2 * POSITIONS * torch.float32.itemsize
    return document_bytes(shape, dtype) + shape.vocab_size * logits


def documents_together(shape: ModelShape, dtype: torch.dtype, device_bytes: int) -> int:
    """Return how many documents are written at once: as many as fill half of a device beside the model.

    `device_bytes` is what the card has or may give, and not what is free, so that the text is always the same. It is 0
    for a CPU.
    """
    if not device_bytes:
        return GENERATED_TOGETHER
    room = (device_bytes - shape.stack().stored_parameters() * dtype.itemsize) / 2
    count = MOST_TOGETHER
    while count > LEAST_TOGETHER and count * document_bytes(shape, dtype) > room:
        count //= 2
    return count


def openings(seed: int, known: Sequence[Language] = ()) -> Iterator[str]:
    """Yield beginnings of documents without end, in a seeded order: every form with every topic, and other languages.

    Each language that is `known` has as many as a form, and all of them together at most `OTHER_LANGUAGES` of these.
    They follow each other in turn and stand at equal distances, so that a short text has many, and no more than its
    share of them.
    """
    every = [
        form.format(Topic=topic[0].upper() + topic[1:], topic=topic) for form, topic in itertools.product(FORMS, TOPICS)
    ]
    random.Random(seed).shuffle(every)
    count = min(len(known) * len(TOPICS), int(OTHER_LANGUAGES * len(every)))
    total, english, others = len(every) + count, iter(every), openings_of(known, count)
    is_other = [(place + 1) * count // total > place * count // total for place in range(total)]
    return itertools.cycle([next(others if other else english) for other in is_other])


def levels(seed: int, num_tokens: int) -> Iterator[torch.Tensor]:
    """Yield for every document the numbers of [0, 1) by which its tokens are drawn, float32 `(num_tokens,)`.

    A document has numbers of its own, so they do not depend on how many documents are written at once.
    """
    generator = torch.Generator().manual_seed(seed)  # torch's own is shared by all threads
    while True:
        yield torch.rand(num_tokens, generator=generator)


def drawn(scores: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """Return tokens `(documents, 1)`, each drawn with the probabilities softmax of `scores` `(documents, vocabulary)`.

    It is inverse transform sampling: the first token at which the sum of the probabilities exceeds its `level` of
    [0, 1), `(documents, 1)`. Sums of blocks find the block, so no sum runs over all tokens one by one.
    `torch.multinomial` takes ten times as long on a CPU.
    """
    probabilities = scores.softmax(-1)
    documents, vocabulary = probabilities.shape
    size = max(size for size in range(1, LARGEST_BLOCK + 1) if vocabulary % size == 0)
    blocks = probabilities.view(documents, -1, size)
    block, rest = _reached(blocks.sum(-1), lambda total: level * total)
    inside, _ = _reached(blocks.take_along_dim(block[..., None], 1).squeeze(1), lambda total: rest)
    return block * size + inside


def _reached(
    parts: torch.Tensor, level_of: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first column of each row `(rows, columns)` that takes the sum above a level, and the level's rest.

    `level_of`: receives the sums of the rows `(rows, 1)`. Rounding never leads to a column that adds nothing.
    """
    rows = len(parts)
    if parts.is_cuda and rows == 1:  # sums of one row alone are not deterministic
        parts = parts.repeat(2, 1)
    sums = parts.cumsum(-1)[:rows].contiguous()
    total = sums[:, -1:]
    level = torch.minimum(level_of(total), total.nextafter(torch.zeros_like(total)))
    # bounded, because sums may not be finite
    column = torch.searchsorted(sums, level, right=True).clamp_max(sums.shape[1] - 1)
    before = torch.where(column > 0, sums.gather(1, (column - 1).clamp_min(0)), 0.0)
    return column, level - before


def _load(
    folder: Path, *, device: torch.device, dtype: torch.dtype, max_memory_bytes: int | None, load: Callable[..., Any]
) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig

    needed, room = weight_bytes(folder), free_bytes() if max_memory_bytes is None else max_memory_bytes
    if needed > room and device.type == "cpu":
        raise CalibrationError(
            f"--calibration self holds the whole model, {needed / 2**30:.1f} GiB, where {room / 2**30:.1f} GiB is "
            "allowed; give a text as --calibration, or more --max-memory."
        )
    try:
        model: Any = load(
            AutoModelForCausalLM,
            folder,
            dtype=dtype,
            trust_remote_code=False,
            # tensor by tensor to the device: the host need not hold the model
            **({"device_map": {"": device}} if device.type == "cuda" else {}),
        )
    except Exception as error:  # transformers raises many unrelated types; the cause is named and chained
        raise CalibrationError(
            f"{folder} cannot be loaded to write its own text ({cause(error)}); give a text as --calibration."
        ) from error
    model.generation_config = GenerationConfig()  # its own would fill in what `_continued` leaves unset
    return model.to(device).eval()


def _tokens(tokenizer: Any, opening: str, folder: Path) -> list[int]:
    try:
        tokens: list[int] = tokenizer(opening)["input_ids"]
    except Exception as error:  # tokenizers raise many unrelated types; the cause is named and chained
        raise CalibrationError(
            f"The tokenizer in {folder} cannot take English text ({cause(error)}); copy the model's files again."
        ) from error
    if not tokens:
        raise CalibrationError(
            f"The tokenizer in {folder} makes no tokens of English text; copy the model's files again."
        )
    return tokens


def _continued(
    model: Any, beginnings: list[list[int]], drawn_at: torch.Tensor, advance: Callable[[float], None]
) -> list[list[int]]:
    """Return each beginning with as many tokens as `drawn_at` `(documents, tokens)` has levels to draw them by."""
    from transformers import GenerationConfig
    from transformers.generation import BaseStreamer, LogitsProcessor, LogitsProcessorList

    columns = iter(drawn_at.to(model.device).T.unsqueeze(-1))

    class Progress(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            if value.ndim == 1:  # the beginnings come first, all at once
                advance(len(value))

        def end(self) -> None:
            pass

    class Draw(LogitsProcessor):
        """Leave one token with a finite score."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
            token = drawn(scores, next(columns))
            return scores.fill_(-torch.inf).scatter_(1, token, 0.0)  # a copy that `generate` made

    length, num_tokens = max(len(beginning) for beginning in beginnings), drawn_at.shape[1]
    padded = torch.tensor([[0] * (length - len(ids)) + ids for ids in beginnings], device=model.device)
    mask = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in beginnings], device=model.device)
    free_running = GenerationConfig(
        do_sample=False,  # `Draw` leaves one token
        max_new_tokens=num_tokens,
        eos_token_id=None,  # a document does not end early
        pad_token_id=0,
    )
    with growing_in_place(model, length + num_tokens):
        written = model.generate(
            padded,
            attention_mask=mask,
            generation_config=free_running,
            logits_processor=LogitsProcessorList([Draw()]),
            streamer=Progress(),
        ).tolist()
    return [ids[length - len(beginning) :] for ids, beginning in zip(written, beginnings, strict=True)]
