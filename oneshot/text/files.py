"""Local files of text: which endings are read, their rows, and pieces that can be tokenised at once."""

import gzip
import json
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch

from oneshot.errors import CalibrationError, cause
from oneshot.machine.scratch import scratch_folder
from oneshot.text.odd_records import OddRecords

TEXTS = (".txt", ".md")
RECORDS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
TABLES = (".parquet", ".csv")
READABLE = "give a .txt, .md, .jsonl, .json (also .gz), .csv or .parquet file"
LONGEST_SHOWN = 100  # letters of a source in a sentence
PIECE_BYTES = 2**18  # of a long text, tokenised at once
LONGEST_DOCUMENT = 4_000_000  # characters that are tokenised at once where the order is the stored one
BOM = b"\xef\xbb\xbf"


def ending_of(source: str) -> str | None:
    """Return the ending of a source's name that is read, in small letters; None for other names."""
    name = source.lower()
    return next((ending for ending in (*TEXTS, *RECORDS, *TABLES) if name.endswith(ending)), None)


def file_of(source: str) -> tuple[Path, tuple[str, ...]]:
    """Return the path that a source means, and the columns that it names behind it: `rows.csv:question,answer`."""
    name, _, columns = source.rpartition(":")
    if not columns or ending_of(name) is None or exists(source):
        return Path(source), ()
    return Path(name), tuple(columns.split(","))


def is_file_name(source: str) -> bool:
    """Return whether a source means a local path: by its ending or beginning, or because it or its folder exists."""
    source = str(file_of(source)[0])
    folder = Path(source).parent
    begins = source.startswith(("/", "./", "../", "~"))
    return ending_of(source) is not None or begins or exists(source) or (folder.name != "" and exists(folder))


def names_file(text: str) -> bool:
    """Return whether a text is the name of a file: of one that exists, or a word with an ending that is read."""
    path = file_of(text)[0]
    return (exists(path) and path.is_file()) or (ending_of(path.name) is not None and len(text.split()) == 1)


def exists(path: str | Path) -> bool:
    """Return whether there is something at a path; what is too long to be one is not."""
    try:
        return Path(path).exists()
    except OSError:
        return False


def shown(source: str | Path) -> str:
    """Return a source as a sentence has it: the beginning of one that is too long for a name."""
    text = str(source)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def check_file(path: Path, *further: str) -> None:
    """Raise `CalibrationError` for a file that is missing, empty, or of another kind than those that are read.

    `further`: endings that the caller also reads.
    """
    try:
        if path.is_dir():
            raise CalibrationError(f"{path} is a folder; {READABLE}.")
        if not path.is_file():
            raise CalibrationError(f"{path} does not exist; {READABLE}.")
        if ending_of(path.name) is None and not path.name.endswith(further):
            raise CalibrationError(f"{path} has an ending that is not read; {READABLE}.")
        if path.stat().st_size == 0:
            raise CalibrationError(f"{path} is empty; {READABLE} with text.")
    except OSError as error:
        raise CalibrationError(f"{shown(path)} cannot be read ({error.strerror}); check the path.") from error


