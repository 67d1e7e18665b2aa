"""Documents of a text source: a data set, a file, or the text that comes with Python."""

import itertools
import json
import reprlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from oneshot.errors import CalibrationError, cause

# Short names of hub data sets: path, config, split, column.
HUB_ALIASES = {
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "train", "text"),
    "c4": ("allenai/c4", "en", "train", "text"),
}
SHORT_NAMES = ("builtin", *HUB_ALIASES)
PAIR_COLUMN = "text_pair"
SHUFFLE_BUFFER = 10_000
LONGEST_DOCUMENT = 4_000_000  # characters of a text file that are tokenised at once

Pair = tuple[Any, Any]  # a text and its second one, not checked yet


def iter_documents(source: str, seed: int | None) -> Iterator[str]:
    """Yield the documents of a source in a seeded random order (`seed=None`: as stored), without empty ones.

    Args:
        source: `builtin`, a local `.txt`, `.jsonl` or `.parquet` file, `wikitext2`, `c4`, or a hub data set as
            `org/name[:config[:split[:column]]]`.

    Raises `CalibrationError` if the source cannot be read.
    """
    return (text for text, _ in iter_pairs(source, seed))


def iter_pairs(source: str, seed: int | None, *, second: str = PAIR_COLUMN) -> Iterator[tuple[str, str | None]]:
    """Yield the documents of a source as `iter_documents`, each with its second text, or None.

    Second texts are in a column `second` beside `text`, or in the second of two columns that a hub source names,
    `org/name:config:split:first,second`.
    """
    if source == "builtin":
        documents: Iterable[Pair] = ((text, None) for text in _shuffled(_builtin_documents(), seed))
    elif Path(source).suffix in (".txt", ".jsonl", ".json", ".parquet"):
        documents = _file_documents(Path(source), seed, second)
    else:
        documents = _hub_documents(source, seed, second)
    for text, pair in documents:
        first, other = _checked(text, source), _checked(pair, source)
        if first is not None:
            yield first, other


def read_rows(source: str, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the first rows of a source, in their stored order and with all columns: examples to evaluate models on.

    Args:
        source: a `.jsonl` or `.parquet` file, or a hub data set as `org/name[:config[:split]]`; the split is
            `validation` if it is not stated.
        limit: at most so many rows; None for all.

    Raises `CalibrationError` if the source cannot be read or holds no rows.
    """
    if Path(source).suffix in (".jsonl", ".json", ".parquet"):
        return _file_rows(Path(source))[:limit]
    if Path(source).suffix == ".txt" or source == "builtin":
        raise CalibrationError(f"{source} holds no columns; give a .jsonl or .parquet file with one example per row.")
    path, config, split, column = _parse_hub_source(source, "validation")
    if column is not None:
        raise CalibrationError(f"{source} names columns, but examples have fixed ones; leave out :{column}.")
    return list(itertools.islice(_hub_rows(path, config, split, None), limit))


def _checked(text: Any, source: str) -> str | None:
    """Return a text of a source; None if it is missing or blank."""
    if text is not None and not isinstance(text, str):
        raise CalibrationError(
            f"{source} holds {reprlib.repr(text)} where text should be; choose the column with the text."
        )
    if text is None or not text.strip():
        return None
    return whole_letters(text)


def whole_letters(text: str) -> str:
    """Return a text with replacements for halves of letters: JSON may hold half a pair of surrogates."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _builtin_documents() -> list[str]:
    """Return Python's own help topics: technical prose that every installation has, for off-line demos."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _file_documents(path: Path, seed: int | None, second: str) -> Iterable[Pair]:
    if path.suffix == ".txt":
        _check_file(path)
        return ((piece, None) for piece in _text_pieces(path))
    rows = _file_rows(path)
    column = _text_column(rows, str(path))
    return _shuffled([(row.get(column), row.get(second)) for row in rows], seed)


def _file_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines or Parquet; at least one."""
    _check_file(path)
    try:
        rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read ({cause(error)}); check the path.") from error
    if not rows:
        raise CalibrationError(f"{path} holds no rows; give one record with text per line.")
    return rows


def _check_file(path: Path) -> None:
    """Raise `CalibrationError` for a file that is missing or empty."""
    try:
        if path.is_dir():
            raise CalibrationError(f"{path} is a folder; give a .txt, .jsonl or .parquet file.")
        if not path.is_file():
            raise CalibrationError(f"{path} does not exist; give a .txt, .jsonl or .parquet file.")
        if path.stat().st_size == 0:
            raise CalibrationError(f"{path} is empty; give a file with text.")
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read ({cause(error)}); check the path.") from error


def _text_pieces(path: Path) -> Iterator[str]:
    """Yield the text as one document, or as several if it is too long to be tokenised at once."""
    try:
        with path.open(encoding="utf-8") as file:
            while piece := file.read(LONGEST_DOCUMENT):
                yield piece
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path} is not UTF-8 text ({cause(error)}); convert it first.") from error
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read ({cause(error)}); check the path.") from error


