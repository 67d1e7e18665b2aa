"""What a run tells: the progress bar, the table on the terminal, and the files beside the weights."""

import json
import logging
import platform
import re
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from oneshot.errors import printable
from oneshot.records import Footprint, LayerReport, Profile, Report

REPORT_NAME = "oneshot_report.json"
PROCESS_STATUS = Path("/proc/self/status")
PACKAGES = ("oneshot", "torch", "transformers", "safetensors", "datasets", "scipy", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that shape a result."""
    return {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}


def peak_bytes() -> int:
    """Peak resident memory of this process.

    On Linux `VmHWM`: `ru_maxrss` begins with the peak of the process that started this one. Elsewhere `ru_maxrss`.
    """
    if PROCESS_STATUS.exists():
        return int(PROCESS_STATUS.read_text().split("VmHWM:")[1].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_device_bytes() -> int:
    """Peak memory that torch took on the current CUDA device; 0 without one."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


class ProgressBar:
    """Layer, error, tokens per second, time left and peak memory, on stderr. A context manager."""

    def __init__(self, *, num_layers: int, num_tokens: int, visible: bool, description: str | None = None) -> None:
        self._num_layers = num_layers
        self._bar = tqdm(
            total=num_layers * num_tokens,
            unit="tok",
            unit_scale=True,
            disable=not visible,
            desc=description or f"layer 1/{num_layers}",
            smoothing=0.1,
        )

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, num_tokens: int | float) -> None:
        """Count tokens that went through part of a layer."""
        self._bar.update(num_tokens)

    def layer_done(self, layer: LayerReport) -> None:
        """Show the layer's worst error and move on to the next."""
        found = [block.predicted_error or block.measured_error for block in layer.blocks]
        errors = [error for error in found if error is not None]
        shown = f"{max(errors):.3f}" if errors else "–"
        self._bar.set_description(f"layer {min(layer.layer + 2, self._num_layers)}/{self._num_layers}")
        self._bar.set_postfix_str(f"error {shown}, peak {layer.peak_bytes / 2**30:.2f} GiB")


class WarningLog(logging.Handler):
    """Collects what this package warns of, for the report. A context manager."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message of a warning."""
        self._messages.append(record.getMessage())

    def take(self) -> tuple[str, ...]:
        """The messages since the last call."""
        taken, self._messages = tuple(self._messages), []
        return taken

    def __enter__(self) -> "WarningLog":
        logging.getLogger("oneshot").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("oneshot").removeHandler(self)


