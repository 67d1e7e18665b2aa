"""What a dry run says: times as people say them, one table for several sizes, and what the run will make."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from factories import MakeCheckpoint, MakeConfig

from oneshot.cli.main import main
from oneshot.pipeline import compress, predict
from oneshot.report.records import Footprint
from oneshot.report.terminal import print_footprint, print_footprints

ONE = Footprint(
    host_bytes=2**30,
    host_stage="the layers",
    device_bytes=0,
    device_stage="",
    store="host",
    result_bytes=2**30,
    scratch_bytes=0,
    stored_parameters={"dense": 1000, "compressed": 900},
    seconds={"prepare": 700.0, "curvature": 300.0, "profile": 1000.0, "layers": 7716.0, "total": 9716.0},
    check_bytes=2**30,
    check_fits=True,
    check_seconds=60.0,
    text_seconds=600.0,
    dtype="float32, because this CPU multiplies bfloat16 0.57 times as fast as float32",
    text="4,096 tokens of 3/4 [b].txt + 1/4 builtin",
)


def test_times_are_as_people_say_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert "about 2 h 42 min, of which 10 min to write the text; it may be wrong" in str(ONE)
    print_footprint(ONE)
    printed = " ".join(capsys.readouterr().out.split())
    for row in (
        "time in all │ about 2 h 42 min",
        "time: layers │ 2 h 9 min",
        "12 min │ 10 min of it to write the text",
    ):
        assert row in printed
    assert "activations │ host │ in host memory" in printed
    assert "calibration text │ 4,096 tokens │ of 3/4 [b].txt + 1/4 builtin" in printed
    assert "text: 4,096 tokens of 3/4 [b].txt + 1/4 builtin" in " ".join(str(ONE).split())
    assert re.search(r"dtype │ float32 │ because this", printed)
    assert re.search(r"\d s\b", printed) is None
    print_footprint(ONE, checks=True)
    assert "about 2 h 43 min" in capsys.readouterr().out


def test_what_several_sizes_share_counts_once(capsys: pytest.CaptureFixture[str]) -> None:
    """2,000 s together, 7,716 and 3,600 s of their own, and a check of a minute each."""
    smaller = replace(
        ONE,
        stored_parameters={"dense": 1000, "compressed": 800},
        seconds=ONE.seconds | {"layers": 3600.0, "total": 5600.0},
        exact=False,
    )
    print_footprints([ONE, smaller], checks=True)
    printed = capsys.readouterr().out
    assert printed.count("dry run") == 1
    for row in (r"10\.0% .* 900 .* 2 h 10 min", r"20\.0% .* about 800 .* about 1\.00 GiB .* 61 min"):
        assert re.search(row, printed), row
    told = " ".join(printed.split())
    assert "share: 33 min (prepare 12 min – 10 min of it to write the text, curvature 5 min, profile 17 min)" in told
    assert "time in all: about 3 h 44 min" in told
    assert "all results on disk: about 2.00 GiB" in told
    assert "calibration text: 4,096 tokens of 3/4 [b].txt + 1/4 builtin" in told
    assert all(len(line) <= 80 for line in printed.splitlines())


def test_a_dry_run_of_several_sizes_warns_once_and_writes_nothing(
    make_checkpoint: MakeCheckpoint,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = make_checkpoint()
    options = ["--num-sequences=2", "--sequence-length=16", "--device=cpu", f"--output={tmp_path / 'out'}"]
    texts = [f"--calibration={text_file}", "--dry-run"]
    assert main(["compress", str(folder), "--sparsity", "0.1", "0.2", *options, *texts]) == 0
    printed = capsys.readouterr().out
    assert printed.count("time in all: about") == 1
    assert len([message for message in caplog.messages if "tokens are few" in message]) == 1
    assert not (tmp_path / "out").exists()


def test_it_says_what_a_run_planned_by_a_profile_will_make(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig
) -> None:
    """Not what equal layers would have."""
    folder = make_checkpoint(layers=3, hidden=64)
    dense = predict(make_config(folder)).stored_parameters["dense"]
    config = make_config(folder, form="per-layer", sparsity=None, parameters=round(0.83 * dense), num_sequences=4)
    predicted, report = predict(config), compress(config)
    assert report.footprint is not None
    assert predicted.stored_parameters == report.footprint.stored_parameters
    assert not predicted.exact
    assert predicted.stored_parameters["compressed"] == round(0.83 * dense)
    assert report.stored_parameters["compressed"] == pytest.approx(round(0.83 * dense), rel=0.02)
    assert predicted.result_bytes == 4 * round(0.83 * dense)
    files = sum(path.stat().st_size for path in Path(config.output).glob("*.safetensors"))
    assert files == pytest.approx(predicted.result_bytes, rel=0.05)
