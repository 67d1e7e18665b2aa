"""Conversations as calibration text, and BOS at the head of every window."""

import copy
import csv
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import MakeCheckpoint, topics
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from oneshot.api.texts import save_text
from oneshot.errors import CalibrationError
from oneshot.evaluation import load_windows
from oneshot.text import ChatRenderer, iter_documents, load_text, write_text
from oneshot.text.bounded import BoundError, bounded
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
    assert list(iter_documents(path, 0, ChatRenderer(chatty))) == [WANTED] * 2
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
    assert list(iter_documents(str(turns), 0, ChatRenderer(chatty))) == [WANTED] * 2
    assert list(iter_documents(str(pairs), 0, ChatRenderer(chatty))) == ["<user>[1, 2]<assistant>A sequence."]


CALL = {"type": "function", "function": {"name": "temperature", "arguments": {"place": "harbour"}}}
OTHER_CALL = {"type": "function", "function": {"name": "tide", "arguments": {"day": "Monday"}}}
ANSWER = {"role": "tool", "content": "11.4"}
WHOLE = (
    "{{ messages | tojson }}{{ tools | tojson }}{{ documents | tojson }}{{ add_generation_prompt }}"
    "{% if enable_thinking is defined %}thinking {{ enable_thinking }}{% endif %}"
)
WHOLE_ROWS: dict[str, dict[str, Any]] = {
    "tool calls": {"messages": [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}, ANSWER]},
    "no content": {"messages": [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    "reasoning": {"messages": [TURNS[0], TURNS[1] | {"reasoning_content": "Ask the buoy."}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]},
    "tools": {"messages": TURNS, "tools": [CALL]},
    "no tools": {"messages": TURNS, "tools": []},
    "documents": {"messages": TURNS, "documents": [{"title": "Tides", "text": "Twice a day."}]},
    "thinking": {"messages": TURNS, "enable_thinking": False},
    "prompt": {"messages": TURNS[:1], "add_generation_prompt": True},
    "calls of several fields": {
        "messages": [{"role": "assistant", "content": "", "tool_calls": [call]} for call in (CALL, OTHER_CALL)]
    },
}


def held(rows: list[dict[str, Any]], container: str, folder: Path) -> str:
    """Return the source that holds rows in a file, or is written of rows in memory."""
    from datasets import Dataset

    if container == "lines":
        return write(folder / "a.jsonl", *rows)
    if container == "parquet":
        Dataset.from_list(rows).to_parquet(folder / "a.parquet")
        return str(folder / "a.parquet")
    given = Dataset.from_list(rows) if container == "data set" else rows
    return save_text(given, folder, num_sequences=9, seed=0)[0]


@pytest.mark.parametrize("container", ["lines", "parquet", "data set", "list"])
@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_the_template_gets_the_whole_row(name: str, container: str, chatty: Any, tmp_path: Path) -> None:
    """Also of tables of Arrow, which have None where a record lacks a field."""
    row = WHOLE_ROWS[name]
    chatty.chat_template = WHOLE
    beside = {key: value for key, value in row.items() if key != "messages"}
    wanted = chatty.apply_chat_template(row["messages"], tokenize=False, **beside)
    source = held([row | {"id": "a", "dict": "b", "documents_of": [1]}] * 2, container, tmp_path)
    assert list(iter_documents(source, 0, ChatRenderer(chatty))) == [wanted] * 2


@pytest.mark.parametrize(
    "beside",
    [{"tools": json.dumps([CALL])}, {"tools": [json.dumps(CALL)]}, {"chat_template_kwargs": {"tools": [CALL]}}],
    ids=str,
)
def test_other_spellings_of_what_stands_beside_turns(beside: dict[str, Any], chatty: Any, tmp_path: Path) -> None:
    chatty.chat_template = WHOLE
    wanted = chatty.apply_chat_template(TURNS, tools=[CALL], tokenize=False)
    path = write(tmp_path / "a.jsonl", {"messages": TURNS, "documents": "of no kind"} | beside)
    assert list(iter_documents(path, 0, ChatRenderer(chatty))) == [wanted]


def test_a_function_is_a_tool_as_in_transformers(chatty: Any, tmp_path: Path) -> None:
    def tide(day: str) -> str:
        """
        Return the tide.

        Args:
            day: of the week.
        """
        return day

    chatty.chat_template = WHOLE
    source, _ = save_text([{"messages": TURNS, "tools": [tide]}], tmp_path, num_sequences=9, seed=0)
    wanted = chatty.apply_chat_template(TURNS, tools=[tide], tokenize=False)
    assert list(iter_documents(source, 0, ChatRenderer(chatty))) == [wanted]


def test_turns_with_from_and_value_keep_what_they_hold(chatty: Any, tmp_path: Path) -> None:
    """ShareGPT's files have the first turn of the system in a column; a chat in memory may be turns of either kind."""
    row = {"conversations": [SHARED[0], SHARED[1] | {"weight": 1}], "system": "Be brief."}
    chatty.chat_template = "{{ messages | tojson }}"
    messages = [{"role": "system", "content": "Be brief."}, TURNS[0], TURNS[1] | {"weight": 1}]
    path = write(tmp_path / "a.jsonl", row)
    wanted = chatty.apply_chat_template(messages, tokenize=False)
    assert list(iter_documents(path, 0, ChatRenderer(chatty))) == [wanted]
    chatty.chat_template = TEMPLATE
    source, _ = save_text([SHARED, TURNS], tmp_path, num_sequences=9, seed=0)
    assert list(iter_documents(source, 0, ChatRenderer(chatty))) == [WANTED] * 2


@pytest.mark.parametrize("cell", [TURNS, json.dumps(TURNS), SHARED], ids=["turns", "JSON", "from and value"])
def test_a_column_of_another_name_is_named(cell: Any, chatty: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"id": "x", "dialogue": cell})
    if not isinstance(cell, str):
        with pytest.raises(CalibrationError, match="no column 'text' but 'id, dialogue'; name the one"):
            list(iter_documents(path, 0, ChatRenderer(chatty)))
    assert list(iter_documents(f"{path}:dialogue", 0, ChatRenderer(chatty))) == [WANTED]


