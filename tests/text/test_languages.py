"""Other languages in the text that a model writes itself: which a model knows, and how much it writes in them."""

from collections import Counter
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oneshot.text.languages import (
    KNOWN,
    LONGEST_PASSAGE,
    NUM_LANGUAGES,
    known_languages,
    languages,
    openings_of,
    passage_nats,
    passages,
)
from oneshot.text.self_written import FORMS, OTHER_LANGUAGES, TOPICS, openings

NUM_ENGLISH = len(FORMS) * len(TOPICS)
UNKNOWN, START = 258, 259


def of_bytes(*, start: bool = False, lacks: str = "", unknown: int | None = UNKNOWN) -> Any:
    """Return a tokenizer of bytes, with the unknown token for letters that it lacks; it may mark the start by it."""

    class Tokenizer:
        unk_token_id = unknown

        def __call__(self, text: str) -> dict[str, list[int]]:
            letters = ([UNKNOWN] if letter in lacks else list(letter.encode()) for letter in text)
            return {"input_ids": [UNKNOWN] * start + [token for one in letters for token in one]}

    return Tokenizer()


class Uniform:
    """A model for which all tokens are alike."""

    def __init__(self, positions: int | None = None) -> None:
        self.device, self.config = torch.device("cpu"), SimpleNamespace(max_position_embeddings=positions)

    def __call__(self, *, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, START + 1))


def known(nats: dict[str, float]) -> list[str]:
    return [one.name for one in known_languages(nats)]


def test_a_language_is_known_if_its_passage_costs_little_more_than_the_english_one() -> None:
    others = [one.name for one in languages()][1:]
    assert known({"English": 100.0} | dict.fromkeys(others, 100 * KNOWN)) == others
    assert known({"English": 100.0} | dict.fromkeys(others, 101 * KNOWN)) == []
    assert known({"English": 100.0, "Korean": 90.0, "Dutch": 180.0, "German": 170.0}) == ["German", "Korean"]
    assert known({"English": float("nan"), "German": 1.0}) == []
    assert known({"German": 1.0}) == []


def test_the_nats_are_the_models_log_loss() -> None:
    assert len(languages()) == NUM_LANGUAGES
    read = passages(of_bytes())
    nats = passage_nats(Uniform(), read)
    for name, ids in read.items():
        assert nats[name] == pytest.approx((len(ids) - 1) * torch.tensor(START + 1.0).log().item())


def test_passages_that_are_longer_than_the_model_reads_have_no_nats() -> None:
    read = passages(of_bytes())
    shortest = min(map(len, read.values()))
    assert passage_nats(Uniform(shortest - 1), read) == {}
    assert len(passage_nats(Uniform(shortest), read)) == 1


@pytest.mark.parametrize("start", [False, True])
def test_a_language_with_letters_that_the_tokenizer_lacks_has_no_passage(start: bool) -> None:
    """Unknown tokens cost a model little. GPT-2's tokenizer is like the one that begins each text with its own."""
    short = {one.name for one in languages() if len(one.passage.encode()) + start <= LONGEST_PASSAGE}
    assert {"English", "German", "Turkish", "Chinese"} <= short < {one.name for one in languages()}
    assert passages(of_bytes(start=start)).keys() == short
    without = passages(of_bytes(start=start, lacks="äöü"))
    assert short - without.keys() == {"German", "Turkish"}
    assert passages(of_bytes(start=start, lacks="ö", unknown=None)).keys() == short


def test_a_tokenizer_that_refuses_letters_has_passages_of_the_others() -> None:
    class OfAscii:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": list(text.encode("ascii"))}

    assert passages(OfAscii()).keys() == {"English", "Dutch", "Indonesian"}


def test_every_language_has_a_passage_and_openings_of_its_own() -> None:
    english, *others = languages()
    assert (english.name, english.openings) == ("English", ())
    assert len({one.passage for one in others}) == len({one.name for one in others}) == len(others)
    every = [opening for one in others for opening in one.openings]
    assert len({*every}) == len(every) == 6 * len(others)


@pytest.mark.parametrize("count", [1, 3, 16])
def test_each_language_is_as_frequent_as_a_form_and_all_are_a_quarter_at_most(count: int) -> None:
    spoken = languages()[1 : count + 1]
    number = min(count * len(TOPICS), int(NUM_ENGLISH * OTHER_LANGUAGES))
    once = list(islice(openings(0, spoken), NUM_ENGLISH + number))
    frequency = Counter(once)
    by_language = [sum(frequency[opening] for opening in one.openings) for one in spoken]
    assert sum(by_language) == number
    assert max(by_language) - min(by_language) <= 1
    of_languages = {opening for one in spoken for opening in one.openings}
    assert of_languages <= {*once}
    assert {*once} - of_languages == {*islice(openings(0), NUM_ENGLISH)}
    by_opening = {opening: one.name for one in spoken for opening in one.openings}
    in_turn = [by_opening[opening] for opening in once if opening in of_languages]
    assert in_turn[: 2 * count] == 2 * [one.name for one in spoken]
    for length in range(1, len(once) + 1):  # a short text has its share
        found = sum(opening in of_languages for opening in once[:length])
        assert found == length * number // len(once)


def test_without_other_languages_the_openings_are_english_ones() -> None:
    assert list(openings_of((), 5)) == []
    english = list(islice(openings(4), NUM_ENGLISH))
    assert all(opening.isascii() for opening in english)
    assert len({*english}) == NUM_ENGLISH
