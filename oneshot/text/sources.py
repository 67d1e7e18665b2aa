"""Documents of a text source: a data set, a file, or the text that is in the package."""

import itertools
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from oneshot.errors import CalibrationError, cause
from oneshot.text.chats import ChatRenderer, chat_column, is_turn, stated, turns_of
from oneshot.text.files import (
    READABLE,
    TEXTS,
    check_file,
    cut,
    ending_of,
    file_of,
    file_rows,
    is_file_name,
    names_file,
    present_row,
    seeded_order,
    shown,
    text_pieces,
)
from oneshot.text.odd_records import OddRecords
from oneshot.text.token_rows import TOKENS, fillings_of, text_tokens

# Short names of hub data sets: path, config, split, column.
HUB_ALIASES = {
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "train", "text"),
    "c4": ("allenai/c4", "en", "train", "text"),
}
BUILTIN = "builtin"
BUILTIN_FILE = Path(__file__).with_name("builtin.jsonl")
SHORT_NAMES = (BUILTIN, *HUB_ALIASES)
HUB_NAME = r"[\w.-]+(/[\w.-]+)?"
TOKENS_ENDING = ".safetensors"  # read by `token_files`
PAIR_COLUMN = "text_pair"
SHUFFLE_BUFFER = 10_000
PATIENCE = 10.0  # seconds for the first answer of the hub

Row = dict[str, Any]
Document = str | list[int]  # a text, or its tokens
Pair = tuple[Document | None, str | None]  # a document, None without one, and the second text of a pair
TEXT_ITSELF = "; text itself goes into such a file, or in Python into a list of strings"


def check_source(source: str, *, reads_pairs: bool = True) -> None:
    """Raise `CalibrationError` for a source that is a local path and cannot be read; nothing else is opened.

    `reads_pairs`: whether a second column is read; otherwise a source that names one is refused.
    """
    if source not in SHORT_NAMES and is_file_name(source):
        path, columns = file_of(source)
        check_file(path, TOKENS_ENDING)
        if columns and ending_of(path.name) in TEXTS:
            raise CalibrationError(f"{path} holds no columns; leave out :{','.join(columns)}.")
    elif source not in SHORT_NAMES:
        columns = _columns(_parse_hub_source(source)[3])
    else:
        columns = ()
    most = 2 if reads_pairs else 1
    if len(columns) > most:
        read = "two of a pair" if reads_pairs else "one of each document"
        raise CalibrationError(
            f"{source} names {len(columns)} columns, but the model reads {read}; name {most}, or join columns in the "
            "file."
        )


def iter_documents(source: str, seed: int | None, render: ChatRenderer | None = None) -> Iterator[Document]:
    """Yield the documents of a source in a seeded random order (`seed=None`: as stored), without empty ones.

    Documents that are too long to be tokenised at once are yielded in pieces. Records that give no text are left out
    and told (`odd_records`).

    Args:
        source: `builtin`, a local file with an ending of `files` (`file[:column]` if it has rows), `wikitext2`, `c4`,
            or a hub data set as `org/name[:config[:split[:column]]]`.
        render: makes text of conversations, see `chats`; None if the model takes none, and no tokens.

    Raises `CalibrationError` if the source cannot be read or names several columns, and if most of its records give no
    text.
    """
    check_source(source, reads_pairs=False)
    return (document for document, _ in _documents(source, seed, PAIR_COLUMN, render))


def iter_pairs(source: str, seed: int | None, *, second: str = PAIR_COLUMN) -> Iterator[tuple[str, str | None]]:
    """Yield the documents of a source as `iter_documents`, each with its second text, or None.

    Second texts are in a column `second` beside `text`, or in the second of two columns that a source names,
    `file:first,second` or `org/name:config:split:first,second`.
    """
    check_source(source)
    for document, other in _documents(source, seed, second, None):
        assert isinstance(document, str)  # nothing else without a renderer
        yield document, other


def _documents(
    source: str, seed: int | None, second: str, render: ChatRenderer | None
) -> Iterator[tuple[Document, str | None]]:
    if source == "builtin":
        pairs: Iterable[Pair] = ((text, None) for text in _builtin_documents(seed))
    elif is_file_name(source):
        pairs = _file_documents(source, seed, second, render)
    else:
        pairs = _hub_documents(source, seed, second, render)
    for pair in pairs:
        for document, other in _pieces(*pair, seed):
            if document is not None:
                yield document, other


