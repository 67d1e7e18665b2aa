"""Errors of the command line about the calibration text and its tokenizer."""

import os
from pathlib import Path
from typing import Any

import pytest
from damage import edit_json, shrink_vocabulary
from factories import Fails, MakeCheckpoint, small_arguments

from oneshot.cli.compress import main


def test_a_missing_tokenizer(own_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    folder = own_checkpoint()
    for path in folder.glob("tokenizer*"):
        path.unlink()
    fails(folder, str(folder), "tokenizer")


def test_a_tokenizer_of_another_model(own_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    """Its tokens exceed the rows of the embedding."""
    folder = own_checkpoint()
    shrink_vocabulary(folder)
    fails(folder, "tokenizer", "50")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"version": "1.0", "model": null}', b"[" * 100_000])
def test_damaged_tokenizers(content: bytes, own_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    folder = own_checkpoint()
    (folder / "tokenizer.json").write_bytes(content)
    told = fails(folder)
    place = folder / "tokenizer.json"
    causes = (f"The tokenizer in {folder} cannot be read", f"{place} is not JSON", f"{place} is not text in UTF-8")
    assert any(cause in told for cause in causes)


def test_a_tokenizer_that_cannot_take_the_text(own_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    """A Unigram model without a token for unknown letters."""
    folder = own_checkpoint()

    def edit(content: dict[str, Any]) -> None:
        content["model"] = {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": False}
        content["pre_tokenizer"] = None
        content["added_tokens"] = []

    edit_json(folder / "tokenizer.json", edit)
    assert "The tokenizer cannot take the text" in fails(folder)


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "does not exist"), ("", "empty"), ("  \n", "0 tokens"), ("Few words.", "less than")]
)
def test_texts_that_cannot_be_used(
    content: str | None, reason: str, make_checkpoint: MakeCheckpoint, tmp_path: Path, fails: Fails
) -> None:
    path = tmp_path / "my-text.txt"
    if content is not None:
        path.write_text(content)
    fails(make_checkpoint(), str(path), reason, calibration=path)


def test_a_folder_and_a_pipe_are_not_text(make_checkpoint: MakeCheckpoint, tmp_path: Path, fails: Fails) -> None:
    (tmp_path / "folder.txt").mkdir()
    assert "folder.txt is a folder" in fails(make_checkpoint(), calibration=tmp_path / "folder.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    assert "pipe.txt does not exist" in fails(make_checkpoint(), calibration=tmp_path / "pipe.txt")
    assert "cannot be read" in fails(make_checkpoint(), calibration=Path("n" * 5000 + ".txt"))


def test_rows_end_to_end(make_checkpoint: MakeCheckpoint, tmp_path: Path, fails: Fails) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": 5}\n{"text": 6}\n{"text": "a"}\n')
    assert f"{path}" in (told := fails(make_checkpoint(), calibration=path))
    assert "holds 5 where text should be" in told


def test_a_long_line(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    path, output = tmp_path / "long.txt", tmp_path / "out"
    path.write_text("word" * 100_000)
    assert main([*small_arguments(make_checkpoint(), output, path), "--quiet"]) == 0


@pytest.mark.parametrize("source", ["c4", "wikitext2", "no-such-organisation/no-such-set"])
def test_a_data_set_without_network(source: str, make_checkpoint: MakeCheckpoint, fails: Fails) -> None:
    fails(make_checkpoint(), "network", "builtin", calibration=source)


def test_a_data_set_is_not_opened_if_the_hub_does_not_answer(
    make_checkpoint: MakeCheckpoint, fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise datasets would repeat its requests for half a minute."""
    asked = []

    def no_answer(_: Any, name: str, *, timeout: float) -> None:
        asked.append(name)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", no_answer)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("the data set is opened"))
    fails(make_checkpoint(), "allenai/c4", "Name or service not known", "network", calibration="c4")
    assert asked == ["allenai/c4"]
