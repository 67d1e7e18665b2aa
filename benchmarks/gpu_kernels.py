"""The sections of `gpu.py` about the card and the kernels: ceilings, pivots, sketches, products, their tests."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from gpu_common import ROOT, Job

NEEDED = ("torch", "transformers", "scipy", "psutil", "triton", "pytest", "hypothesis", "numpy", "gguf")
PIVOTED = ((4096, 2816), (11008, 7552), (11008, 11008), (14336, 9856))  # columns of a Gram, pivots that are taken
TOGETHER = ((32, 128, 64), (8, 2048, 1024))  # Grams at once, their columns and pivots
SANITIZED = """
import torch
from oneshot_kernels import cholesky_pivots_, sketch_
for n in (1, 63, 130):
    rows = torch.randn(37, n, device="cuda")
    sketch_(torch.zeros(9, n, device="cuda"), rows, row_offset=3, seed=1)
    rows = rows.double()
    cholesky_pivots_(rows.mT @ rows, rank=n)
torch.cuda.synchronize()
"""


def ceilings(job: Job) -> None:
    """Measure the ceilings of the card: products, memory, transfers, launches; and what `--dry-run` measures."""
    import torch

    from oneshot.footprint.rates import measure_rates

    device = job.device
    size, large = (8192, 2**30) if job.cuda else (256, 2**20)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    info = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    if job.cuda:
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total,clocks.sm,power.limit",
            "--format=csv,noheader",
        ]
        info["smi"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    job.emit("machine", **info, cpus=os.cpu_count(), missing=missing)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = job.seconds_of(lambda a=left, b=right: a @ b)
        job.emit("ceiling", what=f"product {dtype}", tflops=2 * size**3 / seconds / 1e12)
    source = torch.empty(large, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = job.seconds_of(lambda a=source: target.copy_(a))
    job.emit("ceiling", what="memory", gbps=2 * large / seconds / 1e9)
    del source
    host = torch.empty(large // 4, dtype=torch.uint8)
    target = target[: large // 4]
    job.emit("ceiling", what="upload", gbps=large / 4 / job.seconds_of(lambda: target.copy_(host)) / 1e9)
    if job.cuda:
        pinned = host.pin_memory()
        up = job.seconds_of(lambda: target.copy_(pinned, non_blocking=True))
        down = job.seconds_of(lambda: pinned.copy_(target, non_blocking=True))
        job.emit("ceiling", what="pinned upload", gbps=large / 4 / up / 1e9)
        job.emit("ceiling", what="pinned download", gbps=large / 4 / down / 1e9)
    small = torch.zeros(1024, device=device)
    launches = job.seconds_of(lambda: [small.add_(1) for _ in range(3000)])
    job.emit("ceiling", what="launch", microseconds=launches / 3000 * 1e6)
    job.emit("rates", **asdict(measure_rates(torch.device(device), torch.bfloat16)))


def pivots(job: Job) -> None:
    """Time the choice of pivots as it is by default and with torch's kernels alone, and compare what they choose."""
    import torch
    from oneshot_kernels import cholesky_pivots_, pivoted_cholesky

    for columns, rank in PIVOTED if job.cuda else ((128, 88),):
        gram = _gram(columns, job.device)
        work = torch.empty_like(gram)
        chosen = {}
        for kernels in ("default", "torch"):
            _force(None if kernels == "default" else kernels)
            found: list[Any] = []
            first = job.seconds_once(lambda w=work, g=gram, r=rank, f=found: f.append(_pivots_of(w, g, r)))
            seconds = job.seconds_of(lambda w=work, g=gram, r=rank: _pivots_of(w, g, r), 2)
            chosen[kernels] = found[0].cpu()
            facts: dict[str, Any] = {"columns": columns, "rank": rank, "kernels": kernels}
            equal = bool((chosen[kernels] == chosen["default"]).all())
            job.emit("pivots", what="pivots of a Gram", **facts, first_seconds=first, seconds=seconds, equal=equal)
        _force(None)
        if columns <= 4096:
            there = cholesky_pivots_(gram.cpu(), rank=rank)
            common = len(set(there.tolist()) & set(chosen["default"].tolist())) / rank
            equal = bool((there == chosen["default"]).all())
            job.emit("pivots", what="compared with LAPACK", columns=columns, rank=rank, equal=equal, common=common)
            seconds = job.seconds_of(lambda g=gram, r=rank: pivoted_cholesky(g, rank=r), 2)
            job.emit("pivots", what="the whole factor", columns=columns, rank=rank, seconds=seconds)
        if columns == rank:
            seconds = job.seconds_of(lambda g=gram: torch.linalg.cholesky_ex(g), 2)
            job.emit("pivots", what="Cholesky without pivots", columns=columns, seconds=seconds)
        del gram, work
    for count, columns, rank in TOGETHER if job.cuda else ((3, 40, 20),):
        grams = torch.stack([_gram(columns, job.device) for _ in range(count)])
        seconds = job.seconds_of(lambda g=grams, r=rank: cholesky_pivots_(g.clone(), rank=r), 3)
        alone = job.seconds_of(lambda g=grams, r=rank: [cholesky_pivots_(each, rank=r) for each in g.clone()], 3)
        facts = {"grams": count, "columns": columns, "rank": rank}
        together = cholesky_pivots_(grams.clone(), rank=rank)
        one_by_one = torch.stack([cholesky_pivots_(each, rank=rank) for each in grams.clone()])
        equal = bool((together == one_by_one).all())
        job.emit("pivots", what="many Grams at once", **facts, seconds=seconds, alone_seconds=alone, equal=equal)


