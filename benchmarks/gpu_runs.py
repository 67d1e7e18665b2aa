"""The sections of `gpu.py` that run whole compressions: time and memory, agreement with the CPU, several processes."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_common import ROOT, Job
from gpu_models import shape_of, tiny_name, write_model

SPARSITY = 0.2
TINY_TEXT = {"num_sequences": 8, "sequence_length": 64}
AGREED_TEXT = {"num_sequences": 16, "sequence_length": 512}
AGREED_LAYERS = 6


def random_model(job: Job, name: str) -> tuple[Path, float]:
    """Return the folder of a model of random weights, and the seconds that making it took now."""
    name = tiny_name(name) if job.tiny else name
    folder = job.scratch / name
    started = time.perf_counter()
    if not (folder / "text.txt").exists():
        shutil.rmtree(folder, ignore_errors=True)
        write_model(folder, name, job)
    return folder, time.perf_counter() - started


def compressed(job: Job, model: str, form: str, *settings: str) -> None:
    """Compress random weights of a model's shape; compare time and memory with the prediction.

    `form` may end in "+self": the model writes half of the text. `settings` are name=value, as `--set` reads them.
    Progress is in `log.txt`, also of a run cut short.
    """
    import torch

    from oneshot import Config
    from oneshot.pipeline import compress, predict

    folder, made = random_model(job, model)
    output = job.scratch / "compressed"
    shutil.rmtree(output, ignore_errors=True)
    sequences = shape_of(model, job).num_sequences
    text = {"num_sequences": sequences, "sequence_length": TINY_TEXT["sequence_length"] if job.tiny else 2048}
    more = {name: int(value) if value.isdigit() else value for name, value in (one.split("=") for one in settings)}
    config = Config.of(
        str(folder),
        str(output),
        sparsity=SPARSITY,
        form=form.removesuffix("+self"),
        calibration=f"{folder / 'text.txt'}{'+self' if form.endswith('+self') else ''}",
        device=job.device,
        dtype="bfloat16",
        overwrite=True,
        **text,
        **more,
    )
    predicted = asdict(predict(config))
    job.emit("predicted", model=model, form=form, settings=more, making_seconds=made, predicted=predicted)
    started = time.perf_counter()
    report = compress(config, show_progress=True)
    wall = time.perf_counter() - started
    job.emit(
        "compress",
        model=model,
        form=form,
        settings=more,
        wall_seconds=wall,
        tokens_per_second=text["num_sequences"] * text["sequence_length"] / wall,
        seconds=report.seconds,
        layer_seconds=[layer.seconds for layer in report.layers],
        predicted=predicted,
        peak_device_bytes=report.peak_device_bytes,
        reserved_bytes=torch.cuda.max_memory_reserved() if job.cuda else 0,
        peak_bytes=report.peak_bytes,
        device_ratio=report.peak_device_bytes / max(1, predicted["device_bytes"]),
        warnings=list(report.warnings)[:5],
        errors=[each.predicted_error for each in report.layers[0].sublayers],
    )
    shutil.rmtree(output)


def agree(job: Job) -> None:
    """Compress the first layers of a real model on the device and the CPU, by dtype and kernels, twice for the bytes.

    Without the real model it has random weights. Rows of a gate are the neurons that were kept: the stock form
    does not change them.
    """
    from safetensors.torch import load_file

    from oneshot import Config
    from oneshot.pipeline import compress

    model, text = _agreed_model(job)
    sizes = TINY_TEXT if job.tiny else AGREED_TEXT
    base: dict[str, Any] = {}  # of the first run of these settings: what the others are compared with
    base_settings: dict[str, Any] = {}
    base_errors: list[float] = []

    def run(name: str, device: str, dtype: str, kernels: str | None = None, **settings: Any) -> None:
        os.environ.pop("ONESHOT_KERNELS", None)
        if kernels is not None:
            os.environ["ONESHOT_KERNELS"] = kernels
        started, output = time.perf_counter(), job.scratch / "agreed"
        options = {"sparsity": SPARSITY, "calibration": text, "device": device, "dtype": dtype, **sizes}
        options |= {"form": "stock"} | settings
        report = compress(Config.of(str(model), str(output), overwrite=True, **options))
        seconds = time.perf_counter() - started
        files = sorted(output.glob("*.safetensors"))
        tensors = {key: value for path in files for key, value in load_file(path).items()}
        errors = [each.predicted_error or 0.0 for layer in report.layers for each in layer.sublayers]
        nonlocal base, base_settings, base_errors
        if not base or settings != base_settings:
            base, base_settings, base_errors = tensors, settings, errors
        differences = sorted(
            float((tensor.float() - base[key].float()).norm() / base[key].float().norm().clamp_min(1e-30))
            for key, tensor in tensors.items()
        )
        job.emit(
            "agree",
            run=name,
            kernels=kernels or "default",
            settings=settings,
            seconds=seconds,
            checksum=_checksum(output),
            same_neurons=_same_neurons(tensors, base),
            equal_tensors=sum(value == 0 for value in differences) / len(base),
            median_difference=differences[len(differences) // 2],
            worst_difference=differences[-1],
            errors=errors[:4],
            worst_error_ratio=max(new / max(old, 1e-9) for new, old in zip(errors, base_errors, strict=True)),
        )

    run("float32", job.device, "float32")
    run("float32 again", job.device, "float32")
    run("float32, torch's kernels", job.device, "float32", "torch")
    if job.cuda and importlib.util.find_spec("triton"):
        run("float32, Triton's kernels", "cuda", "float32", "triton")
        run("bfloat16, Triton's kernels", "cuda", "bfloat16", "triton")
    run("bfloat16", job.device, "bfloat16")
    run("bfloat16 again", job.device, "bfloat16")
    run("cpu float32", "cpu", "float32")
    run("float32 from a sketch", job.device, "float32", sketch="count")
    run("float32 from a sketch again", job.device, "float32", sketch="count")
    run("float32 from a sketch, torch's kernels", job.device, "float32", "torch", sketch="count")
    os.environ.pop("ONESHOT_KERNELS", None)


def _agreed_model(job: Job) -> tuple[Path, str]:
    """Return the folder of the model that `agree` and `ranks` compress, and its calibration text."""
    from gpu_bundle import data_folder, first_layers, real_model

    if job.tiny or not real_model(job.bundle, job.scratch):
        folder, _ = random_model(job, "tiny")
        return folder, str(folder / "text.txt")
    folder = job.scratch / "first layers"
    if not folder.exists():
        first_layers(real_model(job.bundle, job.scratch), folder, AGREED_LAYERS)
    return folder, str(data_folder(job.bundle) / "general.jsonl")


def _checksum(folder: Path) -> str:
    content = b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))
    return hashlib.sha256(content).hexdigest()[:16]


def _same_neurons(tensors: dict[str, Any], base: dict[str, Any]) -> float:
    """Return the share of the base's kept neurons that the other result has also kept, wherever they are."""
    gates = [name for name in base if name.endswith("gate_proj.weight")]
    rows = [({row.tobytes() for row in _bytes(one[name])} for one in (tensors, base)) for name in gates]
    shares = [len(ours & theirs) / len(theirs) for ours, theirs in rows]
    return sum(shares) / len(shares)


