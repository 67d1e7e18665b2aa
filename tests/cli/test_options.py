"""The command `oneshot` and its options: help, `--set`, the old name of `--form`, tables, and a silent stderr."""

import argparse
import importlib
import inspect
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from child_processes import run_module, start, wait
from factories import MakeCheckpoint, MakeConfig

import oneshot
from oneshot.cli.compress import build_parser
from oneshot.cli.main import COMMANDS, main
from oneshot.cli.options import describe_methods, parse_config
from oneshot.cli.parser import OneOf
from oneshot.config import Config, Target
from oneshot.evaluation import evaluate, print_evaluations
from oneshot.fields import FLAGS
from oneshot.method import Hidden, Method, SelectorName
from oneshot.pipeline import compress, predict, profile
from oneshot.recipes import RECIPES
from oneshot.report import display
from oneshot.report.display import progress_bar
from oneshot.report.terminal import print_footprint, print_profile, print_report
from oneshot.settings import settings

WIDTH = 80
TEXT = ["--num-sequences=4", "--sequence-length=16", "--device=cpu", "--dtype=float32"]


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Restore the handler of SIGTERM, which the command replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def config_of(*options: str) -> Config:
    return parse_config(build_parser().parse_args(["checkpoint", "--output=out", *options]), sparsity=0.2)


def run_forked(name: str, *arguments: str, folder: Path, **environment: str) -> tuple[int | None, str, str]:
    """Run `oneshot NAME` in a process of its own; return its exit code, and what it wrote to stderr and stdout."""
    told, printed = folder / "stderr.txt", folder / "stdout.txt"
    [code] = wait([start(name, [arguments], told, environment, printed)])
    return code, told.read_text(), printed.read_text()


# The command


