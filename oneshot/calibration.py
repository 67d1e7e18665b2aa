"""Calibration text: data set, file or built-in text -> packed token sequences, with a seed and a content hash."""

import json
import logging
import reprlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from oneshot.errors import CalibrationError, cause
from oneshot.records import CalibrationSet

logger = logging.getLogger(__name__)

# Short names of hub data sets: path, config, split, column.
HUB_ALIASES = {
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "train", "text"),
    "c4": ("allenai/c4", "en", "train", "text"),
}
SHUFFLE_BUFFER = 10_000
LONGEST_DOCUMENT = 4_000_000  # characters of a text file that are tokenised at once


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer stored beside the weights. Raises `CalibrationError` where there is none."""
    from transformers import AutoTokenizer

    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise CalibrationError(f"{folder} holds no tokenizer; copy the model's tokenizer files there.")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the readers of tokenizers raise many unrelated types; the cause is named and chained
        raise CalibrationError(
            f"The tokenizer in {folder} cannot be read ({cause(error)}); copy the model's files again."
        ) from error


def load_calibration(
    source: str, tokenizer: Any, *, num_sequences: int, sequence_length: int, seed: int
) -> CalibrationSet:
    """Documents of `source` in a seeded random order, tokenised, joined and cut into sequences.

    Args:
        source: `builtin`, a local `.txt`, `.jsonl` or `.parquet` file, `wikitext2`, `c4`, or a hub data set as
            `org/name[:config[:split[:column]]]`.
        num_sequences: at most this many sequences; fewer, with a warning, where the text is shorter.
        sequence_length: tokens in each.

    Returns:
        `token_ids` int64 `(num_sequences, sequence_length)`, the same for the same seed and text.

    Raises `CalibrationError` when the source cannot be read or holds less than one sequence.
    """
    documents = iter_documents(source, seed)
    token_ids = pack(documents, tokenizer, num_sequences=num_sequences, sequence_length=sequence_length, source=source)
    if len(token_ids) < num_sequences:
        logger.warning("%s holds %d sequences of the %d asked for.", source, len(token_ids), num_sequences)
    return CalibrationSet(token_ids, source)


def split_sources(calibration: str) -> list[str]:
    """`"c4+self"` -> `["c4", "self"]`; plus signs in the name of a file that is there do not split it."""
    sources, parts = [], calibration.split("+")
    while parts:
        files = [count for count in range(2, len(parts) + 1) if Path("+".join(parts[:count])).exists()]
        count = max(files, default=1)
        sources.append("+".join(parts[:count]))
        parts = parts[count:]
    return sources


def shares(num_sequences: int, sources: Sequence[str]) -> list[int]:
    """How many sequences each source gives: equally many, the first ones one more where that does not divide.

    Raises `CalibrationError` where there are fewer sequences than sources.
    """
    least, more = divmod(num_sequences, len(sources))
    if least == 0:
        raise CalibrationError(
            f"{num_sequences} sequences are too few for the {len(sources)} sources {' and '.join(sources)}; "
            "give more --num-sequences."
        )
    return [least + (number < more) for number in range(len(sources))]


def mixed(parts: Sequence[CalibrationSet], seed: int) -> CalibrationSet:
    """The sequences of several sources in one seeded random order, so that the first ones are of all kinds, too."""
    if len(parts) == 1:
        return parts[0]
    together = torch.cat([part.token_ids for part in parts])
    token_ids = together[torch.randperm(len(together), generator=torch.Generator().manual_seed(seed))]
    return CalibrationSet(token_ids, "+".join(part.source for part in parts))


def pack(
    documents: Iterable[str], tokenizer: Any, *, num_sequences: int | None, sequence_length: int, source: str
) -> torch.Tensor:
    """Join tokenised documents and cut them into `(num_sequences, sequence_length)`; None takes all there is."""
    wanted = None if num_sequences is None else num_sequences * sequence_length
    token_ids: list[int] = []
    for document in documents:
        try:
            token_ids.extend(tokenizer(document + "\n\n", verbose=False)["input_ids"])
        except Exception as error:  # tokenizers raise many unrelated types; the cause is named and chained
            raise CalibrationError(
                f"The tokenizer cannot take the text of {source} ({cause(error)}); copy the model's files again."
            ) from error
        if wanted is not None and len(token_ids) >= wanted:
            break
    complete = len(token_ids) // sequence_length
    if complete == 0:
        raise CalibrationError(
            f"{source} holds {len(token_ids)} tokens, less than one sequence of {sequence_length}; "
            "give more text or a smaller --sequence-length."
        )
    if num_sequences is not None:
        complete = min(complete, num_sequences)
    return torch.tensor(token_ids[: complete * sequence_length], dtype=torch.int64).view(complete, sequence_length)


def iter_documents(source: str, seed: int | None) -> Iterator[str]:
    """The documents of a source, in a seeded random order (`seed=None`: as stored); empty ones are left out."""
    if source == "builtin":
        documents: Iterable[str] = _shuffled(_builtin_documents(), seed)
    elif Path(source).suffix in (".txt", ".jsonl", ".json", ".parquet"):
        documents = _file_documents(Path(source), seed)
    else:
        documents = _hub_documents(source, seed)
    return _texts(documents, source)


def _texts(documents: Iterable[Any], source: str) -> Iterator[str]:
    for document in documents:
        if document is not None and not isinstance(document, str):
            raise CalibrationError(
                f"{source} holds {reprlib.repr(document)} where text should be; choose the column with the text."
            )
        if document is not None and document.strip():
            yield document.encode("utf-8", "surrogatepass").decode("utf-8", "replace")  # JSON may hold half a pair


def _builtin_documents() -> list[str]:
    """Python's own help topics: text that every installation has. Technical prose, for off-line demos only."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _file_documents(path: Path, seed: int | None) -> Iterable[Any]:
    try:
        if path.is_dir():
            raise CalibrationError(f"{path} is a folder; give a .txt, .jsonl or .parquet file.")
        if not path.is_file():
            raise CalibrationError(f"{path} does not exist; give a .txt, .jsonl or .parquet file.")
        if path.stat().st_size == 0:
            raise CalibrationError(f"{path} is empty; give a file with text.")
        if path.suffix == ".txt":
            return _text_pieces(path)
        rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read ({cause(error)}); check the path.") from error
    if not rows:
        raise CalibrationError(f"{path} holds no rows; give one record with text per line.")
    column = _text_column(rows, str(path))
    return _shuffled([row.get(column) for row in rows], seed)


