"""Several processes against one: the same files to the byte; if one process dies, the others end."""

import hashlib
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from child_processes import start_group, wait
from factories import MakeCheckpoint, topics
from families.cases import CASES
from hypothesis import given
from hypothesis import strategies as st

from oneshot.cli.compress import main
from oneshot.machine import Workers
from oneshot.report.card import REPORT_NAME

pytestmark = pytest.mark.long

TELLING = {REPORT_NAME, "report.html", "README.md"}  # of time and memory
OPTIONS = ["--num-sequences=15", "--sequence-length=32", "--batch-size=4", "--device=cpu", "--dtype=float32", "--quiet"]


@given(count=st.integers(0, 50), size=st.integers(1, 8))
def test_the_parts_of_the_workers_are_the_whole_in_order(count: int, size: int) -> None:
    parts = [list(range(count))[Workers(rank, size).part(count)] for rank in range(size)]
    assert [item for part in parts for item in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parts[0] or not count, "the first reports what it measures"


# name -> (processes, options, model)
SHARED: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "stock": (2, ["--sparsity=0.2"], {}),
    "another text, in bfloat16": (3, ["--sparsity=0.2", "--dtype=bfloat16"], {}),
    "a profile": (2, ["--sparsity=0.1", "--form=per-layer", "--round-to=1", "--set=heads=id"], {}),
    "a profile and up_proj": (3, ["--sparsity=0.15", "--form=per-layer", "--round-to=1", "--up-steps=2"], {}),
    "a profile of an embedding": (
        2,
        ["--sparsity=0.1", "--form=per-layer", "--round-to=1", "--set=embedding=low-rank"],
        {"tied": True, "vocabulary": 1600},
    ),
    "output curvature": (
        2,
        ["--sparsity=0.15", "--form=per-layer", "--round-to=4", "--set=curvature=fisher"],
        CASES["gemma3_text"].options,
    ),
    "a hidden size": (2, ["--sparsity=0.1", "--recipe=group-pca", "--set=correction=two-stream"], {}),
    "sketches": (3, ["--sparsity=0.15", "--recipe=stat"], {}),
    "sparse signs": (2, ["--sparsity=0.15", "--set=sketch=sparse-sign", "--set=sketch_size=100"], {}),
    "moments": (3, ["--sparsity=0.1", "--recipe=flap", "--form=per-layer", "--round-to=1"], {"mlp_bias": True}),
    "held-out text": (2, ["--sparsity=0.15", "--set=damping=auto", "--batch-size=1"], {}),
    "sizes inside heads by a profile": (
        2,
        ["--sparsity=0.1", "--form=per-layer", "--round-to=4", "--set=inner_sizes=sensitivity"],
        {},
    ),
    # 64 tokens for a neuron; the third process has no batch of the dense stream
    "a dense stream of every other batch": (
        3,
        ["--sparsity=0.15", "--up-steps=1", "--num-sequences=64", "--batch-size=16"],
        {"width": 32},
    ),
    "experts": (2, ["--set=num_experts=3", "--set=experts=effects", "--sparsity=0.35"], CASES["glm4_moe"].options),
    "carried mixers, experts by a profile": (
        2,
        ["--sparsity=0.15", "--form=per-layer", "--set=experts=effects"],
        CASES["lfm2_moe"].options,
    ),
    # of 64 documents that are written at once, and some more
    "text of its own": (
        3,
        ["--sparsity=0.2", "--calibration=self", "--num-sequences=160", "--sequence-length=128"],
        {},
    ),
    "inside heads": (3, ["--set=value_size=4", "--set=query_key_size=4", "--form=per-layer"], {}),
}


