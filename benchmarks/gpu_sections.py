"""The sections of `gpu.py`: what each measures. They write rows to `gpu.jsonl` and import torch only when they run."""

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_models import scratch_folder, write_model

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("torch", "transformers", "scipy", "psutil", "matplotlib", "triton", "pytest", "hypothesis", "numpy")
SANITIZED = """
import torch
from oneshot_kernels import gram_, sketch_
for n in (1, 63, 130):
    rows = torch.randn(37, n, device="cuda").bfloat16()
    gram_(torch.zeros(n, n, device="cuda"), rows)
    sketch_(torch.zeros(9, n, device="cuda"), rows, row_offset=3, seed=1)
torch.cuda.synchronize()
"""


def emit(options: argparse.Namespace, kind: str, **values: Any) -> None:
    """Append a row and show it."""
    row = {"kind": kind, **values, "commit": commit(options.bundle), "device": device_name(options.device)}
    line = json.dumps(row)
    with (options.output / "gpu.jsonl").open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    print(line, flush=True)


def commit(bundle: Path) -> str:
    """Return the commit that the bundle was made of; `.git` does not travel."""
    note = bundle / "COMMIT"
    return note.read_text().strip() if note.exists() else "unknown"


def device_name(device: str) -> str:
    """Return the name of the device that the rows are about."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def seconds_of(call: Callable[[], object], device: str, repetitions: int = 5, budget: float = 4.0) -> float:
    """Return the median seconds of a call after one that warms up; fewer repetitions if the budget is spent."""
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    call()
    wait()
    times: list[float] = []
    begun = time.perf_counter()
    while not times or (len(times) < repetitions and time.perf_counter() - begun < budget):
        started = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def env(options: argparse.Namespace) -> None:
    """Measure the ceilings of the card: products, memory, transfers, launches; and what `--dry-run` measures."""
    import torch

    from oneshot.footprint.seconds import measure_rates

    device, cuda = options.device, options.device == "cuda"
    size, large = (8192, 2**30) if cuda else (256, 2**20)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    info = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    if cuda:
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total,clocks.sm,power.limit",
            "--format=csv,noheader",
        ]
        info["smi"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    emit(options, "machine", **info, cpus=os.cpu_count(), missing=missing)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = seconds_of(lambda a=left, b=right: a @ b, device)
        emit(options, "ceiling", what=f"product {dtype}", tflops=2 * size**3 / seconds / 1e12)
    source = torch.empty(large, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda a=source: target.copy_(a), device)
    emit(options, "ceiling", what="memory", gbps=2 * large / seconds / 1e9)
    del source
    host = torch.empty(large // 4, dtype=torch.uint8)
    target = target[: large // 4]
    emit(options, "ceiling", what="upload", gbps=large / 4 / seconds_of(lambda: target.copy_(host), device) / 1e9)
    if cuda:
        pinned = host.pin_memory()
        up = seconds_of(lambda: target.copy_(pinned, non_blocking=True), device)
        down = seconds_of(lambda: pinned.copy_(target, non_blocking=True), device)
        emit(options, "ceiling", what="pinned upload", gbps=large / 4 / up / 1e9)
        emit(options, "ceiling", what="pinned download", gbps=large / 4 / down / 1e9)
    small = torch.zeros(1024, device=device)
    launches = seconds_of(lambda: [small.add_(1) for _ in range(3000)], device)
    emit(options, "ceiling", what="launch", microseconds=launches / 3000 * 1e6)
    emit(options, "rates", **asdict(measure_rates(torch.device(device), torch.bfloat16)))


def tests(options: argparse.Namespace) -> None:
    """Run the kernels' tests on the device."""
    if importlib.util.find_spec("pytest") is None or importlib.util.find_spec("hypothesis") is None:
        emit(options, "tests", skipped="pytest or hypothesis is not installed")
        return
    chosen = ["tests/kernels/test_random.py"] if options.tiny else ["tests/kernels"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    environment = os.environ | {"ONESHOT_TEST_DEVICE": options.device}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    (options.output / "tests.log").write_text(done.stdout[-400_000:] + done.stderr[-50_000:])
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")][:40]
    emit(options, "tests", returncode=done.returncode, summary=done.stdout.strip().splitlines()[-1:], failed=failed)


def kernels(options: argparse.Namespace) -> None:
    """Time Grams, sketches and pivots beside plain products and factorisations."""
    import torch
    from oneshot_kernels import backend, cholesky_pivots_, gram_, sketch_

    device, cuda = options.device, options.device == "cuda"
    names = ("torch", "triton") if backend.triton_installed() and cuda else ("torch",)
    rows_count = 8192 if cuda else 64
    for columns in (4096, 11008, 14336, 28672) if cuda else (128,):
        for dtype in (torch.bfloat16, torch.float32):
            rows = torch.randn(rows_count, columns, device=device).to(dtype)
            facts = {"rows": rows_count, "columns": columns, "dtype": str(dtype)}
            exact = rows[:, :512].double().mT @ rows[:, :512].double()
            gram = torch.zeros(columns, columns, device=device)
            for name in names:
                os.environ["ONESHOT_KERNELS"] = name
                gram_(gram.zero_(), rows, mirror=False)
                corner = gram[:512, :512].triu().double()
                error = float((corner - exact.triu()).norm() / exact.triu().norm())
                seconds = seconds_of(lambda g=gram, r=rows: gram_(g, r, mirror=False), device)
                tflops = rows_count * columns**2 / seconds / 1e12
                emit(options, "gram", kernels=name, **facts, seconds=seconds, error=error, tflops=tflops)
                if columns <= 14336:
                    sketch = torch.zeros(2 * columns, columns, device=device)
                    seconds = seconds_of(lambda s=sketch, r=rows: sketch_(s, r, row_offset=0, seed=0), device)
                    emit(options, "sketch", kernels=name, **facts, seconds=seconds)
                    del sketch
            os.environ.pop("ONESHOT_KERNELS")
            seconds = seconds_of(lambda r=rows: r.mT @ r, device)
            emit(options, "gram", kernels="one product", **facts, seconds=seconds)
            del gram, exact
        _pivots(options, torch, cholesky_pivots_, columns)


def _pivots(options: argparse.Namespace, torch: Any, cholesky_pivots_: Any, columns: int) -> None:
    """Time pivots beside cuSOLVER's unpivoted QR and Cholesky; compare them with LAPACK's if the Gram is small."""
    device, rank = options.device, 3 * columns // 4
    matrix = torch.randn(columns + 64, columns, device=device, dtype=torch.float64)
    matrix *= torch.logspace(0, -3, columns, device=device, dtype=torch.float64)
    gram = matrix.mT @ matrix
    work = torch.empty_like(gram)
    seconds = seconds_of(lambda: cholesky_pivots_(work.copy_(gram), rank=rank), device, 2)
    emit(options, "pivots", what="pivots of a Gram", columns=columns, rank=rank, seconds=seconds)
    if columns <= 14336:
        seconds = seconds_of(lambda m=matrix: torch.linalg.qr(m, mode="r"), device, 1)
        emit(options, "pivots", what="QR without pivots", columns=columns, seconds=seconds)
    del matrix
    seconds = seconds_of(lambda: torch.linalg.cholesky_ex(gram), device, 2)
    emit(options, "pivots", what="Cholesky without pivots", columns=columns, seconds=seconds)
    if columns < 5000:
        here = cholesky_pivots_(gram.clone(), rank=rank).tolist()
        there = cholesky_pivots_(gram.cpu(), rank=rank).tolist()
        common = len(set(here) & set(there)) / rank
        emit(options, "pivots", what="compared with LAPACK", columns=columns, equal=here == there, common=common)


def compressed(options: argparse.Namespace, model: str, form: str, kernels_name: str) -> None:
    """Compress random weights of a model's shape; compare time and memory with the prediction."""
    import torch

    from oneshot import Config
    from oneshot.pipeline import compress, predict

    cuda = options.device == "cuda"
    if kernels_name == "triton" and cuda:
        os.environ["ONESHOT_KERNELS"] = "triton"
    folder = scratch_folder() / f"oneshot-{f'tiny-{os.getpid()}' if options.tiny else model}"
    output = scratch_folder() / f"oneshot-out-{os.getpid()}"
    started = time.perf_counter()
    if not (folder / "text.txt").exists():
        shutil.rmtree(folder, ignore_errors=True)
        write_model(folder, "tiny" if options.tiny else model, options)
    made = time.perf_counter() - started
    sizes = (
        {"num_sequences": 8, "sequence_length": 64} if options.tiny else {"num_sequences": 128, "sequence_length": 2048}
    )
    config = Config.of(
        str(folder),
        str(output),
        sparsity=0.2,
        form=form,
        calibration=str(folder / "text.txt"),
        device=options.device,
        dtype="bfloat16",
        overwrite=True,
        **sizes,
    )
    predicted = asdict(predict(config))
    started = time.perf_counter()
    report = compress(config)
    wall = time.perf_counter() - started
    tokens = sizes["num_sequences"] * sizes["sequence_length"]
    emit(
        options,
        "compress",
        model=model,
        form=form,
        kernels=kernels_name,
        making_seconds=made,
        wall_seconds=wall,
        tokens_per_second=tokens / wall,
        seconds=report.seconds,
        layer_seconds=[layer.seconds for layer in report.layers][:4],
        predicted=predicted,
        peak_device_bytes=report.peak_device_bytes,
        reserved_bytes=torch.cuda.max_memory_reserved() if cuda else 0,
        peak_bytes=report.peak_bytes,
        device_ratio=report.peak_device_bytes / max(1, predicted["device_bytes"]),
        warnings=list(report.warnings)[:3],
        errors=[each.predicted_error for each in report.layers[0].sublayers],
    )
    shutil.rmtree(output, ignore_errors=True)
    if options.tiny or model in ("8B", "70B"):  # no later section needs it
        shutil.rmtree(folder)


def agree(options: argparse.Namespace) -> None:
    """Compress real weights on the CPU and on the device, by dtype and kernels, and twice for the bytes."""
    from safetensors.torch import load_file

    from oneshot import Config
    from oneshot.pipeline import compress

    scratch = Path(tempfile.mkdtemp())
    model = scratch / "model"
    if (options.bundle / "model.safetensors").exists() and not options.tiny:
        from gpu_bundle import expand

        expand(options.bundle, model)
        text = "builtin"
    else:
        write_model(model, "tiny", options)
        text = str(model / "text.txt")
    sizes = (
        {"num_sequences": 8, "sequence_length": 64} if options.tiny else {"num_sequences": 64, "sequence_length": 512}
    )
    found: dict[str, tuple[dict[str, Any], list[float]]] = {}

    def run(name: str, device: str, dtype: str, kernels_name: str = "torch") -> None:
        os.environ["ONESHOT_KERNELS"] = kernels_name
        started, output = time.perf_counter(), scratch / name
        settings = {"sparsity": 0.2, "calibration": text, "device": device, "dtype": dtype, **sizes}
        report = compress(Config.of(str(model), str(output), **settings))
        tensors = {
            key: value for path in sorted(output.glob("*.safetensors")) for key, value in load_file(path).items()
        }
        content = b"".join(path.read_bytes() for path in sorted(output.glob("*.safetensors")))
        errors = [each.predicted_error or 0.0 for layer in report.layers for each in layer.sublayers]
        found[name] = tensors, errors
        base, base_errors = found["cpu float32"]
        differences = {
            key: float((value.float() - base[key].float()).norm() / base[key].float().norm().clamp_min(1e-30))
            for key, value in tensors.items()
            if value.shape == base[key].shape
        }
        emit(
            options,
            "agree",
            run=name,
            kernels=kernels_name,
            seconds=time.perf_counter() - started,
            checksum=hashlib.sha256(content).hexdigest()[:16],
            equal_tensors=sum(value == 0 for value in differences.values()) / len(base),
            worst_difference=max(differences.values()),
            errors=errors[:3],
            worst_error_ratio=max(new / max(old, 1e-9) for new, old in zip(errors, base_errors, strict=True)),
        )

    run("cpu float32", "cpu", "float32")
    run("float32", options.device, "float32")
    run("float32 again", options.device, "float32")
    run("bfloat16", options.device, "bfloat16")
    run("bfloat16 again", options.device, "bfloat16")
    if options.device == "cuda" and importlib.util.find_spec("triton"):
        run("bfloat16 triton", "cuda", "bfloat16", "triton")
    shutil.rmtree(scratch, ignore_errors=True)


def sanitizer(options: argparse.Namespace) -> None:
    """Run the Triton kernels under NVIDIA's memory checker."""
    if shutil.which("compute-sanitizer") is None or options.device != "cuda":
        emit(options, "sanitizer", skipped="compute-sanitizer is not there")
        return
    environment = os.environ | {"ONESHOT_KERNELS": "triton", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = ["compute-sanitizer", "--tool", "memcheck", sys.executable, "-c", SANITIZED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    emit(options, "sanitizer", returncode=done.returncode, tail=done.stdout.strip().splitlines()[-2:])
