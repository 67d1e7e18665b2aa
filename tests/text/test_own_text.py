"""Tokens of a model's own text are drawn by levels, and its cache of keys and values grows in place."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint
from families.cases import CASES
from transformers import DynamicCache, GenerationConfig
from transformers.generation import LogitsProcessor, LogitsProcessorList

from oneshot.text import self_written, write_text
from oneshot.text.growing_cache import growing_in_place
from oneshot.text.self_written import drawn, levels

LAST = 1 - 2.0**-24  # the largest level of float32 below 1
MISSED = 2e-6  # of the whole probability, which sums of float32 may miss a level by
PROMPT, WRITTEN = 4, 9  # tokens; sliding windows of tiny models are 7
ROOM, HELD = PROMPT + WRITTEN, PROMPT + WRITTEN - 1  # tokens of a cache; nothing reads the last one


@pytest.mark.parametrize("vocabulary", [1, 2, 29, 641, 1024, 12 * 512])  # 641 is a prime above the largest block
def test_a_drawn_token_is_the_first_whose_sum_exceeds_the_level(vocabulary: int) -> None:
    """Compare with sums in float64; tokens without probability are never drawn, not even at the ends of a block."""
    generator = torch.Generator().manual_seed(vocabulary)
    scores = 4 * torch.randn(40, vocabulary, generator=generator)
    kept = torch.rand(40, vocabulary, generator=generator) < 0.3
    kept[torch.arange(40), torch.randint(vocabulary, (40,), generator=generator)] = True
    scores[~kept] = -torch.inf
    level = torch.rand(40, 1, generator=generator)
    level[:5], level[5:10] = 0.0, LAST
    token = drawn(scores.clone(), level)
    assert token.shape == (40, 1)
    assert kept.gather(1, token).all()
    after = scores.double().softmax(-1).cumsum(-1).gather(1, token)
    before = after - scores.double().softmax(-1).gather(1, token)
    assert (before <= level + MISSED).all()
    assert (after >= level - MISSED).all()


def test_scores_that_are_not_finite_give_a_token_of_the_vocabulary() -> None:
    """The layers refuse such a model in a sentence, as they do without its own text."""
    token = drawn(torch.full((3, 1024), torch.nan), torch.rand(3, 1))
    assert (token >= 0).all()
    assert (token < 1024).all()


def test_the_levels_of_a_document_are_its_own() -> None:
    first, second = (next(every) for every in (levels(7, 300), levels(8, 300)))
    again = levels(7, 300)
    assert torch.equal(next(again), first)
    assert not torch.equal(next(again), first)
    assert not torch.equal(second, first)
    assert 0 <= first.min() < 0.1 < 0.9 < first.max() < 1


def test_the_levels_do_not_depend_on_how_many_documents_are_written_at_once(
    make_checkpoint: MakeCheckpoint, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does which document stands behind which opening."""
    texts = []
    for together in (1, 3, 64):

        def continued(_model: Any, beginnings: list[list[int]], drawn_at: torch.Tensor, *_: Any) -> list[list[int]]:
            tokens = (drawn_at * 2**24).long().tolist()
            return [begun + written for begun, written in zip(beginnings, tokens, strict=True)]

        monkeypatch.setattr(self_written, "_continued", continued)
        text = write_text(
            make_checkpoint(),
            tokenizer,
            num_sequences=5,
            sequence_length=300,
            seed=1,
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_memory_bytes=None,
            together=together,
        )
        texts.append(text.token_ids)
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


class Forced(LogitsProcessor):
    """Let a model write given tokens `(documents, tokens)`."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        token = self._tokens[:, input_ids.shape[1] : input_ids.shape[1] + 1]
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


# whether all keys, some or none of the cache grow in place
GROWN = {
    "llama": "all",
    "gpt2": "all",
    "deepseek_v3": "all",
    "gemma3_text": "some",  # windows of 7
    "falcon_h1": "all",  # beside the states of mixers
    "lfm2": "some",
    "gemma4_text": "some",
}


@pytest.mark.parametrize("family", GROWN)
def test_a_cache_that_grows_in_place_changes_no_logits(family: str) -> None:
    """Compare with the stock cache, also for sliding windows, mixers and lent keys, and with padding at the left."""
    model = CASES[family].build(**CASES[family].options).eval()
    tokens = torch.randint(2, 300, (3, PROMPT + WRITTEN), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, PROMPT, dtype=torch.long)
    mask[0, :2] = 0
    options = GenerationConfig(max_new_tokens=WRITTEN, output_logits=True, return_dict_in_generate=True, pad_token_id=0)
    logits, in_place = [], list[bool]()
    for growing in (nullcontext(), growing_in_place(model, PROMPT + WRITTEN)):
        with torch.inference_mode(), growing:
            written = model.generate(
                tokens[:, :PROMPT],
                attention_mask=mask,
                generation_config=options,
                logits_processor=LogitsProcessorList([Forced(tokens)]),
            )
        assert torch.equal(written.sequences, tokens)
        logits.append(torch.stack(written.logits))
        cache = next(value for value in written.values() if isinstance(value, DynamicCache))
        layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        in_place = [layer.keys.untyped_storage().nbytes() == ROOM * layer.keys.nbytes // HELD for layer in layers]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)
    assert {"all": all(in_place), "some": any(in_place)}[GROWN[family]]