@pytest.fixture(scope="module")
def results(
    make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[str]]]:
    """Return the folder of every run of `SHARED` by several processes, in `several`, and its arguments."""
    other = tmp_path_factory.mktemp("other") / "other.txt"
    other.write_text(topics(30))
    made: dict[str, tuple[Path, list[str]]] = {}
    for name, (_, options, model) in SHARED.items():
        text = other if name.startswith("another text") else text_file
        arguments = [str(make_checkpoint(**{"layers": 3} | model)), f"--calibration={text}", *OPTIONS, *options]
        if not any(option.startswith(("--form", "--recipe")) for option in options):
            arguments.append("--form=stock")
        made[name] = tmp_path_factory.mktemp("run"), arguments
    for count in sorted({processes for processes, _, _ in SHARED.values()}):
        runs = [
            [*arguments, f"--output={folder / 'several'}"]
            for name, (folder, arguments) in made.items()
            if SHARED[name][0] == count
        ]
        told = other.with_name(f"{count} processes")
        assert wait(start_group(count, runs, told), 300) == [0] * count, told.read_text()
    return made


@pytest.mark.parametrize("name", SHARED)
def test_processes_give_the_bytes_of_one(name: str, results: dict[str, tuple[Path, list[str]]]) -> None:
    """Every file of the result; the report and what is made of it also tell times and memory."""
    folder, arguments = results[name]
    assert main([*arguments, f"--output={folder / 'one'}"]) == 0
    assert digests(folder / "one") == digests(folder / "several")
    assert {path.name for path in folder.iterdir()} == {"one", "several"}
    one, several = (json.loads((folder / each / REPORT_NAME).read_text()) for each in ("one", "several"))
    assert one["plan"] == several["plan"]
    assert one["warnings"] == several["warnings"]
    for ours, theirs in zip(one["layers"], several["layers"], strict=True):
        assert ours["gram_notes"] == theirs["gram_notes"]
        # The measured error is of the last batch that the first process has.
        assert [without_measured(each) for each in ours["sublayers"]] == [
            without_measured(each) for each in theirs["sublayers"]
        ]


def test_the_first_process_tells_of_grams_that_another_factorised(
    make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path
) -> None:
    """The second process solves the FFNs."""
    arguments = ["--sparsity=0.1", "--form=stock", "--set=damping=0", "--num-sequences=4", "--sequence-length=8"]
    checkpoint, output = make_checkpoint(layers=3), tmp_path / "out"
    command = [str(checkpoint), f"--calibration={text_file}", *OPTIONS, *arguments, f"--output={output}"]
    codes = wait(start_group(2, [command], tmp_path / "told"))
    errors = (tmp_path / "told").read_text()
    assert codes == [0, 0], errors
    [told] = [each for each in json.loads((output / REPORT_NAME).read_text())["warnings"] if "singular" in each]
    assert "(layers 0, 1, 2 of 3)" in told
    assert errors.count("singular to rounding") == 1


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file that tells no time."""
    files = sorted(path for path in folder.iterdir() if path.name not in TELLING)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def without_measured(sublayer: dict[str, Any]) -> dict[str, Any]:
    return sublayer | {"measured_error": None}


def test_a_process_that_dies_ends_the_run(make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path) -> None:
    """The others never hang and say why; finished parts stay, and the same command continues."""
    arguments = [str(make_checkpoint(layers=6, hidden=64, width=512)), f"--calibration={text_file}", "--sparsity=0.2"]
    arguments.append("--form=stock")
    arguments += [*OPTIONS, f"--output={tmp_path / 'out'}", "--resume"]
    processes = start_group(2, [arguments], tmp_path / "told")
    while processes[0].is_alive() and not list(tmp_path.glob("out.incomplete/record-*.json")):
        time.sleep(0.01)
    processes[1].kill()
    assert wait(processes) == [1, -signal.SIGKILL]
    assert "error: Another process of this run ended" in (tmp_path / "told").read_text()
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.incomplete").exists()
    assert wait(start_group(2, [arguments], tmp_path / "told")) == [0, 0], (tmp_path / "told").read_text()
    assert (tmp_path / "out" / "config.json").exists()
