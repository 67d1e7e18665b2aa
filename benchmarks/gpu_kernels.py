"""The sections of `gpu.py` about the kernels: the choice of pivots, and the kernels' tests."""

import importlib.util
import os
import subprocess
import sys
from typing import Any

from gpu_common import ROOT, Job

PIVOTED = ((4096, 2816), (11008, 7552), (11008, 11008), (14336, 9856))  # columns of a Gram, pivots that are taken
TOGETHER = ((32, 128, 64), (8, 2048, 1024))  # Grams at once, their columns and pivots


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
