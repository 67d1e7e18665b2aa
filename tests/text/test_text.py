"""Calibration text: sources, seeds, packing, hashes, and invalid texts."""

import hashlib
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig, topics
from hypothesis import given
from hypothesis import strategies as st

from oneshot.errors import CalibrationError, MemoryLimitError
from oneshot.pipeline import compress, predict
from oneshot.run import open_run
from oneshot.text import (
    Text,
    iter_documents,
    load_text,
    load_tokenizer,
    mix,
    pack,
    shares,
    special_tokens,
    split_sources,
    write_text,
)
from oneshot.text.languages import known_languages, passage_nats, passages
from oneshot.text.self_written import DOCUMENT_TOKENS, FORMS, OPENING_TOKENS, TOPICS, _continued, openings
from oneshot.text.sources import _parse_hub_source

pytestmark = pytest.mark.long

DOCUMENTS = [f"Document {number}: " + topics(number, number + 1)[:200] for number in range(12)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    from datasets import Dataset

    Dataset.from_list(rows).to_parquet(path)
    return path


def load(source: Path | str, tokenizer: Any, *, seed: int = 0, num: int = 8, length: int = 16) -> Text:
    return load_text(str(source), tokenizer, num_sequences=num, sequence_length=length, seed=seed)


def by_hand(documents: list[str], tokenizer: Any, length: int) -> torch.Tensor:
    """Return the tokens of the documents, each followed by an empty line, cut into rows."""
    tokens = [token for document in documents for token in tokenizer(document + "\n\n")["input_ids"]]
    return torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)


def test_a_text_file_is_packed_in_order(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(topics(0, 3))
    calibration = load(path, tokenizer)
    wanted = by_hand([topics(0, 3)], tokenizer, 16)[:8]
    assert torch.equal(calibration.token_ids, wanted)
    assert calibration.token_ids.dtype == torch.int64
    assert calibration.num_tokens == 128
    assert calibration.source == str(path)
    assert calibration.token_hash == hashlib.sha256(wanted.numpy().tobytes()).hexdigest()
    assert tokenizer.decode(calibration.token_ids.flatten()) in topics(0, 3)


def test_the_whole_text_is_packed_if_no_number_is_given(tokenizer: Any) -> None:
    packed = pack(iter(DOCUMENTS), tokenizer, num_sequences=None, sequence_length=16, source="x")
    assert torch.equal(packed, by_hand(DOCUMENTS, tokenizer, 16))


@pytest.mark.parametrize("column", ["text", "content"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_are_read_in_a_seeded_order(kind: str, column: str, tokenizer: Any, tmp_path: Path) -> None:
    write = write_jsonl if kind == "jsonl" else write_parquet
    path = write(tmp_path / f"a.{kind}", [{column: document, "number": 1} for document in DOCUMENTS])
    assert list(iter_documents(str(path), seed=None)) == DOCUMENTS
    first, again, other = (list(iter_documents(str(path), seed=seed)) for seed in (1, 1, 2))
    assert sorted(first) == sorted(DOCUMENTS)
    assert first == again
    assert first != other
    hashes = [load(path, tokenizer, seed=seed).token_hash for seed in (1, 1, 2)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_jsonl_and_parquet_of_the_same_rows_are_the_same(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"text": document} for document in DOCUMENTS]
    jsonl = load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer)
    parquet = load(write_parquet(tmp_path / "a.parquet", rows), tokenizer)
    assert jsonl.token_hash == parquet.token_hash


def test_builtin_text_needs_no_file_and_follows_the_seed(tokenizer: Any) -> None:
    first, again, other = (load("builtin", tokenizer, seed=seed) for seed in (0, 0, 1))
    assert first.token_hash == again.token_hash != other.token_hash
    assert first.token_ids.shape == (8, 16)


def test_empty_documents_are_left_out(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ("one", "", "  \n", "two")])
    assert list(iter_documents(str(path), seed=None)) == ["one", "two"]


def test_fewer_sequences_than_asked_for_is_a_warning(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(topics(0, 1)[:300])
    calibration = load(path, tokenizer, num=1000)
    assert 1 <= len(calibration.token_ids) < 1000
    assert "of the 1000 asked for" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "does not exist"),
        ("none.jsonl", None, "does not exist"),
        ("empty.txt", b"", "is empty"),
        ("empty.parquet", b"", "is empty"),
        ("blank.txt", b" \n \n", "holds 0 tokens"),
        ("short.txt", b"A few words.", "less than one sequence of 16"),
        ("latin.txt", b"caf\xe9", "UTF-8"),
        ("broken.jsonl", b'{"text": "unfinished', "cannot be read as json"),
        ("broken.parquet", b"no parquet at all", "cannot be read as parquet"),
        ("columns.jsonl", b'{"a": "x", "b": "y"}\n', "no column 'text'"),
        ("nulls.jsonl", b'{"text": null}\n{"text": null}\n', "without text"),
        ("numbers.jsonl", b'{"text": 5}\n{"text": 6}\n', "holds 5 where text"),
        ("later.jsonl", b'{"text": "fine"}\n{"text": "bro', "later.jsonl"),
    ],
)
def test_invalid_texts(name: str, content: bytes | None, message: str, tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CalibrationError, match=message) as caught:
        load(path, tokenizer)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value).strip()


