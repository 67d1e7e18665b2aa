"""File size, speed and loss of quantised files in llama.cpp, for the dense model and for compressed models.

`pareto.py quality` writes the missing files of every model into `--folder` and adds one row for each file to
`pareto.jsonl`. `pareto.py speed` measures these files with llama-bench and adds one row for each to
`pareto_speed.jsonl`; call it several times on a quiet machine, the tables have the medians. A file with a row of
`quality` is not judged again, so an interrupted call continues. Needs a source tree of
llama.cpp with its programs in `build/bin`, and what its converter imports (`pip install sentencepiece`).
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import (
    Row,
    add_text_options,
    append_row,
    calibration_files,
    calibration_record,
    parser,
    provenance,
    read_report,
    read_rows,
    smollm2_gguf,
)
from judging import KINDS, kind_text

from oneshot import Config
from oneshot.checkpoint import locate_checkpoint
from oneshot.pipeline import compress_sizes, profile

TYPES = ("F16", "Q8_0", "Q6_K", "Q4_K_M", "Q3_K_M", "Q2_K", "Q4_0-pure")
CONTEXT = 1024  # tokens of a window; llama-perplexity scores its second half
SERIES = {"stock": ("stock", 64), "gguf": ("gguf", 64), "gguf, widths × 256": ("gguf", 256)}
PREFILL, DECODE = 512, 64  # tokens that llama-bench reads and writes


@dataclass(frozen=True)
class Variant:
    """The dense model, or a compressed one of a series."""

    series: str
    asked: float

    @property
    def name(self) -> str:
        """Return a name for folders and files."""
        if self.series == "dense":
            return "dense"
        form, round_to = SERIES[self.series]
        return f"{form}-{round_to}/sparsity-{self.asked:.2f}"

    @property
    def record(self) -> Row:
        """Return what a row says of the model."""
        return {"series": self.series, "asked": self.asked}


DENSE = Variant("dense", 0.0)


class Files:
    """The GGUF files of all models in one folder, made when they are first asked for."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.folder: Path = arguments.folder
        self.folder.mkdir(parents=True, exist_ok=True)

    def program(self, name: str) -> Path:
        """Return the path of a program of llama.cpp."""
        path: Path = self.arguments.llama_cpp / "build" / "bin" / name
        return path

    def dense(self) -> Path:
        """Return the checkpoint of the dense model."""
        return locate_checkpoint(str(smollm2_gguf()), self.folder / "dense")

    def compress(self, series: str, sizes: list[float]) -> None:
        """Compress to the sizes of a series that have no folder yet. The sizes share the text and one profile."""
        missing = [size for size in sizes if not (self.folder / Variant(series, size).name).exists()]
        if not missing:
            return
        form, round_to = SERIES[series]
        own_sizes = {"save_dtype": "float16", "profile": str(self._profile())} if form == "gguf" else {}
        output = self.folder / f"{form}-{round_to}"
        compress_sizes(self._config(output, form, missing[0], round_to=round_to, **own_sizes), missing)

    def _config(self, output: Path, form: str, sparsity: float, **more: Any) -> Config:
        return Config.of(
            checkpoint=str(self.dense()),
            output=str(output),
            sparsity=sparsity,
            form=form,
            calibration=calibration_files("general.jsonl", self.arguments.data_dir),
            num_sequences=self.arguments.num_sequences,
            **more,
        )

    def _profile(self) -> Path:
        path = self.folder / "profile"
        if not path.exists():
            profile(self._config(path, "gguf", 0.1))
        return path

    def path(self, variant: Variant, kind: str) -> Path:
        """Return the place of a file."""
        return self.folder / "files" / f"{variant.name.replace('/', '-')}-{kind}.gguf"

    def make(self, variant: Variant, kind: str) -> int:
        """Write a file, and return the number of tensors that llama-quantize gave another type than asked."""
        path = self.path(variant, kind)
        path.parent.mkdir(exist_ok=True)
        if kind == "F16":
            self._make_plain(variant, path)
            return 0
        plain = self.path(variant, "F16")
        if not plain.exists():
            self._make_plain(variant, plain)
        name, _, pure = kind.partition("-")  # without "pure", llama-quantize gives some tensors a larger type
        flags = ["--pure"] if pure else []
        printed = run([self.program("llama-quantize"), *flags, plain, path, name, self.arguments.threads])
        fallbacks = re.search(r"WARNING: (\d+) of \d+ tensor\(s\) required fallback", printed)
        return 0 if fallbacks is None else int(fallbacks[1])

    def _make_plain(self, variant: Variant, path: Path) -> None:
        model = self.dense() if variant == DENSE else self.folder / variant.name
        written = model / "model.gguf"
        if written.exists():
            path.unlink(missing_ok=True)
            path.hardlink_to(written)
        else:
            converter = self.arguments.llama_cpp / "convert_hf_to_gguf.py"
            run([sys.executable, converter, model, "--outtype", "f16", "--outfile", path])

    def calibration(self, variant: Variant) -> Row:
        """Return what a row says of the text that a model was calibrated on."""
        if variant == DENSE:
            return {}
        report = read_report(self.folder / variant.name)
        return calibration_record(report) | {"seed": report["config"]["seed"]}


