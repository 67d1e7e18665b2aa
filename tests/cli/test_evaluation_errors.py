"""Errors of `oneshot evaluate`: one line that names the thing, exit code 1, no traceback."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from damage import shrink_vocabulary
from factories import MakeCheckpoint

from oneshot.cli import evaluate


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--text=no-such-file.txt"], ("no-such-file.txt", "does not exist")),
        (["--device=cuda:7"], ("cuda:7",)),
        (["--sequence-length=1"], ("--sequence-length 1",)),
        (["--baseline=/no/such/path"], ("/no/such/path",)),
        (["--revision=v1"], ("is a local path", "revision v1")),
        (["--baseline-revision=v1"], ("--baseline-revision v1 needs a --baseline",)),
        (["--baseline=no-org/no-model", "--baseline-revision=v1"], ("no-org/no-model",)),
        (["--text={text}", "--sequence-length=100000000"], ("less than one sequence",)),
        (["--text={text}", "--output=/no/such/folder/out.json"], ("/no/such/folder/out.json",)),
        (["--text={text}", "--max-windows=0"], ("--max-windows",)),
        (["--output=/tmp"], ("/tmp is a folder",)),
        (["--prefill-tokens=0"], ("--prefill-tokens 0",)),
        (["--decode-tokens=-1"], ("--decode-tokens -1",)),
        (["--tasks=oneshot_facts", "--limit=0"], ("--limit 0", "give at least 1")),
        (["--tasks=oneshot_facts", "--limit=-1"], ("--limit -1", "give at least 1")),
        (["--limit=3"], ("--limit 3 is for tasks; give --tasks",)),
        (["--text={text}", "--include-path=/tmp"], ("--include-path /tmp is for tasks; give --tasks",)),
        (["--text={text}", "--prefill-tokens=9"], ("--prefill-tokens 9 is for the latency", "--decode-tokens 0")),
        (["--tasks=piqa", "--include-path=/no/such/folder"], ("--include-path /no/such/folder",)),
    ],
)
def test_evaluation_errors(
    options: list[str],
    names: tuple[str, ...],
    make_checkpoint: MakeCheckpoint,
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = evaluate.main(
        [str(make_checkpoint()), "--decode-tokens=0", *(option.format(text=text_file) for option in options)]
    )
    captured = capsys.readouterr()
    assert code == 1
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in captured.err
    for name in names:
        assert name in errors[0]


def test_an_output_that_is_not_an_earlier_evaluation(
    own_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text itself, the model's files, another JSON; the numbers of an evaluation may be replaced by newer ones."""
    folder, text = own_checkpoint(), tmp_path / "own.txt"
    shutil.copy(text_file, text)
    options = [str(folder), f"--text={text}", "--decode-tokens=0", "--sequence-length=64", "--max-windows=1"]
    before = {path: path.read_bytes() for path in (text, *folder.iterdir())}
    for path in before:
        assert evaluate.main([*options, f"--output={path}"]) == 1
        assert f"error: {path} exists already and is not an earlier output" in capsys.readouterr().err
        assert path.read_bytes() == before[path]
    numbers = tmp_path / "numbers.json"
    numbers.touch()
    for _ in range(2):
        assert evaluate.main([*options, f"--output={numbers}"]) == 0
        assert json.loads(numbers.read_text())["evaluations"]


def test_a_task_that_lm_eval_does_not_know(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.tasks import TaskManager

    # without its own tasks, whose listing takes ten seconds
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    assert evaluate.main([str(make_checkpoint()), "--decode-tokens=0", "--tasks", "no-such-task"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: --tasks no-such-task is not known")


def test_evaluation_with_a_tokenizer_of_another_model(
    own_checkpoint: MakeCheckpoint, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = own_checkpoint()
    shrink_vocabulary(folder)
    assert evaluate.main([str(folder), f"--text={text_file}", "--decode-tokens=0", "--sequence-length=16"]) == 1
    assert "tokenizer" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("has_baselines", [True, False])
def test_a_baseline_with_another_tokenizer(
    has_baselines: bool,
    make_checkpoint: MakeCheckpoint,
    own_checkpoint: MakeCheckpoint,
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All its tokens are rows of the embedding, but two of them have changed places; one without any is accepted."""
    folder, other = make_checkpoint(), own_checkpoint()
    if has_baselines:
        content = json.loads((other / "tokenizer.json").read_text())
        tokens = {number: token for token, number in content["model"]["vocab"].items()}
        content["model"]["vocab"] |= {tokens[5]: 6, tokens[6]: 5}
        (other / "tokenizer.json").write_text(json.dumps(content))
    else:
        (other / "tokenizer.json").unlink()
    options = [f"--text={text_file}", "--decode-tokens=0", "--sequence-length=16"]
    code = evaluate.main([str(folder), f"--baseline={other}", *options])
    told = capsys.readouterr().err
    assert code == has_baselines
    assert (f"The tokenizers of {folder} and {other} differ" in told) is has_baselines


def test_evaluation_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([str(tmp_path / "none")]) == 1
    assert str(tmp_path / "none") in capsys.readouterr().err