def test_a_data_set_without_network_is_named(tokenizer: Any) -> None:
    with pytest.raises(CalibrationError, match=r"Salesforce/wikitext.*network"):
        load("wikitext2", tokenizer)


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("org/name", ("org/name", None, "train", None)),
        ("org/name:en", ("org/name", "en", "train", None)),
        ("org/name::test", ("org/name", None, "test", None)),
        ("org/name:en:validation:body", ("org/name", "en", "validation", "body")),
    ],
)
def test_hub_sources(source: str, parts: tuple[str | None, ...]) -> None:
    assert _parse_hub_source(source) == parts


@pytest.mark.parametrize("source", ["a:b:c:d:e", ":en"])
def test_invalid_hub_sources(source: str) -> None:
    with pytest.raises(CalibrationError, match="org/name:config:split:column"):
        _parse_hub_source(source)


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="does not hold a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": 5}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_a_model_writes_its_own_calibration_text(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The text has the requested number of tokens, and the seed decides which."""
    config = make_config(make_checkpoint(), calibration="self", num_sequences=40, sequence_length=24)
    report = compress(config)
    assert report.calibration is not None
    assert report.calibration["num_tokens"] == 40 * 24
    again = compress(replace(config, output=str(tmp_path / "again")))
    other = compress(replace(config, output=str(tmp_path / "other"), seed=1))
    assert again.calibration == report.calibration
    assert other.calibration is not None
    assert other.calibration["token_hash"] != report.calibration["token_hash"]


def sample(folder: Path, tokenizer: Any, *, num: int, length: int, seed: int = 0, **more: Any) -> Text:
    return write_text(
        folder,
        tokenizer,
        num_sequences=num,
        sequence_length=length,
        seed=seed,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_memory_bytes=None,
        **more,
    )


def test_documents_are_drawn_from_the_models_distribution(make_checkpoint: MakeCheckpoint) -> None:
    """Compare token frequencies after two beginnings of different lengths with the softmax after each alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_checkpoint()).eval()
    beginnings, repeats = [[5, 17, 40, 9, 33], [60]], 2000
    with torch.no_grad():
        written: list[float] = []
        drawn_at = torch.rand(len(beginnings) * repeats, 1, generator=torch.Generator().manual_seed(0))
        documents = _continued(model, beginnings * repeats, drawn_at, written.append)
        assert sum(written) == len(documents)
        for number, beginning in enumerate(beginnings):
            own = documents[number :: len(beginnings)]
            assert all(ids[:-1] == beginning for ids in own)
            expected = model(torch.tensor([beginning])).logits[0, -1].double().softmax(-1) * repeats
            counts = torch.tensor([ids[-1] for ids in own]).bincount(minlength=len(expected))
            statistic = float(((counts - expected).square() / expected).sum())
            degrees = len(expected) - 1
            assert abs(statistic - degrees) < 5 * (2 * degrees) ** 0.5


