"""Commands whose standard streams are closed or full or have no reader; signals; outputs tried before the work."""

import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest

from oneshot.cli.main import main
from oneshot.cli.process import Stream


def full() -> TextIO:
    return open("/dev/full", "w")


def without_reader() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


STREAMS: dict[str, tuple[Callable[[], TextIO | None], str]] = {
    "closed": (lambda: None, "it is closed"),
    "full": (full, "No space left on device"),
    "without a reader": (without_reader, ""),
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("command", ["--version", "--help", "compress --help", "completion bash"])
def test_a_command_that_only_prints_ends_with_a_sentence(
    command: str, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, reason = STREAMS[kind]
    monkeypatch.setattr(sys, "stdout", make())
    try:
        code = main(command.split())
    except SystemExit as ended:  # argparse's
        code = ended.code
    assert code == 1
    assert capsys.readouterr().err == (f"error: Standard output cannot be written ({reason}).\n" if reason else "")


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_command_that_writes_a_file_ends_well(
    stream: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, stream, STREAMS[kind][0]())
    assert main(["init", str(tmp_path / "recipe.yaml")]) == 0
    assert (tmp_path / "recipe.yaml").read_text().startswith("#")
    told = "warning: Standard output cannot be written (No space left on device); the result is written.\n"
    assert capsys.readouterr().err == (told if (stream, kind) == ("stdout", "full") else "")


@pytest.mark.parametrize("place", ["folder", "pipe", "/proc/no-such-place/out.json", "missing/out.json", "x" * 300])
def test_where_an_evaluation_is_written_is_tried_before_the_work(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is not there, and would be refused next; /proc is a file system that nobody writes to."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    assert main(["evaluate", "/no/such/checkpoint", f"--output={tmp_path / place}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / place} ")
    assert error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_where_a_profile_is_written_is_tried_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "out"
    assert main(["profile", "/no/such/checkpoint", f"--output={output}", "--calibration=builtin"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {output} cannot be written")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_command_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second one comes during the clean-up, which goes on."""
    number, cleaned = getattr(signal, name), []
    before = signal.signal(number, signal.default_int_handler)

    def work(*_: Any) -> str:
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)
            cleaned.append(True)
        return ""

    monkeypatch.setattr("oneshot.cli.init.example", work)
    try:
        assert main(["init", str(tmp_path / "recipe.yaml")]) == 130
        assert signal.getsignal(number) == signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert cleaned == [True]
    assert capsys.readouterr().err == "interrupted\n"


def test_a_signal_that_the_caller_ignores_stays_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def work() -> str:
        os.kill(os.getpid(), signal.SIGHUP)
        return "done"

    monkeypatch.setattr("oneshot.cli.init.example", work)
    try:
        assert main(["init", str(tmp_path / "recipe.yaml")]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (tmp_path / "recipe.yaml").read_text() == "done"


def test_letters_that_the_encoding_lacks_are_question_marks() -> None:
    content = io.BytesIO()
    stream = Stream(io.TextIOWrapper(content, encoding="ascii"))
    stream.write("31 K → 28 K")
    stream.flush()
    assert (content.getvalue(), stream.error) == (b"31 K ? 28 K", None)
