"""Files of calibration text: rows of every kind, their names, and long documents."""

from pathlib import Path

import pytest
from factories import topics

from oneshot.errors import CalibrationError
from oneshot.text import iter_documents

ROWS: list[tuple[str, bytes, list[str] | str]] = [
    ("rows.jsonl", b'{"text": "a"}\n\n  \n{"text": ""}\n{"text": null}\n{"text": "b"}\n', ["a", "b"]),
    ("columns.jsonl", b'{"id": 1}\n{"text": "a", "id": "x"}\n{"text": "b"}\n', ["a", "b"]),
    ("other-columns.jsonl", b'{"id": 1}\n{"text": "a"}\n{"other": [1]}\n', "2 of 3 records .* {'id': 1} without text"),
    ("conversations.jsonl", b'{"text": "a"}\n' + 2 * b'{"messages": []}\n', "2 of 3 records .* without text"),
    ("one-column.jsonl", b'{"n": 1}\n{"n": 2, "body": "a"}\n', ["a"]),
    ("array.json", b'\n [{"text": "a"},\n {"text": "b"}]', ["a", "b"]),
    ("mark.jsonl", b'\xef\xbb\xbf{"text": "a"}\n', ["a"]),
    ("half-a-pair.jsonl", b'{"text": "a \\ud83d b"}\n', ["a ??? b"]),
    ("date.jsonl", b'{"text": "2020-01-01"}\n', ["2020-01-01"]),
    ("zero.txt", b"a\0b", ["a\0b"]),
    ("numbers.jsonl", b'{"text": "a"}\n{"text": 5}\n', ["a"]),
    ("mostly-numbers.jsonl", b'{"text": "a"}\n{"text": 5}\n{"text": 6}\n', "2 of 3 records .* holds 5 where text"),
    ("lists.jsonl", b'{"text": ["a", "b"]}\n', "holds \\['a', 'b'\\] where text"),
    ("long-list.jsonl", b'{"text": [' + b"1," * 100_000 + b"1]}\n", "holds \\[1, 1, .*\\.\\.\\.\\] where text"),
    ("broken.jsonl", b'{"text": "a"}\n{"text": \n{"text": "b"}\n', ["a", "b"]),
    (
        "mostly-broken.jsonl",
        b'{"text": \n{"text": "b"}\n{"text"\n',
        "2 of 3 records .* Line 1 of .*mostly-broken.jsonl",
    ),
    ("latin.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', ["a"]),
    ("only-latin.jsonl", b'{"text": "\xff"}\n', "Line 1 of .*utf-8"),
    ("other-records.json", b'[{"text": "a"}, 7, {"text": "b"}]', ["a", "b"]),
    ("latin.txt", b"\xff\xfe", "not UTF-8"),
    ("deep.jsonl", b"[" * 100_000, "Line 1 of"),
    ("no-objects.jsonl", b"1\n2\n", "Line 1 of .* is 1, which is not a JSON object"),
    ("blank.jsonl", b" \n \n", "holds no rows"),
    ("empty-array.json", b"[]", "holds no rows"),
    ("empty.jsonl", b"", "is empty"),
    ("damaged.parquet", b"PAR1" + bytes(100) + b"PAR1", "cannot be read as parquet"),
]


@pytest.mark.parametrize(("name", "content", "expected"), ROWS, ids=[name for name, _, _ in ROWS])
def test_rows_of_every_kind(name: str, content: bytes, expected: list[str] | str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    if isinstance(expected, list):
        assert [text.replace("\ufffd", "?") for text in iter_documents(str(path), seed=None)] == expected
        return
    with pytest.raises(CalibrationError, match=expected) as caught:
        list(iter_documents(str(path), seed=None))
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["a[1].parquet", "a*?.parquet", "li\nne.parquet", "a::b {1}#%20.parquet"])
def test_names_of_parquet_files_are_not_patterns(name: str, tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list([{"text": "a"}, {"text": None}, {"text": "b"}]).to_parquet(tmp_path / "plain.parquet")
    (tmp_path / "plain.parquet").rename(tmp_path / name)
    assert list(iter_documents(str(tmp_path / name), seed=None)) == ["a", "b"]


def test_a_long_text_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oneshot.text.files.LONGEST_DOCUMENT", 1000)
    path, text = tmp_path / "long.txt", topics(0, 2)[:2500].replace("\n", " ")
    path.write_text(text)
    pieces = list(iter_documents(str(path), seed=None))
    assert [len(piece) for piece in pieces] == [1000, 1000, len(text) - 2000]
    assert "".join(pieces) == text