def read_rows(source: str, limit: int | None = None) -> list[dict[str, Any]]:
    """Return the first rows of a source, in their stored order and with all columns: examples to evaluate models on.

    Args:
        source: a local file of rows, or a hub data set as `org/name[:config[:split]]`; the split is `validation` if
            it is not stated.
        limit: at most so many rows; None for all.

    Raises `CalibrationError` if the source cannot be read or holds no rows.
    """
    file, columns = file_of(source)
    if source == "builtin" or ending_of(file.name) in TEXTS:
        raise CalibrationError(f"{file} holds no columns; give a .jsonl or .parquet file with one example per row.")
    if columns:
        raise CalibrationError(_fixed_columns(source, ",".join(columns)))
    if is_file_name(source):
        return file_rows(file)[:limit]
    path, config, split, column = _parse_hub_source(source, "validation")
    if column is not None:
        raise CalibrationError(_fixed_columns(source, column))
    return list(itertools.islice(_hub_rows(path, config, split, None), limit))


def _checked(text: Any, source: str) -> str | None:
    """Return a text of a source; None if it is missing or blank."""
    if text is not None and not isinstance(text, str):
        raise CalibrationError(
            f"{source} holds {reprlib.repr(text)} where text should be; give rows whose column of text holds text."
        )
    if text is None or not text.strip():
        return None
    return whole_letters(text)


def whole_letters(text: str) -> str:
    """Return a text with replacements for halves of letters: JSON may hold half a pair of surrogates."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


# of texts that take turns: what is least alike comes first
KIND_ORDER = ("story", "code", "web", "technical", "dialogue", "encyclopedia", "how-to", "mathematics")


def _builtin_documents(seed: int | None) -> list[str]:
    """Return the documents that are in the package: eight kinds of English text, written for calibration.

    In a seeded order the kinds take turns, so that few tokens have code and as many kinds as they can hold.
    """
    rows = file_rows(BUILTIN_FILE)
    if seed is None:
        return [row["text"] for row in rows]
    kinds: dict[str, list[str]] = {}
    for row in _shuffled(rows, seed):
        kinds.setdefault(row["kind"], []).append(row["text"])
    turns = itertools.zip_longest(*(kinds[kind] for kind in KIND_ORDER))
    return [text for turn in turns for text in turn if text is not None]


def _fixed_columns(source: str, named: str) -> str:
    return f"{source} names columns, but examples have fixed ones; leave out :{named}."


def _file_documents(source: str, seed: int | None, second: str, render: ChatRenderer | None) -> Iterable[Pair]:
    path, columns = file_of(source)
    check_file(path)
    if ending_of(path.name) in TEXTS:
        return ((_checked(piece, source), None) for piece in text_pieces(path, seed))
    odd = OddRecords(str(path))
    rows = file_rows(path, odd)
    read = _reader(rows, columns, str(path), second, render)
    return _shuffled([piece for pair in _read(rows, read, str(path), odd) for piece in _pieces(*pair, seed)], seed)


def _read(rows: Iterable[Row], read: Callable[[Row], Pair], source: str, odd: OddRecords) -> Iterator[Pair]:
    """Yield the documents of rows. Raises `CalibrationError` if most rows give none, or the names of files."""
    try:
        for row in rows:
            try:
                pair = read(row)
                if isinstance(pair[0], str) and names_file(pair[0]):
                    raise CalibrationError(
                        f"{source} holds {reprlib.repr(pair[0])}, which names a file and is no text; give the files "
                        "themselves, or rows with their text."
                    )
            except CalibrationError as error:
                odd.leave_out(error)
                continue
            if pair[0] is not None:
                odd.count_good()
            yield pair
        odd.check()
    finally:  # also if the caller has enough
        odd.tell()


def _pieces(document: Document | None, pair: str | None, seed: int | None) -> list[Pair]:
    """Return a text that is too long as several, so that the order of all pieces is seeded."""
    if not isinstance(document, str) or pair is not None:
        return [(document, pair)]
    return [(piece, None) for piece in cut(document, seed)]


def _reader(
    rows: Sequence[Row], columns: Sequence[str], source: str, second: str, render: ChatRenderer | None
) -> Callable[[Row], Pair]:
    """Return the function that reads document and second text of a row: from the named columns, else what it has.

    That is `text`, a conversation, or tokens, so that a file may hold several of them; or the only column of text. The
    function raises `CalibrationError` for a row without any.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))  # in the order of the file
    if columns:
        return _column_reader(names, columns, source, second, render)
    has_chats = render is not None and chat_column(names) is not None
    tokens = _token_reader(source, render) if TOKENS in names and (render is not None or "text" not in names) else None
    column = "text" if has_chats or tokens is not None else _text_column(rows, names, source)

    def read(row: Row) -> Pair:
        if row.get(column) is not None:
            return _checked(row[column], source), _checked(row.get(second), source)
        chat = chat_column([name for name, value in row.items() if value is not None])
        if chat is not None and render is not None:
            return _conversation(turns_of(row, chat), row, source, render), None
        if tokens is not None and row.get(TOKENS) is not None:
            return tokens(row)
        raise _without_text(row, source)

    return read


