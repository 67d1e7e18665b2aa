"""Every Triton kernel compiles for real GPUs, without spilling."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

pytest.importorskip("triton", reason="triton is not installed: there is no compiler")

TARGETS = ("sm80", "sm89", "sm90", "gfx942")
KERNELS = {"diagonal_kernel", "pivot_kernel", "segment_sum_kernel"}
HERE = Path(__file__).parent


@cache
def compiled() -> list[dict[str, Any]]:
    """Return what `ahead_of_time.py` prints, run in a process whose Triton was never set to interpret."""
    paths = os.pathsep.join([str(HERE.parents[1] / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    script = [sys.executable, str(HERE / "ahead_of_time.py"), "--json"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("target", TARGETS)
def test_everything_compiles_and_nothing_spills(target: str) -> None:
    found = [each for each in compiled() if each["target"] == target]
    assert {each["kernel"] for each in found} == KERNELS
    assert [each for each in found if each["spilled_bytes"] > 0] == []
    assert [each for each in found if each["shared_bytes"] > each["shared_limit"]] == []
