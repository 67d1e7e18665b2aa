"""The pretended device itself: what CUDA would refuse is refused, and what would wait is counted."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
INDEX = "torch.zeros(1, dtype=torch.int64, device='cuda')"
WAITS = {
    "float(a.sum())": 1,
    "a.sum().item()": 1,
    f"a[{INDEX}] = 0.0": 1,
    "a[a > 1]": 1,
    "a.nonzero()": 1,
    "a.cpu()": 1,
    "a.to('cpu', non_blocking=True)": 0,
    "torch.where(a > 1, a, 0.0)": 0,
    "torch.where(a > 1, a, torch.zeros(()))": 1,
    "a[a > 1] = 0.0": 0,
    "a[1:2] = a[:1]": 0,
    f"a.index_fill_(0, {INDEX}, 0.0)": 0,
    f"a.index_fill_(0, {INDEX}, a[0, 0])": 1,
    "a.argmax(); a.sort(); a.mul_(2.0)": 0,
    "torch.tensor([1, 2], device='cuda')": 1,
}
BY_CHANCE = {
    f"a.index_add_(0, {INDEX}, a[:1] * 2.0)": 1,
    f"a.index_put_(({INDEX},), a[:1] * 2.0, accumulate=True)": 1,
    f"a[{INDEX}] = a[:1] * 2.0": 0,
    "a.flatten().cumsum(0)": 1,
    "a.cumsum(0)": 0,
    "torch.sparse_csr_tensor(torch.arange(5, device='cuda'), torch.arange(4, device='cuda'), a[:, 0]) @ a": 1,
}
BY_MAGMA = {
    "torch.linalg.lu_factor(a)": 1,
    "torch.linalg.lu_factor(a.mT @ a + torch.eye(3, device='cuda'))": 0,
    "torch.backends.cuda.preferred_linalg_library('cusolver'); torch.linalg.lu_factor(a)": 0,
    "torch.backends.cuda.preferred_linalg_library('default'); torch.linalg.lu_factor(a)": 1,
}
MIXED = [
    "a @ torch.zeros(3, 5)",
    "a.add_(torch.zeros(4, 3))",
    f"torch.zeros(4)[{INDEX}]",
    "torch.cat([a, torch.zeros(4, 3)])",
]
OTHER = {
    "host tensors": "made.append(a.cpu().device.type); made.append(float((a.cpu().mT @ a.cpu()).sum()))",
    "arithmetic": "b = a.mT @ a + torch.tensor(0.0); made += [str(b.device), b.is_cuda, float(b.sum())]",
    "bytes": "b = a.mT @ a; made.append(log.live_bytes); del b; made += [log.live_bytes, log.peak_bytes]",
    "memory": "made += [torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]]",
    "kernels": "a.mul_(2.0).view(3, 4).mT[1:]; a.sum()",
    "numpy": "a.numpy()",
}
PROGRAM = """
import json, sys, torch
from pretend_cuda import pretend

with pretend() as log:
    for statement in json.load(sys.stdin):
        a, made, error = torch.arange(12.0).view(4, 3).to("cuda"), [], ""
        log.reset()
        try:
            exec(statement, {"torch": torch, "log": log, "a": a, "made": made})
        except (RuntimeError, TypeError) as raised:
            error = str(raised)
        counts = {"waits": sum(log.waits.values()), "kernels": sum(log.kernels.values())}
        counts["by_chance"], counts["by_magma"] = sum(log.by_chance.values()), sum(log.by_magma.values())
        print(json.dumps({"made": made, "error": error, **counts}))
        del a
"""


@cache
def results() -> dict[str, dict[str, Any]]:
    """Return what became of every statement, all run in one process with `a` (4, 3) on the device."""
    statements = [*WAITS, *BY_CHANCE, *BY_MAGMA, *MIXED, *OTHER.values()]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(statements),
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(statements, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("statement", WAITS)
def test_waits_are_counted(statement: str) -> None:
    found = results()[statement]
    assert found["error"] == ""
    assert found["waits"] == WAITS[statement]


@pytest.mark.parametrize("statement", BY_CHANCE)
def test_sums_in_the_order_of_chance_are_counted(statement: str) -> None:
    found = results()[statement]
    assert found["error"] == ""
    assert found["by_chance"] == BY_CHANCE[statement]


@pytest.mark.parametrize("statement", BY_MAGMA)
def test_factorisations_that_torch_gives_to_magma_are_counted(statement: str) -> None:
    found = results()[statement]
    assert found["error"] == ""
    assert found["by_magma"] == BY_MAGMA[statement]


@pytest.mark.parametrize("statement", MIXED)
def test_devices_do_not_mix(statement: str) -> None:
    assert "cuda:0 and cpu" in results()[statement]["error"]


def test_numbers_and_places() -> None:
    host, arithmetic = (results()[OTHER[name]]["made"] for name in ("host tensors", "arithmetic"))
    assert host[0] == "cpu"
    assert arithmetic == ["cuda:0", True, host[1]]


def test_bytes_and_kernels() -> None:
    assert results()[OTHER["bytes"]]["made"] == [48 + 36, 48, 48 + 36]
    assert results()[OTHER["memory"]]["made"] == [48, 48]
    assert results()[OTHER["kernels"]]["kernels"] == 2


def test_numpy_needs_a_copy() -> None:
    assert "Use Tensor.cpu() first" in results()[OTHER["numpy"]]["error"]
