"""The program that measures a GPU runs here with tiny models, so that nothing of it fails there first."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from factories import MakeCheckpoint, MakeConfig
from safetensors.torch import load_file

from oneshot.checkpoint import locate_checkpoint
from oneshot.pipeline import compress

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_bundle

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
KINDS = {
    *("tests", "predicted", "compress", "pivots", "agree", "speed", "quality", "quality seconds", "heal"),
}

FORMS = {"dense", "stock", "per-layer", "nemotron-nas"}


def run(tmp_path: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    """Run the program on the CPU without PYTHONPATH, which it does not need; return its rows as well."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--tiny", "--device=cpu", f"--output={tmp_path}"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*command, *options], env=environment, cwd=tmp_path, capture_output=True, text=True)
    path = tmp_path / "gpu.jsonl"
    return done, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_every_section_writes_rows(tmp_path: Path) -> None:
    done, rows = run(tmp_path, "--in-process", f"--scratch={tmp_path / 'scratch'}")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert {row["kind"] for row in rows} == KINDS
    again = {row["run"]: row["checksum"] for row in rows if row["kind"] == "agree"}
    assert again["float32"] == again["float32 again"] == again["float32, torch's kernels"] == again["cpu float32"]
    assert all(row["same_neurons"] == 1.0 for row in rows if row["kind"] == "agree" and "float32" in row["run"])
    assert {row["form"] for row in rows if row["kind"] == "speed"} == FORMS
    assert not (tmp_path / "scratch").exists()


def test_a_section_out_of_time_costs_its_own_rows(tmp_path: Path) -> None:
    done, rows = run(tmp_path, "--sections", "tests", "pivots", "--seconds=0")
    assert done.returncode == 1
    assert done.stdout.count("no time left") == 2
    assert not rows


def test_a_section_runs_in_a_process_of_its_own_and_says_who_shares_the_device(tmp_path: Path) -> None:
    done, rows = run(tmp_path, "--sections", "pivots", "--at-once=2")
    assert done.returncode == 0, (tmp_path / "log.txt").read_text()
    assert {(row["section"], row["at_once"]) for row in rows} == {("pivots", 2)}


def test_the_model_of_a_bundle_is_that_of_its_file(
    make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other machine may have an older transformers, so it converts weights only."""
    compress(make_config(make_checkpoint(layers=1), form="gguf", sparsity=0, output=str(tmp_path / "written")))
    file = tmp_path / "written" / "model.gguf"
    want = locate_checkpoint(str(file), tmp_path)
    monkeypatch.setattr(gpu_bundle, "NUM_BYTES", 1000)
    gpu_bundle.add_model(tmp_path / "bundle", file)
    assert gpu_bundle.real_model(tmp_path / "none", tmp_path) is None
    found = gpu_bundle.real_model(tmp_path / "bundle", tmp_path)
    assert found is not None
    assert {path.name for path in found.iterdir()} == {path.name for path in want.iterdir()}
    ours, theirs = load_file(found / "model.safetensors"), load_file(want / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
