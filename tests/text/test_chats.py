"""Conversations as calibration text, and BOS at the head of every window."""

import copy
import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, topics
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from oneshot.errors import CalibrationError
from oneshot.evaluation import load_windows
from oneshot.text import chat_renderer, iter_documents, load_text, write_text
from oneshot.text.packing import cut_windows

TURNS = [{"role": "user", "content": "What is a list?"}, {"role": "assistant", "content": "A sequence."}]
SHARED = [{"from": "human", "value": "What is a list?"}, {"from": "gpt", "value": "A sequence."}]
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
WANTED = "<user>What is a list?<assistant>A sequence."


@pytest.fixture
def chatty(tokenizer: Any) -> Any:
    """A tokenizer whose template shows the roles."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = TEMPLATE
    return own


@pytest.fixture
def beginning(tokenizer: Any) -> Any:
    """A tokenizer that puts BOS before texts, as Llama's and Gemma's do."""
    own = copy.deepcopy(tokenizer)
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert own("a")["input_ids"][0] == own.bos_token_id == 0
    return own


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TURNS},
        {"conversations": SHARED},
        {"conversations": TURNS, "source": "somewhere"},
        {"prompt": "What is a list?", "response": "A sequence."},
        {"prompt": "What is a list?", "completion": "A sequence.", "number": 3},
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
    ],
    ids=str,
)
def test_conversations_pass_the_chat_template(row: dict[str, Any], chatty: Any, tmp_path: Path) -> None:
    """Beside ids, in every spelling, in calibration and in evaluation."""
    path = write(tmp_path / "a.jsonl", {"id": "identity_1", **row}, {"id": "identity_2", **row})
    assert list(iter_documents(path, 0, chat_renderer(chatty))) == [WANTED] * 2
    tokens = chatty(WANTED + "\n\n")["input_ids"]
    windows = load_windows(path, chatty, sequence_length=8, max_windows=2)
    assert windows.flatten().tolist() == (tokens * 2)[:16]
    found = load_text(path, chatty, num_sequences=2, sequence_length=8, seed=0)
    assert torch.equal(found.token_ids, windows)


@pytest.mark.parametrize("written", [json.dumps, str], ids=["JSON", "Python"])
def test_conversations_in_a_csv_file(written: Any, chatty: Any, tmp_path: Path) -> None:
    """A cell holds turns as text; a prompt that only begins with a bracket stays a prompt."""
    turns, pairs = tmp_path / "turns.csv", tmp_path / "pairs.csv"
    with turns.open("w", newline="") as file:
        csv.writer(file).writerows([["messages"], [written(TURNS)], [written(TURNS)]])
    with pairs.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "response"], ["[1, 2]", "A sequence."]])
    assert list(iter_documents(str(turns), 0, chat_renderer(chatty))) == [WANTED] * 2
    assert list(iter_documents(str(pairs), 0, chat_renderer(chatty))) == ["<user>[1, 2]<assistant>A sequence."]


def test_text_is_read_before_conversations(chatty: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "plain", "messages": TURNS}, {"messages": TURNS})
    assert list(iter_documents(path, None, chat_renderer(chatty))) == ["plain"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "identity_1", "turns": ["a", "b"]}, "no column 'text' but 'id, turns'"),
        ({"id": "identity_1", "turns": {"a": "b"}}, "no column 'text'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "where a turn should be"),
        ({"messages": ["hello"]}, "where a turn should be"),
        ({"messages": "hello"}, "where turns of a conversation should be"),
        ({"messages": []}, "where turns of a conversation should be"),
    ],
    ids=str,
)
def test_what_is_no_conversation_is_refused(row: dict[str, Any], message: str, chatty: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", row)
    with pytest.raises(CalibrationError, match=message):
        list(iter_documents(path, 0, chat_renderer(chatty)))


def test_ids_are_never_the_text_of_conversations(tmp_path: Path) -> None:
    """Also where no chat is read: an encoder has no template."""
    path = write(tmp_path / "a.jsonl", {"id": "identity_1", "conversations": SHARED})
    with pytest.raises(CalibrationError, match="no column 'text'"):
        list(iter_documents(path, 0))


def test_a_tokenizer_without_template_or_with_a_strict_one(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": TURNS})
    own = copy.deepcopy(tokenizer)
    own.chat_template = None
    with pytest.raises(CalibrationError, match="no chat template"):
        list(iter_documents(path, 0, chat_renderer(own)))
    own.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(CalibrationError, match="roles must alternate"):
        list(iter_documents(path, 0, chat_renderer(own)))


def test_a_template_gives_no_second_bos(beginning: Any) -> None:
    beginning.chat_template = "<s>" + TEMPLATE
    assert chat_renderer(beginning)(TURNS, "a") == WANTED


def test_a_bos_that_only_the_template_writes_stays(tokenizer: Any) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = "<s>" + TEMPLATE
    assert chat_renderer(own)(TURNS, "a") == "<s>" + WANTED


# BOS


@given(tokens=st.lists(st.integers(0, 3), max_size=40), length=st.integers(2, 7), start=st.sampled_from([None, 0]))
def test_windows_begin_with_the_start_and_lose_nothing(tokens: list[int], length: int, start: int | None) -> None:
    windows = cut_windows(tokens, length, start)
    assert all(len(window) == length for window in windows)
    if start is None:
        assert [token for window in windows for token in window] == tokens[: len(tokens) // length * length]
        return
    place = 0
    for window in windows:
        assert window[0] == start
        own = window if tokens[place] == start else window[1:]
        assert own == tokens[place : place + len(own)]
        place += len(own)
    assert len(tokens) - place < length


def test_every_window_begins_with_bos_where_the_tokenizer_adds_it(
    beginning: Any, tokenizer: Any, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(topics(0, 3))
    own = [
        load_text(str(path), beginning, num_sequences=8, sequence_length=16, seed=0).token_ids,
        load_windows(str(path), beginning, sequence_length=16, max_windows=8),
        write_text(
            make_checkpoint(),
            beginning,
            num_sequences=8,
            sequence_length=16,
            seed=0,
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_memory_bytes=None,
        ).token_ids,
    ]
    for windows in own:
        assert windows.shape == (8, 16)
        assert (windows[:, 0] == 0).all()
    assert (own[0][:, 1:] != 0).all()
    plain = load_text(str(path), tokenizer, num_sequences=8, sequence_length=16, seed=0).token_ids
    assert own[0][:, 1:].flatten().tolist() == plain.flatten().tolist()[: 8 * 15]
