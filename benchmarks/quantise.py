"""The cost of quantising the dense model and compressed models, by the tools that people use.

`quantise_with.py` does the work in the environment of these tools (`make clients`). A row for every form and method
goes to `quantise.jsonl`. `--work` keeps the compressed models, and a later call takes those that are there.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import (
    ROOT,
    add_text_options,
    append_row,
    calibration_record,
    parser,
    provenance,
    read_report,
    smollm2_gguf,
)
from judging import kind_text

from oneshot import Config
from oneshot.checkpoint import locate_checkpoint
from oneshot.pipeline import compress
from oneshot.report.card import REPORT_NAME

FORMS = ("stock", "nemotron-nas", "per-layer")
BY_TRANSFORMERS = ("none", "bitsandbytes-int8", "bitsandbytes-nf4", "torchao-int8", "torchao-int4")
BY_LLM_COMPRESSOR = ("gptq", "awq", "gptq-w8a8", "smoothquant", "fp8")
WORKER = ROOT / "benchmarks" / "quantise_with.py"


def compressed(form: str, dense: Path, work: Path, arguments: Any) -> Path:
    """Return the folder of a compressed model, made unless it is there."""
    folder = work / form
    if not folder.exists():
        config = Config.of(
            checkpoint=str(dense),
            output=str(folder),
            form=form,
            sparsity=arguments.sparsity,
            calibration=arguments.calibration,
            num_sequences=arguments.num_sequences,
            sequence_length=arguments.sequence_length,
        )
        compress(config)
    return folder


def of_report(folder: Path) -> dict[str, Any]:
    """Return what a row says of a compressed model, from its report; of the dense model, that it is dense."""
    if not (folder / REPORT_NAME).exists():
        return {"form": "dense"}
    report = read_report(folder)
    config = report["config"]
    return {"form": config["form"], "sparsity": config["target"]["sparsity"]} | calibration_record(report)


def measure(folder: Path, method: str, scratch: Path, arguments: Any) -> dict[str, Any]:
    """Return the measurement of `quantise_with.py`. Raises `SystemExit` with its last words if it fails."""
    output = scratch / f"{folder.name}-{method}"
    texts = ["--calibration", arguments.data_dir / "wikitext2_valid.txt", "--judged-on", scratch / "wikitext2.txt"]
    command = [arguments.python, WORKER, method, folder, output, *texts, "--windows", arguments.max_windows]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        env=environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(arguments.threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{method} of {folder} failed: {done.stderr[-2000:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main() -> None:
    options = parser(__doc__)
    add_text_options(options, num_sequences=128)
    options.add_argument("--python", type=Path, default=ROOT / ".clients" / "llm-compressor" / "bin" / "python")
    options.add_argument("--work", type=Path, required=True, help="folder that keeps the compressed models")
    options.add_argument("--calibration", default="builtin")
    options.add_argument("--sequence-length", type=int, default=256)
    options.add_argument("--sparsity", type=float, default=0.2)
    options.add_argument("--max-windows", type=int, default=8)
    options.add_argument("--forms", nargs="*", default=["dense", *FORMS])
    options.add_argument("--methods", nargs="*", default=[*BY_TRANSFORMERS, *BY_LLM_COMPRESSOR])
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        (scratch / "wikitext2.txt").write_text(kind_text("wikitext2", arguments.data_dir))
        dense = locate_checkpoint(str(smollm2_gguf()), scratch)
        for form in arguments.forms:
            folder = dense if form == "dense" else compressed(form, dense, arguments.work, arguments)
            for method in arguments.methods:
                measured = measure(folder, method, scratch, arguments)
                row = provenance(model="SmolLM2-135M-Instruct", method=method, windows=arguments.max_windows)
                tools = measured.pop("versions")
                append_row("quantise", row | of_report(folder) | measured | {"tools": tools})


if __name__ == "__main__":
    main()
