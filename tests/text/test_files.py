"""Local files of text: every ending, pieces of long texts, seeded positions, and what never goes to the network."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from factories import MakeCheckpoint, MakeConfig, topics
from hypothesis import given
from hypothesis import strategies as st

from oneshot.errors import CalibrationError
from oneshot.pipeline import compress, predict
from oneshot.text import files, iter_documents, load_text, read_rows
from oneshot.text.files import file_of
from oneshot.text.sources import check_source, iter_pairs

DOCUMENTS = [f"Document {number}, with a comma: " + topics(number, number + 1)[:200] for number in range(12)]


def write(path: Path) -> Path:
    """Write the documents as the ending of the name says."""
    name = path.name.lower()
    lines = "".join(json.dumps({"text": document, "number": 1}) + "\n" for document in DOCUMENTS)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    elif name.endswith(".json"):
        path.write_text(json.dumps([{"text": document} for document in DOCUMENTS]))
    elif name.endswith(".jsonl"):
        path.write_text(lines)
    elif name.endswith(".csv"):
        quoted = ['"' + document.replace('"', '""') + '"' for document in DOCUMENTS]
        path.write_text("number,text\n" + "".join(f"1,{document}\n" for document in quoted))
    else:
        path.write_text("".join(DOCUMENTS))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.json.gz", "a.csv", "A.JSONL", "a.Csv"])
def test_every_ending_of_rows(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name)
    assert list(iter_documents(str(path), None)) == DOCUMENTS
    assert sorted(iter_documents(str(path), 0)) == sorted(DOCUMENTS)
    assert [row["text"] for row in read_rows(str(path))] == DOCUMENTS


@pytest.mark.parametrize("name", ["a.txt", "a.md", "A.TXT"])
def test_every_ending_of_texts(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name)
    for seed in (None, 0):
        assert list(iter_documents(str(path), seed)) == ["".join(DOCUMENTS)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text.pdf", "has an ending that is not read"),
        ("text", "has an ending that is not read"),
        ("text.txt.gz", "has an ending that is not read"),
        ("folder", "is a folder"),
        ("missing/text", "does not exist"),
        ("missing.csv", "does not exist"),
    ],
)
def test_local_paths_never_go_to_the_network(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they are given as absolute or as relative paths."""
    monkeypatch.setattr("oneshot.text.sources._hub_rows", lambda *_: pytest.fail("the network is asked"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "missing").mkdir()
    if "missing" not in name and name != "folder":
        (tmp_path / name).write_text("text")
    for source in (name, str(tmp_path / name)):
        for read in (lambda source: list(iter_documents(source, 0)), check_source, read_rows):
            with pytest.raises(CalibrationError, match=f"{message}.*give a .txt, .md, .jsonl"):
                read(source)


def test_a_dry_run_checks_the_text(make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path) -> None:
    for calibration in (tmp_path / "none.jsonl", f"{write(tmp_path / 'a.txt')}+{tmp_path / 'none.txt'}"):
        with pytest.raises(CalibrationError, match="does not exist"):
            predict(make_config(make_checkpoint(), calibration=str(calibration)))
    with pytest.raises(CalibrationError, match="not understood"):
        predict(make_config(make_checkpoint(), calibration="what is this?"))
    predict(make_config(make_checkpoint(), calibration="wikitext2+self"))


ROWS = [{"id": "one", "question": "What?", "answer": "This."}, {"id": "two", "question": "Who?", "answer": "Me."}]
ENDINGS = ["csv", "jsonl", "json", "jsonl.gz", "parquet"]


def rows_file(folder: Path, ending: str) -> Path:
    """Write `ROWS` in one of the kinds of file with rows."""
    import datasets

    path, lines = folder / f"rows: v1.0.{ending}", [json.dumps(row) for row in ROWS]
    if ending == "jsonl.gz":
        path.write_bytes(gzip.compress("\n".join(lines).encode()))
    elif ending in ("csv", "parquet"):
        table = datasets.Dataset.from_list(ROWS)
        table.to_csv(str(path)) if ending == "csv" else table.to_parquet(str(path))
    else:
        path.write_text("\n".join(lines) if ending == "jsonl" else json.dumps(ROWS))
    return path


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_column_of_a_file_is_named_behind_it(ending: str, tmp_path: Path) -> None:
    """As behind data sets of the hub; one column is text, two are pairs. A name may have colons of its own."""
    path = rows_file(tmp_path, ending)
    check_source(f"{path}:answer")
    assert list(iter_documents(f"{path}:answer", None)) == ["This.", "Me."]
    assert list(iter_pairs(f"{path}:question,answer", None)) == [("What?", "This."), ("Who?", "Me.")]
    with pytest.raises(CalibrationError, match="has no column 'reply'; it has id, question, answer"):
        list(iter_documents(f"{path}:reply", None))
    with pytest.raises(CalibrationError, match=r"no column 'text' but.*name the one with the text, as in file:column"):
        list(iter_documents(str(path), None))
    with pytest.raises(CalibrationError, match="examples have fixed ones; leave out :answer"):
        read_rows(f"{path}:answer")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_column_that_is_not_read_is_refused(ending: str, tmp_path: Path) -> None:
    """A second one by models that read one text, a third one by all."""
    path = rows_file(tmp_path, ending)
    reads: dict[int, list[Any]] = {
        1: [lambda source: check_source(source, reads_pairs=False), lambda source: next(iter_documents(source, None))],
        2: [check_source, lambda source: next(iter_pairs(source, None))],
    }
    for most, calls in reads.items():
        columns = ["question", "answer", "id"][: most + 1]
        for source in (f"{path}:{','.join(columns)}", f"org/name:config:train:{','.join(columns)}"):
            for read in calls:
                with pytest.raises(CalibrationError, match=rf" names {most + 1} columns, but .*; name {most}, or"):
                    read(source)


def test_a_run_and_its_prediction_refuse_a_second_column(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(make_checkpoint(), calibration=f"{rows_file(tmp_path, 'jsonl')}:question,answer")
    for call in (predict, compress):
        with pytest.raises(CalibrationError, match="names 2 columns, but the model reads one of each document"):
            call(config)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_the_columns_of_a_csv_file_are_between_commas_semicolons_or_tabs(
    separator: str, start: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    texts = ["One, two; three\tfour.", 'A "quote"\nand a line.', "Plain"]
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(start)
        csv.writer(file, delimiter=separator).writerows([["id", "text", "lang"], *([1, text, "en"] for text in texts)])
    assert list(iter_documents(str(path), None)) == texts
    assert [[*row] for row in read_rows(str(path))] == [["id", "text", "lang"]] * 3
    path.write_text('"a; header, quoted"\n"One; two"\n')
    assert list(iter_documents(str(path), None)) == ["One; two"]


def test_a_table_whose_rows_have_more_columns_than_its_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id;text\n1;One\n2;Two; three; four\n")
    with pytest.raises(CalibrationError, match="cannot be read as csv"):
        list(iter_documents(str(path), None))


def test_the_column_of_a_file_does_not_change_what_is_predicted(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    path, checkpoint = write(tmp_path / "text.jsonl"), make_checkpoint()
    named, whole = (predict(make_config(checkpoint, calibration=source)) for source in (f"{path}:text", str(path)))
    assert named.host_bytes == pytest.approx(whole.host_bytes, abs=2**26)  # what the process holds differs


def test_a_name_with_a_colon_is_a_file_if_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}')
    (tmp_path / "a.jsonl:text").write_text('{"text": "two"}')
    assert file_of(f"{tmp_path}/a.jsonl:text") == (tmp_path / "a.jsonl:text", ())
    assert file_of("org/name:config:split:column") == (Path("org/name:config:split:column"), ())


@pytest.mark.parametrize("name", ["none.jsonl:answer", f"{'n' * 5000}.jsonl:answer", "rows.txt:answer", "rows.md:a,b"])
def test_columns_of_files_that_have_none(name: str, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("text")
    (tmp_path / "rows.md").write_text("text")
    message = "holds no columns" if name.startswith("rows") else "does not exist|cannot be read"
    for read in (check_source, lambda source: list(iter_documents(source, 0))):
        with pytest.raises(CalibrationError, match=message):
            read(str(tmp_path / name))


@given(text=st.text(min_size=1), size=st.integers(4, 9))
def test_pieces_are_the_whole_text(text: str, size: int) -> None:
    """In any order: no letter is lost or cut, whatever its bytes; a BOM at the beginning is not text."""
    import tempfile

    text = text.encode("utf-8", "ignore").decode().replace("\r", "") or "x"
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "PIECE_BYTES", size)
        path = Path(folder) / "a.txt"
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
        count = -(-path.stat().st_size // size)
        found = list(files.text_pieces(path, 5))
        assert len(found) == count
        order = files.seeded_order(count, 5)
        assert "".join(found[order.index(number)] for number in range(count)) == text
        assert "".join(files.text_pieces(path, None)) == text


def test_a_long_text_is_read_at_seeded_positions(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{number} " for number in range(200_000)))
    options = {"num_sequences": 4, "sequence_length": 16}
    first, again, other = (load_text(str(path), tokenizer, seed=seed, **options) for seed in (0, 0, 1))
    assert first.token_hash == again.token_hash != other.token_hash


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_one_long_record_is_not_tokenised_whole(name: str, tokenizer: Any, tmp_path: Path) -> None:
    """What is tokenised for a few tokens is a piece, of whichever form the text is; the seed says which."""
    text, path = "".join(f"{number} " for number in range(400_000)), tmp_path / name
    path.write_text(json.dumps({"text": text}) if name.endswith("jsonl") else text)
    seen: list[str] = []

    def counting(text: str, **options: Any) -> Any:
        seen.append(text)
        return tokenizer(text, **options)

    found = [
        load_text(str(path), counting, num_sequences=4, sequence_length=16, seed=seed).token_hash for seed in (0, 1)
    ]
    assert found[0] != found[1]
    assert max(map(len, seen)) <= files.PIECE_BYTES + 2


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfWords.")
    for seed in (None, 0):
        assert list(iter_documents(str(path), seed)) == ["Words."]