def _bytes(matrix: Any) -> Any:
    import torch

    return matrix.contiguous().view(torch.uint8).numpy()


def ranks(job: Job) -> None:
    """Compress in two processes, each with a GPU of its own, and compare the bytes with one process's."""
    import torch

    from oneshot import Config
    from oneshot.pipeline import compress

    if job.cuda and torch.cuda.device_count() < 2:
        job.emit("ranks", skipped="there is one GPU")
        return
    model, text = _agreed_model(job)
    sizes = TINY_TEXT if job.tiny else AGREED_TEXT
    settings = {"calibration": text, "sparsity": SPARSITY, "form": "stock", "device": job.device, **sizes}
    one, two = job.scratch / "by one", job.scratch / "by two"
    started = time.perf_counter()
    compress(Config.of(str(model), str(one), overwrite=True, **settings))
    seconds = [time.perf_counter() - started]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node=2"]
    command = [sys.executable, "-m", "oneshot.compress", str(model), f"--output={two}", "--overwrite", *options]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    started = time.perf_counter()
    subprocess.run([*launcher, *command], check=True, env=os.environ | {"PYTHONPATH": paths})
    seconds.append(time.perf_counter() - started)
    checksums = [_checksum(folder) for folder in (one, two)]
    job.emit("ranks", seconds=seconds, checksums=checksums, same_bytes=checksums[0] == checksums[1])
