"""The program that measures a GPU runs here with tiny models, so that nothing of it fails there first."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KINDS = {"machine", "ceiling", "rates", "tests", "compress", "gram", "sketch", "pivots", "agree", "sanitizer"}


def test_every_section_writes_rows(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--tiny",
        "--device",
        "cpu",
        "--output",
        str(tmp_path),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it needs none
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    log = (tmp_path / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + log[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in rows} == KINDS
    again = {row["run"]: row["checksum"] for row in rows if row["kind"] == "agree"}
    assert again["float32"] == again["float32 again"] == again["cpu float32"]