def size_of_records(path: Path) -> tuple[int, int]:
    """Return the number of records of a file of JSON lines and the bytes of the longest; it holds one line at a time.

    An array of objects counts as one record. Raises `CalibrationError` for a file that cannot be read.
    """
    _check_file(path)
    number = longest = 0
    try:
        with path.open("rb") as file:
            for line in file:
                if number == 0 and line.lstrip().startswith(b"["):
                    return 1, path.stat().st_size
                number, longest = number + 1, max(longest, len(line))
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read ({cause(error)}); check the path.") from error
    return number, longest


def _json_rows(path: Path) -> list[dict[str, Any]]:
    """Read one object per line, or one array of objects."""
    rows: list[Any] = []
    number = 0
    try:
        with path.open("rb") as file:
            for line in file:
                number += 1
                if not rows and line.lstrip().startswith(b"["):
                    rows = json.loads(line + file.read())
                    break
                if line.strip():
                    rows.append(json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")))
    except (ValueError, RecursionError) as error:
        raise CalibrationError(
            f"Line {number} of {path} cannot be read as json ({cause(error)}); give one record with text per line."
        ) from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise CalibrationError(
                f"Record {number} of {path} is {reprlib.repr(row)}, which is not a JSON object; "
                "give one record with text per line."
            )
    return rows


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    from datasets import load_dataset

    with tempfile.TemporaryDirectory(prefix="oneshot-") as folder:
        plain = Path(folder) / "rows.parquet"  # datasets takes brackets and stars in a name for a pattern
        plain.symlink_to(path.resolve())
        try:
            return list(load_dataset("parquet", data_files=str(plain), split="train", streaming=True))
        except Exception as error:  # datasets raises many unrelated types; the cause is named and chained
            raise CalibrationError(
                f"{path} cannot be read as parquet ({cause(error)}); give one record with text per row."
            ) from error


def _hub_documents(source: str, seed: int | None, second: str) -> Iterator[Pair]:
    path, config, split, column = HUB_ALIASES.get(source) or _parse_hub_source(source)
    rows = _hub_rows(path, config, split, seed)
    first = next(rows)
    columns = (column or _text_column([first], path)).split(",")
    for name in columns:
        if name not in first:
            raise CalibrationError(f"{path} has no column {name!r}; it has {', '.join(first)}.")
    for row in itertools.chain([first], rows):
        yield row.get(columns[0]), row.get(columns[1] if len(columns) > 1 else second)


def _hub_rows(path: str, config: str | None, split: str, seed: int | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a hub data set; at least one."""
    from datasets import load_dataset

    def guarded(read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception as error:  # datasets raises many unrelated types; the cause is named and chained
            raise CalibrationError(
                f"The data set {path} cannot be loaded ({type(error).__name__}: {cause(error)}); check the name and "
                "the network, or give a local file or 'builtin' as --calibration."
            ) from error

    def open_rows() -> Iterator[dict[str, Any]]:
        rows = load_dataset(path, config, split=split, streaming=True)
        return iter(rows if seed is None else rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER))

    rows = guarded(open_rows)
    row = guarded(lambda: next(rows, None))
    if row is None:
        raise CalibrationError(f"The split {split} of {path} is empty; choose another.")
    while row is not None:
        yield row
        row = guarded(lambda: next(rows, None))


def _parse_hub_source(source: str, default_split: str = "train") -> tuple[str, str | None, str, str | None]:
    parts = source.split(":")
    if len(parts) > 4 or not parts[0]:
        raise CalibrationError(f"--calibration {source} is not understood; write org/name:config:split:column.")
    path, config, split, column = parts + [""] * (4 - len(parts))
    return path, config or None, split or default_split, column or None


def _text_column(rows: Sequence[dict[str, Any]], source: str) -> str:
    """Return `text`, or the only column that has text in some row."""
    names = dict.fromkeys(name for row in rows for name in row)  # in the order of the file
    if "text" in names:
        return "text"
    columns = [name for name in names if any(isinstance(row.get(name), str) for row in rows)]
    if len(columns) != 1:
        raise CalibrationError(
            f"{source} has no column 'text' but {reprlib.repr(', '.join(names))}; "
            "rename the one with the text to 'text'."
        )
    return columns[0]


def _shuffled(documents: list[Any], seed: int | None) -> list[Any]:
    if seed is None:
        return documents
    generator = torch.Generator().manual_seed(seed)
    return [documents[position] for position in torch.randperm(len(documents), generator=generator).tolist()]