def factorisations(job: Job) -> None:
    """Time eigendecompositions, QR, LU, Cholesky and triangular solves."""
    import torch

    for size in (2048, 4096) if job.cuda else (64,):
        for dtype in (torch.float32, torch.float64):
            gram = _gram(size, job.device).to(dtype)
            gram.diagonal().add_(1.0)
            calls: dict[str, Callable[[], object]] = {
                "eigh": partial(torch.linalg.eigh, gram),
                "eigvalsh": partial(torch.linalg.eigvalsh, gram),
                "qr": partial(torch.linalg.qr, gram),
                "lu": partial(torch.linalg.lu_factor, gram),
                "cholesky": partial(torch.linalg.cholesky_ex, gram),
            }
            for name, call in calls.items():
                seconds = job.seconds_of(call, 1)
                job.emit("factorisation", what=name, n=size, dtype=str(dtype), seconds=seconds)
    size, right = (7552, 4096) if job.cuda else (64, 32)
    lower = (torch.eye(size, device=job.device, dtype=torch.float64) + 1e-6).tril()
    for name, columns in ((f"solve_triangular {size} x {right}", right), ("solve_triangular one side", 1)):
        sides = torch.ones(size, columns, device=job.device, dtype=torch.float64)
        seconds = job.seconds_of(lambda s=sides: torch.linalg.solve_triangular(lower, s, upper=False), 2)
        job.emit("factorisation", what=name, dtype="fp64", seconds=seconds)


def kernels(job: Job) -> None:
    """Time Grams beside one plain product, and sketches of both implementations."""
    import torch
    from oneshot_kernels import gram_, sketch_

    names = ("torch", "triton") if importlib.util.find_spec("triton") and job.cuda else ("torch",)
    rows_count = 8192 if job.cuda else 64
    for columns in (4096, 11008, 14336) if job.cuda else (128,):
        for dtype in (torch.bfloat16, torch.float32):
            rows = torch.randn(rows_count, columns, device=job.device).to(dtype)
            facts = {"rows": rows_count, "columns": columns, "dtype": str(dtype)}
            exact = rows[:, :512].double().mT @ rows[:, :512].double()
            gram = torch.zeros(columns, columns, device=job.device)
            gram_(gram, rows, mirror=False)
            corner = gram[:512, :512].triu().double()
            error = float((corner - exact.triu()).norm() / exact.triu().norm())
            seconds = job.seconds_of(lambda g=gram, r=rows: gram_(g, r, mirror=False))
            tflops = rows_count * columns**2 / seconds / 1e12
            job.emit("gram", kernels="torch", **facts, seconds=seconds, error=error, tflops=tflops)
            seconds = job.seconds_of(lambda r=rows: r.mT @ r)
            job.emit("gram", kernels="one product", **facts, seconds=seconds)
            del gram, exact
            sketch = torch.zeros(2 * columns, columns, device=job.device)
            for name in names:
                _force(name)
                seconds = job.seconds_of(lambda s=sketch, r=rows: sketch_(s, r, row_offset=0, seed=0))
                job.emit("sketch", kernels=name, **facts, seconds=seconds)
            _force(None)


def tests(job: Job) -> None:
    """Run the kernels' tests on the device; what they print is in `tests.log` at once."""
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        job.emit("tests", skipped="pytest or hypothesis is not installed")
        return
    chosen = ["tests/kernels/test_random.py"] if job.tiny else ["tests/kernels"]
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *chosen]
    environment = os.environ | {"ONESHOT_TEST_DEVICE": job.device}
    log = job.output / "tests.log"
    with log.open("w") as file:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file, check=False)
    lines = log.read_text().splitlines()
    failed = [line for line in lines if line.startswith("FAILED")][:40]
    job.emit("tests", returncode=done.returncode, summary=lines[-1:], failed=failed)


def sanitizer(job: Job) -> None:
    """Run the Triton kernels under NVIDIA's memory checker."""
    if shutil.which("compute-sanitizer") is None or not job.cuda:
        job.emit("sanitizer", skipped="compute-sanitizer is not there")
        return
    environment = os.environ | {"ONESHOT_KERNELS": "triton", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = ["compute-sanitizer", "--tool", "memcheck", sys.executable, "-c", SANITIZED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    job.emit("sanitizer", returncode=done.returncode, tail=done.stdout.strip().splitlines()[-2:])


def _gram(columns: int, device: str) -> Any:
    """Return a float64 Gram whose columns' sizes span three orders."""
    import torch

    matrix = torch.randn(columns + 64, columns, device=device, dtype=torch.float64)
    matrix *= torch.logspace(0, -3, columns, device=device, dtype=torch.float64)
    return matrix.mT @ matrix


def _pivots_of(work: Any, gram: Any, rank: int) -> Any:
    from oneshot_kernels import cholesky_pivots_

    return cholesky_pivots_(work.copy_(gram), rank=rank)


def _force(kernels: str | None) -> None:
    """Force an implementation of the kernels, or none."""
    os.environ.pop("ONESHOT_KERNELS", None)
    if kernels is not None:
        os.environ["ONESHOT_KERNELS"] = kernels
