"""The end of a command: its exit code, its last line, and what it leaves."""

import re
from pathlib import Path
from typing import Any

import pytest
from child_processes import run_module
from damage import first_shard
from factories import MakeCheckpoint, small_arguments

from oneshot.checkpoint.reader import SINGLE_NAME
from oneshot.cli.compress import main
from oneshot.errors import CheckpointError
from oneshot.report.progress import ERROR_EXPLAINED


def test_an_interrupt_before_the_first_layer_leaves_nothing(
    make_checkpoint: MakeCheckpoint,
    output: Path,
    text_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from oneshot.compression import LayerCompressor

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(LayerCompressor, "compress_layer", interrupted)
    arguments = [*small_arguments(make_checkpoint(), output, text_file), "--quiet"]
    capsys.readouterr()  # transformers shows a bar if it is the first test
    assert main(arguments) == 130
    assert capsys.readouterr().err.splitlines() == ["interrupted"]
    assert not list(output.parent.iterdir())


def test_the_command_line_ends_with_one_line(
    own_checkpoint: MakeCheckpoint, output: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = own_checkpoint(shard_size="20KB")
    shard = first_shard(folder)
    shard.write_bytes(shard.read_bytes()[:-10])
    assert main(small_arguments(folder, output, text_file)) == 1
    told = capsys.readouterr()
    *stages, message = told.err.splitlines()
    assert message.startswith(f"error: {shard}")
    assert stages == [f"opening {folder.name} …"]
    assert told.out == ""
    assert not output.parent.exists()


def test_a_hub_name_without_network(output: Path, text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(small_arguments(Path("some-org/some-model"), output, text_file)) == 1
    *stages, message = capsys.readouterr().err.splitlines()
    assert message.startswith("error: some-org/some-model is not a local path")
    assert "network" in message
    assert stages == ["opening some-org/some-model …"]


def test_debug_keeps_the_exception(output: Path, text_file: Path) -> None:
    """Python then shows its traceback, and the exit code is not 0."""
    with pytest.raises(CheckpointError, match="/no/such/path does not exist"):
        main([*small_arguments(Path("/no/such/path"), output, text_file), "--debug"])


def test_a_good_run_of_the_command_line(make_checkpoint: MakeCheckpoint, output: Path, text_file: Path) -> None:
    """The tests of errors would pass on a command line that always fails."""
    result = run_module("oneshot.compress", *small_arguments(make_checkpoint(), output, text_file))
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout.startswith("result ")
    assert "layers (2 of 4) …" in result.stderr
    lines = [line for line in re.split(r"[\r\n]+", result.stderr) if line.strip()]
    bars = ("WARNING: ", ERROR_EXPLAINED, "layers (", "writing (")
    stages = ("opening ", "reading the text ", "planning the sizes ", "writing the report ", "checking the result ")
    assert [line for line in lines if not line.startswith(bars + stages)] == [], "other libraries are silent"
    assert {"config.json", "README.md", "oneshot_report.json", SINGLE_NAME, "tokenizer.json"} <= {
        path.name for path in output.iterdir()
    }
