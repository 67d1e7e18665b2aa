"""Sources and targets for an encoder–decoder: pairs as given, and gaps with what fills them."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from t5_models import t5_tokenizer, write_pairs

from oneshot.errors import CalibrationError
from oneshot.text import Text, load_pairs
from oneshot.text.pairs import SHORTEST, corrupt_spans, longest_text

SENTINELS = list(range(1000, 1100))
END, START = 1, 0


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return t5_tokenizer()


def load(paths: list[str], tokenizer: Any, **changes: Any) -> Text:
    options: dict[str, Any] = {"num_tokens": 2000, "longest": 24, "seed": 0, "start_token": START} | changes
    return load_pairs(paths, tokenizer, **options)


def examples(text: Text) -> list[tuple[list[int], list[int]]]:
    """Return the source and what the decoder reads, example by example."""
    decoder = text.decoder
    assert decoder is not None
    assert text.lengths is not None
    assert decoder.lengths is not None
    return [
        (text.token_ids[row, : text.lengths[row]].tolist(), decoder.token_ids[row, : decoder.lengths[row]].tolist())
        for row in range(text.num_sequences)
    ]


def filled(source: list[int], target: list[int], sentinels: list[int]) -> list[int]:
    """Put what follows each sentinel of the target into the source's gap."""
    gaps: dict[int, list[int]] = {}
    for token in target:
        if token in sentinels:
            gaps[token] = []
        else:
            gaps[next(reversed(gaps))].append(token)
    return [inner for token in source for inner in gaps.get(token, [token])]


@pytest.mark.parametrize("length", [SHORTEST, 9, 20, 64, 512, 1999])
def test_the_target_fills_the_gaps_of_the_source(length: int) -> None:
    tokens = list(range(2, 2 + length)) if length < 900 else [2 + token % 900 for token in range(length)]
    shapes = set()
    for seed in range(5):
        source, target = corrupt_spans(tokens, SENTINELS, END, torch.Generator().manual_seed(seed))
        assert (source[-1], target[-1]) == (END, END)
        assert filled(source[:-1], target[:-1], SENTINELS) == tokens
        used = [token for token in source if token in SENTINELS]
        assert used == [token for token in target if token in SENTINELS] == SENTINELS[: len(used)]
        assert source[0] not in SENTINELS, "a text begins with a token that is kept"
        noise = len(target) - 1 - len(used)
        assert noise == round(0.15 * length)
        assert len(used) == max(1, round(noise / 3))
        shapes.add((len(source), len(target)))
    assert len(shapes) == 1, "texts of one length give sources of one length"


def test_gaps_follow_the_seed() -> None:
    tokens = list(range(2, 200))
    first, again, other = (
        corrupt_spans(tokens, SENTINELS, END, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert first == again != other
    assert longest_text(100) == 2000


def test_pairs_are_tokenised_as_they_are(tokenizer: Any, tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "pairs.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    expected = set()
    for record in records:
        source, target = (
            tokenizer(record[name], truncation=True, max_length=24)["input_ids"] for name in ("text", "target")
        )
        expected.add((tuple(source), (START, *target[:-1])))
    text = load([str(path)], tokenizer)
    found = {(tuple(source), tuple(target)) for source, target in examples(text)}
    assert found <= expected
    assert 1500 < text.num_tokens <= 2000
    assert text.num_tokens == sum(len(source) + len(target) for source, target in examples(text))


def test_batches_have_one_length_on_either_side(tokenizer: Any, tmp_path: Path) -> None:
    text = load([str(write_pairs(tmp_path / "pairs.jsonl"))], tokenizer)
    listed, rows, decoder_rows = [], 0, 0
    for batch in text.batches(4):
        decoder = batch.decoder
        assert decoder is not None
        assert decoder.source is not None
        assert (batch.rows.start, decoder.rows.start) == (rows, decoder_rows)
        rows, decoder_rows = batch.rows.stop, decoder.rows.stop
        assert batch.token_ids.numel() == batch.rows.stop - batch.rows.start
        assert decoder.token_ids.numel() == decoder.rows.stop - decoder.rows.start
        assert torch.equal(decoder.source.token_ids, batch.token_ids)
        assert max(batch.token_ids.numel(), decoder.token_ids.numel()) <= 4 * 24
        listed += list(zip(batch.token_ids.tolist(), decoder.token_ids.tolist(), strict=True))
    assert listed == examples(text)
    assert rows + decoder_rows == text.num_tokens


def test_texts_alone_get_gaps(tokenizer: Any, text_file: Path) -> None:
    text, again = (load([str(text_file)], tokenizer, longest=64) for _ in range(2))
    other = load([str(text_file)], tokenizer, longest=64, seed=1)
    assert text.token_hash == again.token_hash != other.token_hash
    vocabulary = tokenizer.get_vocab()
    sentinels = [vocabulary[f"<extra_id_{number}>"] for number in range(10)]
    plain = tokenizer(text_file.read_text(), add_special_tokens=False)["input_ids"]
    pieces = {tuple(plain[start : start + 64]) for start in range(0, len(plain), 64)}
    for source, target in examples(text):
        assert source[-1] == END
        assert target[0] == START
        assert tuple(filled(source[:-1], target[1:], sentinels)) in pieces


def test_text_that_is_shorter_than_asked_for_is_a_warning(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"text": "one", "target": "two"}))
    with caplog.at_level(logging.WARNING):
        text = load([str(path)], tokenizer)
    assert text.num_sequences == 1
    assert "of the 2000 asked for" in caplog.text


@pytest.mark.parametrize("content", ["", '{"text": "   ", "target": "two"}', '{"text": "one"}'])
def test_a_source_without_examples_is_refused(content: str, tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(content)
    with pytest.raises(CalibrationError, match=r"is empty|holds no text"):
        load([str(path)], tokenizer)
