"""Every Triton kernel compiles for real GPUs, without spilling, and uses tensor cores where it should."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: there is no compiler")

TARGETS = ("sm80", "sm89", "sm90", "gfx942")
KERNELS = {"diagonal_kernel", "gram_kernel", "pivot_kernel", "places_kernel", "segment_sum_kernel"}
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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("call", ["gram", "cross-gram"])
@pytest.mark.parametrize(("dtype", "columns"), [("bf16", 128), ("bf16", 65), ("fp16", 65)])
def test_halves_are_multiplied_by_tensor_cores_as_they_are(target: str, dtype: str, call: str, columns: int) -> None:
    """Not as TF32 (half the rate) and not by ordinary units; on sm_90 by the instructions of a warp group."""
    name = f"{call} {dtype} → fp32, n = {columns}"
    (found,) = [each for each in compiled() if each["target"] == target and each["call"] == name]
    number = {"bf16": "bf16", "fp16": "f16"}[dtype]
    want = {"sm90": f".f32.{number}.{number}", "gfx942": number}.get(target, f".f32.{number}.{number}.f32")
    assert found["tensor_cores"]
    assert all(each.endswith(want) for each in found["tensor_cores"])
    assert target != "sm90" or all(each.startswith("wgmma.") for each in found["tensor_cores"])


def test_other_dtypes_have_no_kernel_of_their_own() -> None:
    """They are cuBLAS's: bf16 → fp64 did not compile, fp32 had no tensor cores and spilled."""
    grams = [each["call"] for each in compiled() if each["kernel"] == "gram_kernel"]
    assert not [call for call in grams if "fp64" in call or "fp32 →" in call]