class Stopwatch:
    """Seconds spent in named stages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Book the time since the last lap under `stage`."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def total(self) -> dict[str, float]:
        """All stages and their `total`."""
        return self.seconds | {"total": time.perf_counter() - self._start}


def write_report(report: Report, folder: Path) -> None:
    """Write `oneshot_report.json`, `report.html` and the model card `README.md`."""
    from oneshot.report_page import report_page  # matplotlib: only a finished run draws

    (folder / REPORT_NAME).write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    (folder / "report.html").write_text(report_page(report), encoding="utf-8", errors="backslashreplace")
    (folder / "README.md").write_text(model_card(report), encoding="utf-8")


def print_report(report: Report) -> None:
    """Two tables on stdout: sizes before and after, and the layers."""
    console = Console()
    names = printable(f"{report.config['checkpoint']} → {report.config['output']}")
    sizes = Table("", "dense", "compressed", "change", title=Text(names))  # as it is: brackets are no markup
    for name, values in _size_rows(report):
        dense, compressed = values["dense"], values["compressed"]
        change = f"{compressed / dense - 1:+.1%}" if dense else "–"
        sizes.add_row(name, f"{dense:,}", f"{compressed:,}", change)
    console.print(sizes)
    layers = Table("layer", "block", "size", "predicted error", "measured error", "condition", "max|T|", "seconds")
    for layer in report.layers:
        for block in layer.blocks:
            layers.add_row(
                str(layer.layer),
                block.kind,
                f"{block.dense_size} → {block.kept_size}",
                _show(block.predicted_error, ".4f"),
                _show(block.measured_error, ".4f"),
                _show(block.condition_number, ".1e"),
                _show(block.max_interpolation, ".2f"),
                f"{layer.seconds:.1f}",
            )
    console.print(layers)
    if report.plan["embedding"]:
        ranks = ", ".join(str(table["rank"]) for table in report.plan["embedding"])
        console.print(f"embedding: ranks {ranks} of {report.dense_shape['hidden_size']} by ranges of the vocabulary")
    if report.predicted_divergence is not None:
        shown = ", ".join(f"{name} {value:.3f}" for name, value in report.predicted_divergence.items())
        console.print(f"predicted KL divergence of the output, nats per token: {shown}")
    asked, reached = report.sparsity["asked"], report.sparsity["reached"]
    console.print(
        f"sparsity asked {_show(asked, '.4f')}, reached {_show(reached, '.4f')} of the stored parameters; "
        f"{report.seconds['total']:.1f} s, peak memory {report.peak_bytes / 2**30:.2f} GiB"
        + (f" (predicted {report.footprint.host_bytes / 2**30:.2f})" if report.footprint else "")
    )


def print_footprint(footprint: Footprint) -> None:
    """A table on stdout: what a run would take."""
    table = Table("", "predicted", "", title="dry run: nothing is read but headers, nothing is written")
    table.add_row("peak host memory", gibibytes(footprint.host_bytes), footprint.host_stage)
    if footprint.device_bytes:
        table.add_row("peak device memory", gibibytes(footprint.device_bytes), footprint.device_stage)
    table.add_row("activations", footprint.tier, "device, host or disk")
    table.add_row("result on disk", gibibytes(footprint.result_bytes), "")
    table.add_row("scratch files", gibibytes(footprint.scratch_bytes), "in --offload-dir, gone afterwards")
    dense, compressed = footprint.stored_parameters["dense"], footprint.stored_parameters["compressed"]
    table.add_row("stored parameters", f"{compressed:,}", f"of {dense:,}")
    for stage, seconds in footprint.seconds.items():
        table.add_row(
            f"seconds: {stage}", f"{seconds:,.0f}", "may be off by a factor of two" if stage == "total" else ""
        )
    console = Console()
    console.print(table)
    if not footprint.exact:
        console.print("The sizes of each layer will come from a profile; this is for layers that are all alike.")


def gibibytes(size: float) -> str:
    """Bytes as people read them."""
    return f"{size / 2**30:.2f} GiB"


def print_profile(profile: Profile) -> None:
    """A table on stdout: what each layer would lose, and what that would do to the model's output."""
    width = profile.ffn_errors.shape[1] - 1
    table = Table(
        "layer",
        "FFN error, ¾ kept",
        "½ kept",
        "FFN sensitivity",
        "head sensitivity",
        "KL without the layer",
        "block influence",
        title="sensitivity: KL divergence of the output, in nats per token, per relative squared error of the block",
    )
    for layer, errors in enumerate(profile.ffn_errors):
        table.add_row(
            str(layer),
            *(f"{float(errors[round(share * width)]) ** 0.5:.4f}" for share in (3 / 4, 1 / 2)),
            *(
                f"{float(values[layer]):.4f}"
                for values in (
                    profile.ffn_sensitivity,
                    profile.head_sensitivity,
                    profile.layer_divergence,
                    profile.block_influence,
                )
            ),
        )
    Console().print(table)


def model_card(report: Report) -> str:
    """The README.md of the compressed checkpoint."""
    rows = "\n".join(
        f"| {name} | {values['dense']:,} | {values['compressed']:,} |" for name, values in _size_rows(report)
    )
    calibration = report.calibration
    text = (
        f"{calibration['num_tokens']:,} tokens of {_code(calibration['source'])} "
        f"(SHA-256 `{calibration['token_hash']}`)"
        if calibration
        else "none: this recipe reads weights only"
    )
    form, loading = {
        "stock": ("A stock checkpoint", "It loads like the original: `AutoModelForCausalLM.from_pretrained(...)`."),
        "per-layer": (
            "A checkpoint whose layers have sizes of their own",
            "It loads with `AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)`, which runs the "
            "modelling file in this folder.",
        ),
    }[report.plan["tier"]]
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [oneshot, compressed, structured-pruning]
---
# Compressed from {_escaped(Path(str(report.config["checkpoint"])).name)}

{form}, made smaller in one shot, without training, by `oneshot` {report.versions["oneshot"]}. {loading}
Its licence and terms of use apply.

| | dense | compressed |
|---|---|---|
{rows}

- Recipe: `{report.config["recipe"]}` (FFN `{report.recipe["ffn"]}`, heads `{report.recipe["heads"]}`, hidden size
  `{report.recipe["hidden"]}`, correction `{report.recipe["correction"]}`), seed {report.config["seed"]}.
- Calibration text: {text}.

A compressed model answers worse than the original, most so on text unlike the calibration's. Measure it on
your own task before use. All settings and the error of every layer are in `oneshot_report.json`.
"""


def _escaped(text: str) -> str:
    """Markdown that shows the text, on one line."""
    return re.sub(r"([\\`*\[\]<>&|])", r"\\\1", printable(text))


def _code(text: str) -> str:
    """A Markdown code span of the text, inside more backticks than the text has in a row."""
    text = printable(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"


def _size_rows(report: Report) -> list[tuple[str, dict[str, int]]]:
    return [
        ("stored parameters", report.stored_parameters),
        ("parameters in the decoder layers", report.block_parameters),
        ("FLOPs per token (linears)", report.flops_per_token),
        ("KV cache bytes per token (16 bit)", report.kv_bytes_per_token),
    ]


def _show(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)