def text_pieces(path: Path, seed: int | None) -> Iterator[str]:
    """Yield a text file piece by piece, in a seeded random order; `seed=None`: as it is stored, in longer pieces."""
    check_file(path)
    try:
        if seed is None:
            with path.open(encoding="utf-8-sig") as file:
                while piece := file.read(LONGEST_DOCUMENT):
                    yield piece
            return
        size = path.stat().st_size
        for number in seeded_order(-(-size // PIECE_BYTES), seed):
            yield _piece(path, number * PIECE_BYTES).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path} is not UTF-8 text ({cause(error)}); convert it first.") from error
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read ({cause(error)}); check the path.") from error


def _piece(path: Path, start: int) -> str:
    """Return the letters whose first byte is in a piece of the file."""
    with path.open("rb") as file:
        file.seek(start)
        content = file.read(PIECE_BYTES + 3)
    first, end = 0, min(PIECE_BYTES, len(content))
    while start and first < min(3, end) and _continues(content[first]):
        first += 1
    while end < len(content) and end < PIECE_BYTES + 3 and _continues(content[end]):
        end += 1
    return (content[first:end] if start else content[:end].removeprefix(BOM)).decode("utf-8")


def _continues(byte: int) -> bool:
    """Return whether a byte of UTF-8 continues a letter."""
    return byte & 0xC0 == 0x80


def cut(text: str, seed: int | None) -> list[str]:
    """Return a document that is too long to be tokenised at once in pieces, others as they are."""
    length = LONGEST_DOCUMENT if seed is None else PIECE_BYTES
    return [text[start : start + length] for start in range(0, len(text), length)] or [text]


def seeded_order(count: int, seed: int) -> list[int]:
    """Return a random permutation of the first numbers."""
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def file_rows(path: Path, odd: OddRecords | None = None) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines, CSV or Parquet; at least one.

    `odd`: counts lines that are not rows; None if they are an error.
    """
    check_file(path)
    kind = ending_of(path.name)
    try:
        rows = _table_rows(path, str(kind)[1:]) if kind in TABLES else _json_rows(path, odd)
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read ({cause(error)}); check the path.") from error
    if not rows:
        if odd is not None:
            odd.check()
        raise CalibrationError(f"{path} holds no rows; give one record with text per line.")
    return rows


def size_of_records(path: Path) -> tuple[int, int, int]:
    """Return the number of records of a file of JSON lines, the bytes of the longest and of all; it holds one line.

    An array of objects counts as one record. Raises `CalibrationError` for a file that cannot be read.
    """
    check_file(path)
    number = longest = total = 0
    is_array = False
    try:
        with _opened(path) as file:
            for line in file:
                is_array = is_array or (number == 0 and line.lstrip().startswith(b"["))
                number, longest, total = number + 1, max(longest, len(line)), total + len(line)
    except (OSError, EOFError) as error:
        raise CalibrationError(f"{path} cannot be read ({cause(error)}); check the path.") from error
    return (1, total, total) if is_array else (number, longest, total)


def _opened(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.name.lower().endswith(".gz") else path.open("rb")


def _json_rows(path: Path, odd: OddRecords | None) -> list[dict[str, Any]]:
    """Read one object per line, or one array of objects."""
    rows: list[dict[str, Any]] = []
    number = 0
    try:
        with _opened(path) as file:
            for line in file:
                number += 1
                if number == 1:
                    line = line.removeprefix(BOM)
                if not rows and line.lstrip().startswith(b"["):
                    for place, row in enumerate(json.loads(line + file.read()), 1):
                        _take(row, rows, f"Record {place} of {path}", odd)
                    return rows
                if line.strip():
                    _take(line, rows, f"Line {number} of {path}", odd)
    except (ValueError, RecursionError, EOFError) as error:
        raise _unreadable(f"Line {number} of {path}", error) from error
    return rows


def _take(record: Any, rows: list[dict[str, Any]], name: str, odd: OddRecords | None) -> None:
    """Add a record, or a line that holds one, to the rows. Raises `CalibrationError`, or counts it as odd."""
    try:
        row = _parsed(record, name) if isinstance(record, bytes) else record
        if not isinstance(row, dict):
            raise CalibrationError(
                f"{name} is {reprlib.repr(row)}, which is not a JSON object; give one record with text per line."
            )
        rows.append(row)
    except CalibrationError as error:
        if odd is None:
            raise
        odd.leave_out(error)


def _parsed(line: bytes, name: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> CalibrationError:
    return CalibrationError(f"{name} cannot be read as json ({cause(error)}); give one record with text per line.")


def _table_rows(path: Path, kind: str) -> list[dict[str, Any]]:
    """Return the rows of a Parquet or CSV file."""
    from datasets import load_dataset

    options = {"sep": _separator(path)} if kind == "csv" else {}
    with scratch_folder() as folder:
        plain = folder / f"rows.{kind}"  # datasets takes brackets and stars in a name for a pattern
        plain.symlink_to(path.resolve())
        try:
            return [
                *map(present_row, load_dataset(kind, data_files=str(plain), split="train", streaming=True, **options))
            ]
        except Exception as error:  # datasets raises many unrelated types; the cause is named and chained
            raise CalibrationError(
                f"{path} cannot be read as {kind} ({cause(error)}); give one record with text per row."
            ) from error


def _separator(path: Path) -> str:
    """Return what separates the columns of a CSV file: a comma, or a semicolon or tab without commas in line 1."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        header = file.readline(PIECE_BYTES)
    return "," if "," in header else max(",;\t", key=header.count)


def present_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a table of Arrow without the fields inside its columns that are None.

    Such a table has one set of fields for all rows, and None where a row lacks one. So a record is the same from it as
    from JSON lines, and a chat template does not write fields that the record never had.
    """
    return {name: _present(value) for name, value in row.items()}


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _present(item) for name, item in value.items() if item is not None}
    is_nested = isinstance(value, list) and any(isinstance(item, dict | list) for item in value)
    return [_present(item) for item in value] if is_nested else value
