"""Other languages that a model knows: it also writes its own calibration text in them, and a result is checked on them.

A passage says the same in every language, so it costs a model about as many nats as in English where it knows one.
"""

import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

logger = logging.getLogger(__name__)

FILE = Path(__file__).with_name("languages.jsonl")  # written for this; English comes first
KNOWN = 1.75  # of English's nats, at most; SmolLM2, Gemma 3 and Qwen2.5 have up to 1.71 where they know one, else 1.87
NUM_LANGUAGES = 17
PASSAGE_TOKENS = 64  # of most passages and tokenizers
LONGEST_PASSAGE = 256  # tokens; a language that takes more is hardly known
POSITIONS = 32  # whose logits are float32 together


@dataclass(frozen=True)
class Language:
    """A language, its passage, and beginnings of documents of several kinds; English has these elsewhere."""

    name: str
    passage: str
    openings: tuple[str, ...]


@cache
def languages() -> tuple[Language, ...]:
    """Return English and the other languages."""
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    return tuple(Language(row["language"], row["passage"], tuple(row["openings"])) for row in rows)


def passages(tokenizer: Any) -> dict[str, list[int]]:
    """Return the tokens of each language's passage, English first; without those that are long or lack letters.

    An unknown token is no letter if each text has it, as a mark of its start.
    """
    unknown: Any = getattr(tokenizer, "unk_token_id", None)
    found = {}
    for language in languages():
        try:
            texts = language.passage, "".join(language.openings), ""
            ids, of_openings, of_nothing = (tokenizer(text)["input_ids"] for text in texts)
        except Exception as error:  # tokenizers without an unknown token raise many types for a letter that they lack
            logger.debug("The tokenizer does not take %s: %s", language.name, error)
            continue
        lacks = max(ids.count(unknown), of_openings.count(unknown)) > of_nothing.count(unknown)
        if 1 < len(ids) <= LONGEST_PASSAGE and not lacks:
            found[language.name] = ids
    return found


@torch.inference_mode()
def passage_nats(model: Any, given: Mapping[str, list[int]]) -> dict[str, float]:
    """Return the log-loss of each passage in nats, of all its tokens but the first; without those that are too long."""
    longest = getattr(model.config, "max_position_embeddings", None)
    found = {}
    for name, ids in given.items():
        if longest is None or len(ids) <= longest:
            tokens = torch.tensor([ids], device=model.device)
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].split(POSITIONS)
            targets = tokens[0, 1:].split(POSITIONS)
            lost = [
                functional.cross_entropy(part.float(), wanted, reduction="sum")
                for part, wanted in zip(logits, targets, strict=True)
            ]
            found[name] = float(torch.stack(lost).sum())
    return found


def known_languages(nats: Mapping[str, float]) -> list[Language]:
    """Return the languages other than English whose passages cost a model little more than the English one does."""
    english, *others = languages()
    allowed = KNOWN * nats.get(english.name, 0.0)
    return [one for one in others if one.name in nats and nats[one.name] <= allowed]


def openings_of(known: Sequence[Language], count: int) -> Iterator[str]:
    """Yield `count` beginnings of documents, of all these languages in turn."""
    every = [itertools.cycle(language.openings) for language in known]
    return (next(one) for one in itertools.islice(itertools.cycle(every), count))
