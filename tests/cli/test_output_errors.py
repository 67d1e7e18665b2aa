"""Errors of the command line about the output: in the way, not writable, or without space."""

import os
import resource
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import Fails, MakeCheckpoint, small_arguments
from safetensors import SafetensorError

from oneshot.checkpoint.reader import SINGLE_NAME
from oneshot.cli.compress import main


def test_an_output_that_exists(make_checkpoint: MakeCheckpoint, output: Path, fails: Fails) -> None:
    output.mkdir(parents=True)
    (output / "precious").write_text("precious")
    fails(make_checkpoint(), str(output), "--overwrite")
    assert (output / "precious").read_text() == "precious"


def test_an_output_that_holds_the_input(own_checkpoint: MakeCheckpoint, capsys: pytest.CaptureFixture[str]) -> None:
    folder = own_checkpoint()
    for place in (folder, folder.parent):
        assert main([str(folder), f"--output={place}", "--sparsity=0.2", "--recipe=random", "--overwrite"]) == 1
        *_, message = capsys.readouterr().err.splitlines()  # after the stages
        assert message.startswith("error: ")
        assert f"{place} holds the input" in message
    assert (folder / "config.json").exists()


@pytest.mark.parametrize("place", ["file", "file/out", "folder"])
def test_outputs_that_exist_as_something_else(
    place: str, make_checkpoint: MakeCheckpoint, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert main([*small_arguments(make_checkpoint(), tmp_path / place, text_file), "--quiet"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / place} ")
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "a file"


def test_an_output_that_cannot_be_written(make_checkpoint: MakeCheckpoint, tmp_path: Path, fails: Fails) -> None:
    file = tmp_path / "file"
    file.write_text("a file, not a folder")
    target = file / "out"
    fails(make_checkpoint(), str(target), "cannot be written", output=target)
    fails(make_checkpoint(), "cannot be written", output=Path("/proc/no-such/out"))
    for place in (".", "/"):
        fails(make_checkpoint(), f"--output {place} is not a new folder", output=place)
    assert file.read_text() == "a file, not a folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_in_a_folder_without_write_permission(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o500)
    assert main([*small_arguments(make_checkpoint(), tmp_path / "out", text_file), "--quiet"]) == 1
    tmp_path.chmod(0o700)
    assert "cannot be written" in capsys.readouterr().err


def test_too_little_space(
    make_checkpoint: MakeCheckpoint, output: Path, monkeypatch: pytest.MonkeyPatch, fails: Fails
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    fails(make_checkpoint(), f"{output.parent} has 0.0 MB free, the result needs 0.", form="stock")


def test_the_space_is_computed_in_the_dtype_that_is_saved(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, fails: Fails
) -> None:
    """Saving a bfloat16 model as float32 doubles it."""
    folder = make_checkpoint(dtype=torch.bfloat16)
    room = round(1.2 * (folder / SINGLE_NAME).stat().st_size)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9, 0, room))
    fails(folder, "free", save_dtype="float32")


def test_a_disk_that_fills_up_while_writing(
    make_checkpoint: MakeCheckpoint, output: Path, monkeypatch: pytest.MonkeyPatch, fails: Fails
) -> None:
    pwrite, written = os.pwrite, 0

    def write_then_fail(file: int, data: memoryview, start: int) -> int:
        nonlocal written
        written += 1
        if written > 12:  # in the second layer
            raise OSError(28, "No space left on device")
        return pwrite(file, data, start)

    monkeypatch.setattr(os, "pwrite", write_then_fail)
    fails(make_checkpoint(), str(output), "No space left", keeps=True)
    assert written > 12


@pytest.mark.parametrize(
    ("writes", "error", "options"),
    [
        ("oneshot.stream.store.ActivationStore.write", OSError(28, "No space left on device"), {}),
        (
            "oneshot.compression.subspaces.save_file",
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            {"recipe": "group-pca"},
        ),
    ],
)
def test_a_scratch_disk_that_fills_up(
    writes: str,
    error: Exception,
    options: dict[str, Any],
    make_checkpoint: MakeCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    fails: Fails,
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(writes, fail)
    fails(make_checkpoint(), "No space left", **options)


def test_a_write_that_the_system_refuses(make_checkpoint: MakeCheckpoint, output: Path, fails: Fails) -> None:
    """With a limit on the size of files the kernel itself refuses a write, as with a full disk, without mocks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = make_checkpoint()
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
    try:
        fails(folder, str(output), "cannot be written", settings=["embedding=none"], keeps=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