def test_self_written_text_is_openings_and_continuations(own_checkpoint: MakeCheckpoint, tokenizer: Any) -> None:
    """The model's own generation config has no influence on the end of documents or on the draws."""
    from transformers import AutoModelForCausalLM

    folder = own_checkpoint()
    habits = {"eos_token_id": list(range(100)), "do_sample": True, "top_k": 2, "repetition_penalty": 2.0}
    (folder / "generation_config.json").write_text(json.dumps(habits))
    told: list[str] = []
    text = sample(folder, tokenizer, num=6, length=50, seed=3, tell=told.append)
    positions = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    longest = min(DOCUMENT_TOKENS, positions // 2)  # of the opening, and of what is written
    tokens, start = text.token_ids.flatten().tolist(), 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    known = known_languages(passage_nats(model, passages(tokenizer)))
    assert [all(language.name in sentence for language in known) for sentence in told] == [True] * bool(known)
    for opening in openings(3, known):
        wanted = tokenizer(opening)["input_ids"][: min(OPENING_TOKENS, longest)]
        rest = tokens[start:]
        assert rest[: len(wanted)] == wanted[: len(rest)]
        start += len(wanted) + longest
        if start >= len(tokens):
            break
    assert text.token_ids.shape == (6, 50)


def test_openings_are_of_every_kind_and_never_end() -> None:
    every = len(FORMS) * len(TOPICS)
    first = list(itertools.islice(openings(0), 2 * every))
    assert len(set(first)) == every
    assert first[:every] == first[every:]
    assert first[:every] != list(itertools.islice(openings(1), every))
    assert not any("{" in opening for opening in first)


def test_sources_share_the_sequences(tokenizer: Any, tmp_path: Path) -> None:
    """Each gives equally many, and all are in one seeded order."""
    for name, first in (("a", 0), ("b", 20)):
        (tmp_path / f"{name}.txt").write_text(topics(first, first + 10))
    names = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert split_sources("+".join(names)) == names
    counts = shares(9, names)
    assert counts == {names[0]: 5, names[1]: 4}
    parts = [load(name, tokenizer, num=count) for name, count in counts.items()]
    first, again, other = (mix(parts, seed, "a+b") for seed in (0, 0, 1))
    assert first.token_hash == again.token_hash != other.token_hash
    every = {tuple(row) for part in parts for row in part.token_ids.tolist()}
    assert {tuple(row) for row in first.token_ids.tolist()} == every
    assert first.source == "a+b"
    assert mix(parts[:1], 0, "a") is parts[0]
    with pytest.raises(CalibrationError, match="too few for the 2 sources"):
        shares(1, names)


@given(names=st.lists(st.sampled_from("abc"), min_size=1, max_size=8), number=st.integers(8, 300))
def test_a_source_gives_as_much_as_it_is_named(names: list[str], number: int) -> None:
    counts = shares(number, names)
    assert list(counts) == list(dict.fromkeys(names))
    assert sum(counts.values()) == number
    for name, count in counts.items():
        assert abs(count - number * names.count(name) / len(names)) < names.count(name)


def test_no_sequence_is_read_twice_from_a_source_that_is_named_twice(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, text_file: Path
) -> None:
    """Three quarters of one text, one quarter of what the model writes."""
    calibration = f"{text_file}+{text_file}+{text_file}+self"
    config = make_config(make_checkpoint(), calibration=calibration, num_sequences=8)
    with open_run(config) as run:
        assert run.text.source == calibration
        rows = {tuple(row) for row in run.text.token_ids.tolist()}
        assert len(rows) == 8
        assert run.saved_text is not None
        written = {tuple(row) for row in run.saved_text["token_ids"]}
        assert len(run.saved_text["token_ids"]) == 2
        assert written < rows


def test_a_plus_sign_may_be_part_of_a_files_name(tmp_path: Path) -> None:
    path = tmp_path / "a+b.txt"
    assert len(split_sources(str(path))) == 2
    path.write_text("text")
    assert split_sources(str(path)) == [str(path)]
    assert split_sources(f"c4+{path}+self") == ["c4", str(path), "self"]


@pytest.mark.parametrize("calibration", ["", "self+", "+self", "c4++self"])
def test_a_source_has_a_name(calibration: str) -> None:
    with pytest.raises(CalibrationError, match=f"{re.escape(repr(calibration))} has a source without a name"):
        split_sources(calibration)


@pytest.mark.parametrize(("length", "warned"), [(512, False), (513, True)])
def test_sequences_longer_than_the_models_positions_are_told(
    length: int,
    warned: bool,
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rotary positions have no end, so nothing fails; the tiny Llama's config states 512. So does a prediction."""
    config = make_config(make_checkpoint(), num_sequences=1, sequence_length=length, sparsity=0.1)
    with open_run(config) as run:
        assert run.text.token_ids.shape == (1, length)
    assert (f"--sequence-length {length} is beyond the 512 positions" in caplog.text) is warned
    told = list(caplog.messages)
    caplog.clear()
    predict(config)
    assert caplog.messages == told


def test_a_prediction_tells_of_too_few_tokens(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    predict(make_config(make_checkpoint(), num_sequences=3, sequence_length=20, calibration="c4+self"))
    assert "60 calibration tokens are few for an FFN of width 64" in caplog.text
    caplog.clear()
    few = {"num_sequences": 3, "sequence_length": 20, "sparsity": 0.1}
    predict(make_config(make_checkpoint(), **few, ffn="magnitude", correction="none"))
    assert not caplog.messages, "weights alone choose, so nothing is read"


def test_text_from_a_file_and_from_the_model(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, text_file: Path, tmp_path: Path
) -> None:
    config = make_config(make_checkpoint(), calibration=f"{text_file}+self", num_sequences=40, sequence_length=24)
    report = compress(config)
    assert report.calibration is not None
    assert report.calibration["source"] == f"{text_file}+self"
    assert report.calibration["num_sequences"] == 40
    assert compress(replace(config, output=str(tmp_path / "again"))).calibration == report.calibration


def test_a_tokenizer_without_english_text_is_refused(make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(CalibrationError, match="no tokens of English text"):
        sample(make_checkpoint(), lambda text: {"input_ids": []}, num=1, length=8)


def test_a_model_that_does_not_fit_writes_no_text(make_checkpoint: MakeCheckpoint, make_config: MakeConfig) -> None:
    with pytest.raises(MemoryLimitError, match="--max-memory"):
        compress(make_config(make_checkpoint(), calibration="self", max_memory_bytes=1000))


def test_marks_are_what_the_tokenizer_adds_and_something_uses(make_checkpoint: MakeCheckpoint) -> None:
    tokenizer = load_tokenizer(make_checkpoint())
    words, own = len(tokenizer), set(tokenizer.all_special_ids)
    names = [
        "<|turn|>",
        "\n\n",
        "\u2581\u2581",
        "<unused3>",
        "<|reserved_special_token_5|>",
        "<unused7>",
        "<tool_call>",
    ]
    assert tokenizer.add_tokens(names) == len(names)
    tokenizer.add_special_tokens({"pad_token": "<|reserved_special_token_9|>"})
    ids = dict(zip([*names, "pad"], range(words, len(tokenizer)), strict=True))
    always = own | {ids["<|turn|>"], ids["<tool_call>"], ids["pad"]}
    assert set(special_tokens(tokenizer, len(tokenizer))) == always
    assert set(special_tokens(tokenizer, words)) == own
    tokenizer.chat_template = "{{ bos_token }}<|turn|>{{ role }}<unused7>"
    assert set(special_tokens(tokenizer, len(tokenizer))) == always | {ids["<unused7>"]}