def test_a_record_that_is_no_conversation_is_left_out_and_told(
    chatty: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Most of a file must give text."""
    good, odd = {"messages": TURNS}, {"messages": [{"role": "user", "content": "x"}, "y"]}
    chatty.chat_template = "{% if messages|length < 2 %}{{ raise_exception('too short') }}{% endif %}" + TEMPLATE
    short = {"messages": TURNS[:1]}
    path = write(tmp_path / "a.jsonl", good, odd, good, short)
    assert list(iter_documents(path, 0, ChatRenderer(chatty))) == [WANTED] * 2
    assert f"2 of 4 records of {path} give no text and are left out. The first: " in caplog.text
    path = write(tmp_path / "b.jsonl", good, odd, short)
    with pytest.raises(CalibrationError, match=r"2 of 3 records of .* give no text; mend them, .*The first: .*a turn"):
        list(iter_documents(path, 0, ChatRenderer(chatty)))


def test_a_template_is_given_up_that_takes_too_much(
    chatty: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in takes long, in steps or in one; another writes much. A third record ends the reading."""
    monkeypatch.setattr("oneshot.text.bounded.MOST_SECONDS", 0.1)
    path, calls = write(tmp_path / "a.jsonl", *[{"messages": TURNS}] * 9), []
    stopped = threading.Event()

    def steps(*_: Any, **__: Any) -> str:
        calls.append(1)
        try:
            while True:
                time.sleep(0.001)
        except SystemExit:
            stopped.set()
            raise

    monkeypatch.setattr(chatty, "apply_chat_template", steps)
    with pytest.raises(CalibrationError, match=r"chat template, for a conversation of .*, takes more than 0.1 seconds"):
        list(iter_documents(path, 0, ChatRenderer(chatty)))
    assert len(calls) == 3
    assert stopped.wait(5), "no thread stays busy"
    monkeypatch.setattr(chatty, "apply_chat_template", lambda *_, **__: time.sleep(1))
    with pytest.raises(CalibrationError, match=r"takes more than 0.1 seconds"):
        ChatRenderer(chatty)(TURNS, "a")
    with pytest.raises(BoundError, match="makes 11 letters, more than 10"):
        bounded(lambda: "x" * 11, "It", most_letters=10)
    monkeypatch.setattr("oneshot.text.bounded.MOST_BYTES", 2**24)
    monkeypatch.setattr("oneshot.text.bounded.MOST_SECONDS", 10.0)
    kept: list[bytes] = []
    with pytest.raises(BoundError, match="more than 16 MiB of memory"):
        bounded(lambda: [kept.append(b"x" * 2**20) or time.sleep(0.003) for _ in range(200)], "It")  # type: ignore


def test_every_record_gives_what_it_holds(chatty: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Text is read before a conversation, and conversations may have different columns, as in files that are joined."""
    prompted = {"prompt": TURNS[0]["content"], "response": TURNS[1]["content"]}
    rows = [{"messages": TURNS}, {"text": "plain", "messages": TURNS}, {"conversations": SHARED}, prompted]
    rows += [{"input_ids": [5, 6]}, {"text": None, "messages": TURNS}, {"text": " "}]
    expected = [WANTED, "plain", WANTED, WANTED, [5, 6], WANTED]
    path = write(tmp_path / "a.jsonl", *rows)
    assert list(iter_documents(path, None, ChatRenderer(chatty))) == expected
    assert not caplog.text
    path = write(tmp_path / "b.jsonl", *rows, {"prompt": "no answer"}, {"text": None})
    assert list(iter_documents(path, None, ChatRenderer(chatty))) == expected
    assert "2 of 8 records" in caplog.text
    assert "holds {'prompt': 'no answer'} without text" in caplog.text
    source, _ = save_text(["plain", TURNS, SHARED], tmp_path, num_sequences=9, seed=0)
    assert list(iter_documents(source, None, ChatRenderer(chatty))) == ["plain", WANTED, WANTED]


def test_named_columns_that_a_record_lacks_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", {"body": "a"}, {"body": None}, {"body": ""}, {"body": "b"}, {"text": "c"})
    assert list(iter_documents(f"{path}:body", None)) == ["a", "b"]
    assert "2 of 4 records" in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "identity_1", "turns": ["a", "b"]}, "no column 'text' but 'id, turns'"),
        ({"id": "identity_1", "turns": {"a": "b"}}, "no column 'text'"),
        ({"messages": [{"role": 5, "content": "a"}]}, "where a turn should be"),
        ({"messages": [{"content": "a"}]}, "where a turn should be"),
        ({"messages": ["hello"]}, "where a turn should be"),
        ({"messages": "hello"}, "where turns of a conversation should be"),
        ({"messages": []}, "where turns of a conversation should be"),
    ],
    ids=str,
)
def test_what_is_no_conversation_is_refused(row: dict[str, Any], message: str, chatty: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", row)
    with pytest.raises(CalibrationError, match=message):
        list(iter_documents(path, 0, ChatRenderer(chatty)))


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
        list(iter_documents(path, 0, ChatRenderer(own)))
    own.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(CalibrationError, match="roles must alternate"):
        list(iter_documents(path, 0, ChatRenderer(own)))


def test_a_template_gives_no_second_bos(beginning: Any) -> None:
    beginning.chat_template = "<s>" + TEMPLATE
    assert ChatRenderer(beginning)(TURNS, "a") == WANTED


def test_a_bos_that_only_the_template_writes_stays(tokenizer: Any) -> None:
    own = copy.deepcopy(tokenizer)
    own.chat_template = "<s>" + TEMPLATE
    assert ChatRenderer(own)(TURNS, "a") == "<s>" + WANTED


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
