"""Errors of the command line about the output: in the way, not writable, or without space."""

import json
import os
import resource
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import Fails, MakeCheckpoint, MakeResult, small_arguments, small_config
from safetensors import SafetensorError

from oneshot.checkpoint.reader import SINGLE_NAME
from oneshot.cli.compress import main
from oneshot.cli.imatrix import main as imatrix
from oneshot.pipeline import profile


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


@pytest.fixture
def gguf(make_checkpoint: MakeCheckpoint, make_result: MakeResult, tmp_path: Path) -> Path:
    """A GGUF file in a folder of its own, with the config.json of a result."""
    made = make_result(make_checkpoint(layers=1), form="gguf", sparsity=0)
    return Path(shutil.copytree(made, tmp_path / "written")) / "model.gguf"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def profiled(make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile") / "profile"
    profile(small_config(make_checkpoint(), text_file, output=folder))
    return folder


@pytest.mark.parametrize("more", [[], ["--resume"], ["--overwrite"]], ids=str)
@pytest.mark.parametrize("is_link", [False, True])
def test_an_output_that_holds_a_gguf_file_that_is_the_input(
    more: list[str], is_link: bool, gguf: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many folders of GGUF files have a config.json, as a result of that form has."""
    before, place = contents(gguf.parent), gguf
    if is_link:
        place = gguf.parent.parent / "linked.gguf"
        place.symlink_to(gguf)
    assert main([*small_arguments(place, gguf.parent, text_file), "--form=gguf", "--quiet", *more]) == 1
    assert f"{gguf.parent} holds the input checkpoint; choose another --output." in capsys.readouterr().err
    assert contents(gguf.parent) == before


def test_an_output_that_is_a_module_of_the_input(
    own_checkpoint: MakeCheckpoint, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = own_checkpoint()
    pooling = folder / "1_Pooling"
    pooling.mkdir()
    (pooling / "config.json").write_text("{}")
    modules = [{"type": "sentence_transformers.models.Pooling", "path": pooling.name}]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert main([*small_arguments(folder, pooling, text_file), "--quiet", "--overwrite"]) == 1
    assert f"{pooling} holds the input checkpoint" in capsys.readouterr().err
    assert (pooling / "config.json").exists()


@pytest.mark.parametrize("place", ["out", "out.incomplete", "sizes/sparsity-0.10", "linked"])
@pytest.mark.parametrize("kind", ["text", "second text", "profile", "folder of scratch files", "recipe"])
def test_an_output_that_holds_what_the_run_reads(
    kind: str,
    place: str,
    make_checkpoint: MakeCheckpoint,
    profiled: Path,
    tmp_path: Path,
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also inside the folder of an interrupted run, in one of several sizes, and by a link from elsewhere."""
    folder, output = tmp_path / place, tmp_path / ("sizes" if "/" in place else "out")
    if place == "linked":
        folder = output
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    path = folder / ("mine.txt" if "text" in kind else "mine")
    if "text" in kind:
        shutil.copy(text_file, path)
    elif kind == "recipe":
        path.write_text("seed: 1\n")
    elif kind == "profile":
        shutil.copytree(profiled, path)
    else:
        path.mkdir()
    given = path
    if place == "linked":
        given = tmp_path / f"elsewhere{path.suffix}"
        given.symlink_to(path)
    options = {
        "text": f"--calibration={given}",
        "second text": f"--calibration={text_file}+{given}",
        "profile": f"--profile={given}",
        "folder of scratch files": f"--offload-dir={given}",
        "recipe": f"--config={given}",
    }
    more = ["--sparsity=0.1"] if output.name == "sizes" else []
    arguments = small_arguments(make_checkpoint(), output, text_file)
    assert main([*arguments, options[kind], "--overwrite", "--quiet", *more]) == 1
    *_, message = capsys.readouterr().err.splitlines()
    assert message.startswith(f"error: {folder} holds the ")
    assert str(given) in message
    assert message.endswith("; choose another --output.")
    assert path.exists()
    assert (folder / "config.json").exists()


def test_a_result_is_made_again_from_its_own_recipe(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, text_file: Path
) -> None:
    output = tmp_path / "out"
    assert main([*small_arguments(make_checkpoint(), output, text_file), "--quiet"]) == 0
    recipe = (output / "recipe.yaml").read_text()
    assert main([f"--config={output / 'recipe.yaml'}", f"--output={output}", "--overwrite", "--quiet"]) == 0
    assert (output / "recipe.yaml").read_text() == recipe


def test_an_importance_matrix_in_the_place_of_what_is_read(
    own_checkpoint: MakeCheckpoint, gguf: Path, tmp_path: Path, text_file: Path
) -> None:
    """A new file beside the weights replaces nothing."""
    folder, text, recipe = own_checkpoint(), tmp_path / "own.txt", tmp_path / "own.yaml"
    shutil.copy(text_file, text)
    recipe.write_text("seed: 1\n")
    options = [f"--calibration={text}", "--num-sequences=4", "--sequence-length=16", "--device=cpu", "--quiet"]
    before = contents(tmp_path)
    for checkpoint, output in (
        *((folder, folder / name) for name in (SINGLE_NAME, "tokenizer.json")),
        *((folder, file) for file in (text, recipe)),
        (gguf, gguf),
    ):
        arguments = [str(checkpoint), f"--output={output}", f"--config={recipe}", *options]
        assert imatrix([*arguments, "--overwrite"]) == 1
        assert contents(tmp_path) == before
    for _ in range(2):
        assert imatrix([str(gguf), f"--output={gguf.parent / 'imatrix.gguf'}", *options, "--overwrite"]) == 0


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


@pytest.mark.parametrize("link", ["out", "out.incomplete", "folder"])
@pytest.mark.parametrize("target", ["nowhere", "itself"])
def test_an_output_behind_a_link_to_nothing(
    link: str, target: str, make_checkpoint: MakeCheckpoint, tmp_path: Path, fails: Fails
) -> None:
    path = tmp_path / link
    path.symlink_to(path if target == "itself" else tmp_path / "nowhere")
    output = path / "out" if link == "folder" else tmp_path / "out"
    fails(make_checkpoint(), str(path), "choose another", output=output)
    assert path.is_symlink()


@pytest.mark.parametrize("option", ["output", "offload_dir"])
def test_a_name_that_is_not_utf8(option: str, make_checkpoint: MakeCheckpoint, tmp_path: Path, fails: Fails) -> None:
    """safetensors writes no such file, of which it tells after the first layers."""
    place = tmp_path / os.fsdecode(b"caf\xe9")
    place.mkdir()
    flag = f"--{option.replace('_', '-')}"
    fails(make_checkpoint(), flag, "'utf-8' codec can't encode", "nother", **{option: place})


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