def run(command: list[Any]) -> str:
    """Return what a program prints. Raises `SystemExit` with its last words if it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout + done.stderr


def tensors(path: Path) -> Row:
    """Return the parameters of a file, and the bytes of its tensors by their type."""
    import gguf

    found = gguf.GGUFReader(path).tensors
    sizes: dict[str, int] = {}
    for tensor in found:
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_bytes)
    return {
        "stored_parameters": sum(int(tensor.n_elements) for tensor in found),
        "tensors": len(found),
        "tensor_bytes": sizes,
    }


def write_texts(arguments: argparse.Namespace) -> dict[str, Path]:
    """Write the beginnings of the five texts, more than the windows take; tokenising all of them takes long."""
    texts = {}
    for kind in KINDS:
        texts[kind] = arguments.folder / f"{kind}.txt"
        texts[kind].write_text(kind_text(kind, arguments.data_dir)[: 8 * CONTEXT * arguments.windows])
    return texts


def perplexity(files: Files, path: Path, text: Path) -> float:
    """Return llama-perplexity's estimate: windows that see nothing of each other, their second halves count."""
    size = ["-c", CONTEXT, "-b", CONTEXT, "--chunks", files.arguments.windows, "-t", files.arguments.threads]
    printed = run([files.program("llama-perplexity"), "-m", path, "-f", text, *size])
    estimate = re.search(r"Final estimate: PPL = ([\d.]+)", printed)
    if estimate is None:
        raise SystemExit(f"llama-perplexity printed no estimate: {printed[-2000:]}")
    return float(estimate[1])


def judge(files: Files, variants: list[Variant]) -> None:
    """Add the row of every file that has none with the same number of windows."""
    texts = write_texts(files.arguments)
    version = run([files.program("llama-perplexity"), "--version"]).splitlines()[0]
    setting = {
        "windows": files.arguments.windows,
        "context": CONTEXT,
        "texts": {kind: hashlib.sha256(path.read_bytes()).hexdigest() for kind, path in texts.items()},
    }
    known = [{name: row.get(name) for name in ("series", "asked", "type", *setting)} for row in read_rows("pareto")]
    for variant in variants:
        for kind in files.arguments.types:
            record = variant.record | {"type": kind}
            path = files.path(variant, kind)
            if record | setting in known and path.exists():
                continue
            fallbacks = files.make(variant, kind)
            row = provenance(model="SmolLM2-135M-Instruct", llama_cpp=version) | record | setting
            row |= files.calibration(variant) | {"file_bytes": path.stat().st_size, "fallbacks": fallbacks}
            row |= tensors(path) | {"perplexity": {name: perplexity(files, path, text) for name, text in texts.items()}}
            append_row("pareto", row)


def speed(files: Files, path: Path) -> dict[str, float]:
    """Return tokens per second of prefill and decoding, one measurement after llama-bench's own warm-up."""
    size = ["-p", PREFILL, "-n", DECODE, "-r", 1, "-t", files.arguments.threads, "-o", "jsonl"]
    command = [str(part) for part in (files.program("llama-bench"), "-m", path, *size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {"prefill" if test["n_prompt"] else "decode": test["avg_ts"] for test in found}


def measure_speeds(files: Files, variants: list[Variant]) -> None:
    """Measure every file once, with the dense F16 file before the files of every model."""
    for variant in variants:
        for kind in files.arguments.types:
            if not files.path(variant, kind).exists():
                files.make(variant, kind)
    version = run([files.program("llama-perplexity"), "--version"]).splitlines()[0]
    for variant in variants:
        dense = speed(files, files.path(DENSE, "F16"))
        for kind in files.arguments.types:
            row = provenance(model="SmolLM2-135M-Instruct", llama_cpp=version) | variant.record | {"type": kind}
            row |= {"prefill_tokens": PREFILL, "decode_tokens": DECODE, "dense": dense}
            append_row("pareto_speed", row | speed(files, files.path(variant, kind)))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("measure", choices=("quality", "speed"))
    add_text_options(options, num_sequences=32)
    options.add_argument("--folder", type=Path, required=True, help="of all files; kept")
    options.add_argument("--llama-cpp", type=Path, required=True, help="source tree with build/bin")
    options.add_argument("--series", nargs="*", choices=tuple(SERIES), default=["stock", "gguf"])
    options.add_argument("--sparsity", type=float, nargs="+", default=[0.1, 0.2, 0.3])
    options.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    options.add_argument("--windows", type=int, default=2, help=f"windows of {CONTEXT} tokens of every text")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    files = Files(arguments)
    for series in arguments.series:
        files.compress(series, arguments.sparsity)
    variants = [DENSE, *(Variant(series, size) for series in arguments.series for size in arguments.sparsity)]
    if arguments.measure == "quality":
        judge(files, variants)
    else:
        measure_speeds(files, variants)


if __name__ == "__main__":
    main()
