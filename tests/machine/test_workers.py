"""Two processes against one: the same plan, tensors equal up to rounding; if one process dies, the other ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from factories import MakeCheckpoint
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from oneshot.cli.compress import main
from oneshot.machine import Workers

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--no-python"]
OPTIONS = ["--num-sequences=15", "--sequence-length=32", "--batch-size=4", "--device=cpu", "--dtype=float32", "--quiet"]


def start_two(*arguments: str, module: str = "oneshot.compress") -> subprocess.Popen[str]:
    """Start two gloo processes of a command line."""
    return subprocess.Popen(
        [*LAUNCH, sys.executable, "-m", module, *OPTIONS, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@given(count=st.integers(0, 50), size=st.integers(1, 8))
def test_the_parts_of_the_workers_are_the_whole_in_order(count: int, size: int) -> None:
    parts = [list(range(count))[Workers(rank, size).part(count)] for rank in range(size)]
    assert [item for part in parts for item in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    "options",
    [
        ["--sparsity=0.1", "--form=per-layer", "--round-to=1", "--set=heads=id"],
        ["--sparsity=0.1", "--form=per-layer", "--round-to=1", "--set=embedding=low-rank"],
        ["--sparsity=0.1", "--recipe=group-pca", "--set=correction=two-stream"],
        ["--sparsity=0.15", "--recipe=stat", "--set=ffn=wanda"],
        ["--sparsity=0.1", "--recipe=flap", "--form=per-layer", "--round-to=1"],
        ["--sparsity=0.15", "--recipe=random", "--set=heads=random"],
        ["--sparsity=0.3", "--set=depth=sensitivity"],
        ["--sparsity=0.2", "--up-steps=2"],
        ["--set=value_size=4", "--set=query_key_size=4", "--form=per-layer"],
    ],
    ids=str,
)
def test_two_processes_give_what_one_gives(
    options: list[str], make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path
) -> None:
    vocabulary = {"tied": True, "vocabulary": 1600} if "--set=embedding=low-rank" in options else {}
    arguments = [str(make_checkpoint(layers=3, **vocabulary)), f"--calibration={text_file}", *options]
    process = start_two(*arguments, f"--output={tmp_path / 'two'}")
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert main([*arguments, *OPTIONS, f"--output={tmp_path / 'one'}"]) == 0
    one, two = (json.loads((tmp_path / name / "oneshot_report.json").read_text()) for name in ("one", "two"))
    assert one["plan"] == two["plan"]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["one", "two"]
    wanted, found = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)
    for ours, theirs in zip(one["layers"], two["layers"], strict=True):
        for sublayer, other in zip(ours["sublayers"], theirs["sublayers"], strict=True):
            assert (sublayer["kept_size"], sublayer["kind"]) == (other["kept_size"], other["kind"])
            # No error is predicted for a layer that is left out, and for up_proj's second solve.
            assert (sublayer["predicted_error"] is None) == (other["predicted_error"] is None)
            if sublayer["kept_size"] and sublayer["predicted_error"] is not None:
                assert sublayer["predicted_error"] == pytest.approx(other["predicted_error"], rel=1e-3)


def test_a_process_that_dies_ends_the_run(make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path) -> None:
    """It never hangs; finished parts stay, and the same command continues."""
    arguments = [str(make_checkpoint(layers=6, hidden=64, width=1024)), f"--calibration={text_file}", "--sparsity=0.2"]
    arguments += [f"--output={tmp_path / 'out'}", "--resume"]
    process = start_two(*arguments)
    while process.poll() is None and not list(tmp_path.glob("out.incomplete/record-*.json")):
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "exitcode" in errors
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.incomplete").exists()
    process = start_two(*arguments)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert (tmp_path / "out" / "config.json").exists()


def test_fewer_sequences_than_processes(make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path) -> None:
    process = start_two(
        str(make_checkpoint()), f"--calibration={text_file}", "--sparsity=0.2", f"--output={tmp_path / 'out'}",
        "--num-sequences=1",
    )  # fmt: skip
    _, errors = process.communicate()
    assert process.returncode != 0
    assert "--num-sequences" in errors
    assert list(tmp_path.iterdir()) == []
