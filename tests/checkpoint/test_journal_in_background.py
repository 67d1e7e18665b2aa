"""The journal with a thread that writes: errors of the thread surface before the commit, and a resumed run goes on."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oneshot.checkpoint import Journal, journal
from oneshot.errors import OutputError
from oneshot.machine.durable import write_sealed

PARTS = [{"a": torch.ones(3)}, {"b": torch.zeros(2)}, {"c": torch.full((2,), 3.0)}]


def open_journal(folder: Path, **options: Any) -> Journal:
    journal = Journal(folder, fingerprint={"seed": 0}, background=True, **options)
    journal.expect(PARTS)
    return journal


def write(folder: Path, count: int, error: BaseException | None = None, **options: Any) -> None:
    """Add parts up to `count`, then fail, leave or commit."""
    with open_journal(folder, **options) as opened:
        for number in range(opened.num_finished, count):
            opened.add(PARTS[number], record={"number": number})
        if error is not None:
            raise error
        if count == len(PARTS):
            opened.finish()
            opened.commit()


def test_the_result_is_that_of_no_thread(tmp_path: Path) -> None:
    write(tmp_path / "out", 3)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"a", "b", "c"}


@pytest.mark.parametrize("error", [RuntimeError(), KeyboardInterrupt(), OSError(28, "No space left")])
def test_a_part_on_its_way_is_kept_when_a_run_fails(error: BaseException, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(OutputError if isinstance(error, OSError) else type(error)):
        write(folder, 2, error)
    with open_journal(folder, resume=True) as opened:
        assert opened.num_finished == 2
        assert opened.records(2) == [{"number": 0}, {"number": 1}]
    write(folder, 3, resume=True)
    assert load_file(folder / "model.safetensors").keys() == {"a", "b", "c"}


def write_nan(folder: Path, last: str) -> None:
    """Add a part that the thread refuses, then make one more call or none."""
    with open_journal(folder) as opened:
        opened.add(PARTS[0])
        opened.add({"b": torch.tensor([0, torch.nan])})
        if last != "leave":
            getattr(opened, last)(*([PARTS[2]] if last == "add" else []))


@pytest.mark.parametrize("last", ["add", "finish", "commit", "leave"])
def test_an_error_of_the_thread_surfaces_in_the_next_call(last: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(OutputError, match="NaN"):
        write_nan(folder, last)
    assert not folder.exists()
    with open_journal(folder, resume=True) as opened:
        assert opened.num_finished == 1


def test_a_full_disk_is_an_output_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: dict[str, Any]) -> None:
        if path.name == "record-00002.json":
            raise OSError(28, "No space left on device")
        write_sealed(path, content)

    folder = tmp_path / "out"
    monkeypatch.setattr(journal, "write_sealed", full)
    with pytest.raises(OutputError, match="No space left"):
        write(folder, 3)
    monkeypatch.undo()
    with open_journal(folder, resume=True) as opened:
        assert opened.num_finished == 1


def test_an_error_of_the_thread_does_not_hide_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        with open_journal(tmp_path / "out") as opened:
            opened.add({"a": torch.tensor([0, 0, torch.inf])})
            raise ZeroDivisionError

    with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError):
        fail()
    assert "The last part was not written" in caplog.text