def test_every_command_runs(
    make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The profile that the second command writes is read by the first."""
    checkpoint, text = str(make_checkpoint()), f"--calibration={text_file}"
    assert main(["profile", checkpoint, f"--output={tmp_path / 'profile'}", text, *TEXT]) == 0
    planned = [checkpoint, f"--output={tmp_path / 'out'}", f"--profile={tmp_path / 'profile'}", text, *TEXT]
    assert main(["compress", *planned, "--sparsity=0.2", "--form=per-layer", "--round-to=1"]) == 0
    measured = [str(tmp_path / "out"), f"--text={text_file}", "--sequence-length=16", "--max-windows=2"]
    assert main(["evaluate", *measured, f"--baseline={checkpoint}", "--decode-tokens=0", "--device=cpu"]) == 0
    printed = capsys.readouterr().out
    for part in ("KL without", "stored parameters", "perplexity text.txt"):
        assert part in printed
    long = [line for line in printed.splitlines() if len(line) > WIDTH]
    assert all(len(line.split()) <= 2 and "/" in line for line in long), "only a path that cannot be broken"


def test_an_unknown_command_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shrink", "checkpoint"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        captured.err
        == "error: shrink is not a command; give one of compress, profile, imatrix, init, evaluate, chat, completion.\n"
    )


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["-h"], 0)])
def test_the_commands_are_listed(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == code
    printed = capsys.readouterr().out
    assert printed.startswith("usage: oneshot COMMAND [options]\n")
    for name, text in COMMANDS.items():
        assert f"{name:12}{text}\n" in printed
    assert all(len(line) <= WIDTH for line in printed.splitlines())


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"oneshot \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("imatrix", "init", "chat", "completion")])
def test_every_way_to_start_a_command_is_the_same_command(name: str) -> None:
    """`oneshot NAME`, `python -m oneshot NAME` and `python -m oneshot.NAME` differ in the name in the usage only."""
    helps = [run_module(*command, "--help", COLUMNS="80") for command in (("oneshot", name), (f"oneshot.{name}",))]
    assert [result.returncode for result in helps] == [0, 0]
    assert [result.stderr for result in helps] == ["", ""]
    whole = run_module("oneshot", name, "--help", COLUMNS="80").stdout
    assert whole == helps[0].stdout
    starts = (f"usage: oneshot {name} ", f"usage: python -m oneshot.{name} ")
    bodies = [result.stdout.split("\n\n", 1) for result in helps]
    assert [body[0].startswith(start) for body, start in zip(bodies, starts, strict=True)] == [True, True]
    assert bodies[0][1] == bodies[1][1]
    assert all(len(line) <= WIDTH for result in helps for line in result.stdout.splitlines())


@pytest.mark.parametrize("name", ["compress", "profile", "evaluate"])
def test_a_command_of_the_same_name_does_not_hide_a_function(name: str) -> None:
    """The command lines are packages of the same names, and Python makes an imported package an attribute."""
    importlib.import_module(f"oneshot.{name}")
    assert f"oneshot.{name}" in sys.modules
    assert inspect.isfunction(getattr(oneshot, name))


# Help


def test_help_shows_at_most_38_options() -> None:
    shown = set(re.findall(r"^ +(?:-\w(?: OUT)?, )?(--[a-z-]+)", build_parser().format_help(), re.MULTILINE))
    assert {"--output", "--sparsity", "--form", "--set", "--dry-run", "--help", "--help-methods"} <= shown
    assert len(shown - {"--help", "--help-methods"}) <= 38


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "completion"])
def test_every_option_says_what_it_is(name: str) -> None:
    """Not its default alone; a choice also names its default or what stands for it."""
    for action in importlib.import_module(f"oneshot.cli.{name}").build_parser()._actions:
        if action.help == argparse.SUPPRESS:
            continue
        assert re.match(r"[a-z]\w*-?\w*[ ,]", str(action.help), re.IGNORECASE), action.dest
        if isinstance(action.type, OneOf):
            assert "(default: " in action.help, action.dest


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "completion"])
def test_an_option_of_several_values_adds_up_if_it_is_repeated(name: str) -> None:
    parser = importlib.import_module(f"oneshot.cli.{name}").build_parser()
    several = [action for action in parser._actions if action.option_strings and action.nargs in ("+", "*")]
    assert [action.dest for action in several] == {"compress": ["sparsity", "keep"], "evaluate": ["tasks"]}.get(
        name, []
    )
    for action in several:
        option, needed = action.option_strings[-1], [] if name == "compress" else ["checkpoint"]
        for _ in range(2):  # a parse leaves nothing to the next one
            found = parser.parse_args([*needed, option, "1", "2", f"{option}=3", option, "4"])
            assert getattr(found, action.dest) == ["1", "2", "3", "4"]
        assert not getattr(parser.parse_args(needed), action.dest)


def test_help_methods_lists_every_recipe_and_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["compress", "--help-methods"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert printed == describe_methods() + "\n"
    assert all(len(line) <= WIDTH for line in printed.splitlines())
    listed = set(re.findall(r"^  ([a-z_-]+): ", printed, re.MULTILINE))
    keys = {field.name for record in (Method, Target) for field in fields(record)} - FLAGS.keys()
    assert listed == keys | RECIPES.keys()
    assert settings().keys() == keys
    for key, choices in (("ffn", SelectorName), ("hidden", Hidden)):
        (entry,) = re.findall(rf"^  {key}: (.*(?:\n {{6}}.*)*)", printed, re.MULTILINE)
        assert re.split(r"\s*\|\s*", entry) == list(get_args(choices))


# --set


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--set", "ffn=obs"], {"ffn": "obs"}),
        (["--set=ffn=obs", "--set=heads=id"], {"ffn": "obs", "heads": "id"}),
        (["--set= group-size = 4", "--set=hidden=pca"], {"group_size": 4, "hidden": "pca"}),
        (["--set=damping=0.5"], {"damping": 0.5}),
        (["--set=damping=1"], {"damping": 1.0}),
        (["--set=damping=auto"], {"damping": "auto"}),
        (["--set=shared_weight=1e-3"], {"shared_weight": 1e-3}),
    ],
)
def test_settings_are_fields_of_the_method(options: list[str], expected: dict[str, Any]) -> None:
    method = config_of(*options).method
    found = {name: getattr(method, name) for name in expected}
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {n: type(value) for n, value in expected.items()}


@pytest.mark.parametrize(("setting", "flag"), [("size_bytes=5", "--max-size"), ("sparsity=0.1", "--sparsity")])
def test_a_key_with_an_option_of_its_own_names_it(setting: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compress", "no-such-checkpoint", f"--set={setting}"]) == 1
    assert f"has an option of its own; give {flag}." in capsys.readouterr().err


@pytest.mark.parametrize("second", ["ffn=wanda", " ffn = obs"])
def test_a_key_that_is_set_twice_is_refused(second: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("compress", "profile"):
        assert main([command, "no-such-checkpoint", "--set=heads=id", "--set=ffn=obs", f"--set={second}"]) == 1
        assert capsys.readouterr().err == "error: --set ffn= is given twice; leave one out.\n"


def test_settings_are_fields_of_the_target() -> None:
    config = config_of("--budget=flops", "--set=value_size=4")
    assert config.target == Target(sparsity=0.2, budget="flops", value_size=4)


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("colour=red", ("--set colour=red", "--help-methods")),
        ("sparsity=0.3", ("--set sparsity=0.3", "give --sparsity.")),
        ("up_steps=2", ("--set up_steps=2", "give --up-steps.")),
        ("=obs", ("--set =obs", "key=value")),
        ("ffn", ("--set ffn", "key=value")),
        ("", ("--set ", "key=value")),
        ("ffn=", ("--set ffn=", "one of id, obs")),
        ("ffn=best", ("--set ffn=best", "one of id, obs")),
        ("ffn=1", ("--set ffn=1", "one of id, obs")),
        ("group_size=", ("--set group_size=", "not an integer")),
        ("group_size=four", ("--set group_size=four", "not an integer")),
        ("group_size=1.5", ("--set group_size=1.5", "not an integer")),
        ("group_size=-1", ("--set group_size=-1", "at least 0")),
        ("hidden_size=none", ("--set hidden_size=none", "not an integer")),
        ("hidden_size=0", ("--set hidden_size=0", "at least 1")),
        ("shared_weight=much", ("--set shared_weight=much", "not a number")),
        ("shared_weight=inf", ("--set shared_weight=inf", "0 or more")),
        ("damping=", ("--set damping=", "a number or auto")),
        ("budget=flops", ("--set budget=flops", "give --budget.")),
        ("line\nend=1", ("--set line\\nend=1", "--help-methods")),
    ],
)
def test_settings_that_cannot_be_used(
    setting: str, names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["compress", "no-such-checkpoint", f"--output={tmp_path / 'out'}", "--sparsity=0.2", "--set", setting])
    captured = capsys.readouterr()
    assert code == 1
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(".")
    for name in names:
        assert name in line
    assert not list(tmp_path.iterdir())


def test_a_set_without_anything_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["compress", "checkpoint", "--output=out", "--sparsity=0.2", "--set"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith("oneshot compress: error: argument --set: expected one argument\n")


# --form


def test_the_form_is_the_recipes_unless_it_is_given() -> None:
    assert config_of().form == "auto"
    assert config_of("--recipe=group-pca").form == "per-layer"
    assert config_of("--recipe=group-pca", "--form=stock").form == "stock"


# Tables


def test_tables_fit_the_terminal(
    make_checkpoint: MakeCheckpoint,
    make_config: MakeConfig,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with long names, and on a terminal that is wider."""
    monkeypatch.setenv("COLUMNS", "200")
    text = Path(shutil.copy(text_file, tmp_path / f"{'long-name-' * 12}.txt"))
    checkpoint = Path(shutil.copytree(make_checkpoint(layers=3), tmp_path / ("checkpoint-" * 10)))
    output = tmp_path / ("output-" * 15)
    config = make_config(checkpoint, output=output, form="per-layer", round_to=1, heads="id")
    print_footprint(predict(config))
    print_report(compress(config))
    print_profile(profile(make_config(checkpoint, output=tmp_path / "profile")))
    options = {"sequence_length": 32, "max_windows": 1, "decode_tokens": 1, "prefill_tokens": 8, "device": "cpu"}
    print_evaluations(evaluate([str(output)], [str(text)], baseline=str(checkpoint), **options))
    printed = capsys.readouterr().out
    for title in ("dry run", "error by layer", "sensitivity", "KL divergence", "seconds of decoding"):
        assert title in " ".join(printed.split())
    assert [line for line in printed.splitlines() if len(line) > WIDTH] == []
    assert "…" not in printed, "no number is cut off"


# Other libraries


def test_a_gguf_input_shows_no_bars_of_other_libraries(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path
) -> None:
    """The file is converted, and then the text cannot be read, so stderr has the stages and this error."""
    compress(make_config(make_checkpoint(layers=1), form="gguf", sparsity=0, output=tmp_path / "written"))
    gguf_file = tmp_path / "written" / "model.gguf"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    table = tmp_path / "rows.parquet"
    table.write_bytes(b"no table")
    options = ["--sparsity=0.1", "--dtype=float32", f"--calibration={table}", f"--output={scratch / 'out'}"]
    code, told, printed = run_forked("compress", str(gguf_file), *options, folder=tmp_path, TMPDIR=str(scratch))
    assert code == 1
    *stages, error = told.splitlines()
    assert stages == [f"opening {gguf_file.name} …", "reading the text 7/8 rows.parquet + 1/8 builtin (1 of 8) …"]
    assert error.startswith(f"error: {table} cannot be read as parquet")
    assert printed == ""
    left = [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor_")]  # torch's own
    assert not left


def test_a_table_that_cannot_be_read_is_one_sentence(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """The reader of tables also writes the error to its log."""
    table = tmp_path / "rows.parquet"
    table.write_bytes(b"no table")
    options = ["--sparsity=0.1", "--dtype=float32", f"--calibration={table}", f"--output={tmp_path / 'out'}"]
    code, told, _ = run_forked("compress", str(make_checkpoint()), *options, folder=tmp_path)
    assert code == 1
    assert [line for line in told.splitlines() if not line.startswith(("opening ", "reading the text "))] == [
        line for line in told.splitlines() if line.startswith(f"error: {table} cannot be read as parquet")
    ]


def test_an_evaluation_shows_no_bars_of_other_libraries(
    make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path
) -> None:
    """Nor one of its own: what stands in a file is not written over."""
    options = [f"--text={text_file}", "--sequence-length=16", "--max-windows=1", "--decode-tokens=0", "--device=cpu"]
    code, told, printed = run_forked("evaluate", str(make_checkpoint()), *options, folder=tmp_path)
    assert (code, told) == (0, "")
    assert "perplexity text.txt" in printed


def test_batches_tell_a_file_in_whole_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [*progress_bar([1, 2, 3], "scoring")] == [1, 2, 3]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(display, "LINE_SECONDS", 0.0)
    assert [*progress_bar([1, 2], "scoring")] == [1, 2]
    assert capsys.readouterr().err == "scoring: batch 1 of 2\nscoring: batch 2 of 2\n"
    assert [*progress_bar([1, 2], "scoring", visible=False)] == [1, 2]
    assert capsys.readouterr().err == ""