def _text_pieces(path: Path) -> Iterator[str]:
    """The text as one document, or as several where it is too long to be tokenised at once."""
    try:
        with path.open(encoding="utf-8") as file:
            while piece := file.read(LONGEST_DOCUMENT):
                yield piece
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path} is not UTF-8 text ({cause(error)}); convert it first.") from error
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read ({cause(error)}); check the path.") from error


def _json_rows(path: Path) -> list[dict[str, Any]]:
    """One object per line, or one array of objects."""
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
                f"Record {number} of {path} is {reprlib.repr(row)} and no JSON object; "
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


def _hub_documents(source: str, seed: int | None) -> Iterator[Any]:
    from datasets import load_dataset

    path, config, split, column = HUB_ALIASES.get(source) or _parse_hub_source(source)

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
    column = column or _text_column([row], path)
    if column not in row:
        raise CalibrationError(f"{path} has no column {column!r}; it has {', '.join(row)}.")
    while row is not None:
        yield row.get(column)
        row = guarded(lambda: next(rows, None))


def _parse_hub_source(source: str) -> tuple[str, str | None, str, str | None]:
    parts = source.split(":")
    if len(parts) > 4 or not parts[0]:
        raise CalibrationError(f"--calibration {source} is not understood; write org/name:config:split:column.")
    path, config, split, column = parts + [""] * (4 - len(parts))
    return path, config or None, split or "train", column or None


def _text_column(rows: Sequence[dict[str, Any]], source: str) -> str:
    """`text`, or the only column with text in some row."""
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
