"""A question of the user's that the check at the end asks."""

import os
import re
from pathlib import Path

import pytest
from factories import MakeCheckpoint, small_arguments

from oneshot.cli.main import main


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--prompt="], "--prompt is empty"),
        (["--prompt= "], "--prompt is empty"),
        (["--prompt=Why?", "--no-check"], "--no-check leaves out"),
        (["--prompt=Why?", "--quiet"], "--quiet leaves out"),
        (["--prompt=Why?", "--form=gguf"], "opens no GGUF file; leave out --prompt"),
    ],
)
def test_a_question_that_nobody_would_be_asked_is_refused(
    options: list[str], cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compress", "/no/such/model", "--sparsity=0.2", *options]) == 1
    assert cause in capsys.readouterr().err


def test_both_models_are_asked_what_the_user_asks(
    make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--num-sequences=4", "--sequence-length=16", "--device=cpu", "--dtype=float32", "--sparsity=0.2"]
    options.append("--form=stock")
    folder = make_checkpoint()
    capsys.readouterr()  # bars of what made it
    command = ["compress", str(folder), f"--calibration={text_file}", *options]
    assert main([*command, "-o", str(tmp_path / "out"), "--prompt=Who is there?"]) == 0
    printed, told = capsys.readouterr()
    assert "\nasked         Who is there?\n" in printed
    assert "Who" not in (tmp_path / "out" / "recipe.yaml").read_text(), "it does not change the result"
    lines = told.splitlines()
    assert "\r" not in told, "stderr is no terminal"
    assert [line for line in lines if line.startswith("layers (")] == ["layers (2 of 4) …"]
    assert [line for line in lines if line.startswith("checking the result")] == [
        "checking the result on held-out text (4 of 4) …"
    ]


@pytest.mark.parametrize("has_template", [True, False])
def test_a_question_that_is_not_utf8_has_a_replacement(
    has_template: bool,
    own_checkpoint: MakeCheckpoint,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = own_checkpoint()
    if not has_template:
        (folder / "chat_template.jinja").unlink()
    arguments, question = small_arguments(folder, tmp_path / "out", text_file), os.fsdecode(b"Who is caf\xe9?")
    assert main(["compress", *arguments, f"--prompt={question}"]) == 0
    assert re.search("^asked +Who is caf\ufffd+\\?$", capsys.readouterr().out, re.MULTILINE)