def _without_text(row: Row, source: str) -> CalibrationError:
    return CalibrationError(
        f"{source} holds {reprlib.repr(row)} without text; mend that record, or name the column with the text, as in "
        "file:column or org/name:config:split:column."
    )


def _conversation(turns: Any, row: Row, source: str, render: ChatRenderer) -> str | None:
    return None if turns is None else _checked(render(turns, source, row), source)


def _token_reader(source: str, render: ChatRenderer | None) -> Callable[[Row], Pair]:
    """Return the function that reads the tokens of a row, without padding."""
    if render is None:
        raise CalibrationError(f"{source} holds tokens, which only models that write text read; give a text.")
    fillings = fillings_of(render.tokenizer)

    def read(row: Row) -> Pair:
        tokens: list[int] = text_tokens(row, source, fillings).tolist()
        if any(token < 0 for token in tokens):
            raise CalibrationError(f"{source} holds the negative token {min(tokens)}; leave out the padding.")
        return tokens or None, None

    return read


def _hub_documents(source: str, seed: int | None, second: str, render: ChatRenderer | None) -> Iterator[Pair]:
    path, config, split, column = HUB_ALIASES.get(source) or _parse_hub_source(source)
    rows = map(present_row, _hub_rows(path, config, split, seed))
    first = next(rows)
    read = _reader([first], _columns(column), path, second, render)
    yield from _read(itertools.chain([first], rows), read, path, OddRecords(path))


def _column_reader(
    names: Sequence[str], columns: Sequence[str], path: str, second: str, render: ChatRenderer | None
) -> Callable[[Row], Pair]:
    """Return the function that reads the named columns of a row, also one of conversations."""
    for name in columns:
        if name not in names:
            raise CalibrationError(f"{path} has no column {name!r}; it has {', '.join(names)}.")
    beside = columns[1] if len(columns) > 1 else second

    def read(row: Row) -> Pair:
        value = stated(row.get(columns[0]))
        if value is None:
            raise _without_text(row, path)
        if (
            render is not None
            and isinstance(value, list)
            and (value is row.get(columns[0]) or all(map(is_turn, value)))
        ):
            return _conversation(value, row, path, render), None
        return _checked(row.get(columns[0]), path), _checked(row.get(beside), path)

    return read


def _hub_rows(path: str, config: str | None, split: str, seed: int | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a hub data set; at least one.

    The hub is asked for the name first: datasets repeats requests for half a minute if there is no network.
    """
    from datasets import load_dataset
    from huggingface_hub import HfApi

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

    guarded(lambda: HfApi().dataset_info(path, timeout=PATIENCE))
    rows = guarded(open_rows)
    row = guarded(lambda: next(rows, None))
    if row is None:
        raise CalibrationError(f"The split {split} of {path} is empty; choose another.")
    while row is not None:
        yield row
        row = guarded(lambda: next(rows, None))


def _parse_hub_source(source: str, default_split: str = "train") -> tuple[str, str | None, str, str | None]:
    parts = source.split(":")
    if len(parts) > 4 or not re.fullmatch(HUB_NAME, parts[0]):
        raise CalibrationError(
            f"--calibration {shown(source)} is not understood; write org/name:config:split:column, or {READABLE}"
            f"{TEXT_ITSELF if len(source.split()) > 1 else ''}."
        )
    path, config, split, column = parts + [""] * (4 - len(parts))
    return path, config or None, split or default_split, column or None


def _columns(named: str | None) -> tuple[str, ...]:
    """Return the columns that a data set's name ends with."""
    return tuple(named.split(",")) if named else ()


def _text_column(rows: Sequence[dict[str, Any]], names: Sequence[str], source: str) -> str:
    """Return `text`, or the only column that has text in some row; none beside columns of lists."""
    if "text" in names:
        return "text"
    columns = [name for name in names if any(isinstance(row.get(name), str) for row in rows)]
    nested = [name for name in names if any(isinstance(row.get(name), list | dict) for row in rows)]
    if len(columns) != 1 or nested:
        raise CalibrationError(
            f"{source} has no column 'text' but {reprlib.repr(', '.join(names))}; "
            "name the one with the text, as in file:column or org/name:config:split:column."
        )
    return columns[0]


def _shuffled(documents: list[Any], seed: int | None) -> list[Any]:
    if seed is None:
        return documents
    return [documents[position] for position in seeded_order(len(documents), seed)]
