"""The commands of docs/quick-start.md on SmolLM2-135M-Instruct -> a row of `first_run.jsonl`."""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, append_row, parser, provenance, read_report, smollm2_gguf

from oneshot.api.check import weight_bytes

LITTLE = {"calibration": "builtin", "num_sequences": 24, "sequence_length": 256}
SIZE = {"sparsity": 0.2, "form": "per-layer"}
QUESTION = "What is the capital of France?"
MEASURED = ["--sequence-length", "512", "--max-windows", "8"]


def main() -> int:
    parser(__doc__).parse_args()
    model = str(smollm2_gguf())
    with tempfile.TemporaryDirectory(prefix="oneshot-") as scratch:
        os.chdir(scratch)
        smaller, numbers = Path("smaller"), Path("numbers.json")
        options = [
            word for name, value in (SIZE | LITTLE).items() for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        pair = [str(smaller), "--baseline", model]
        run = ["compress", model, "--output", str(smaller), *options]
        dry, compression = command(*run, "--dry-run"), command(*run)
        chat = command("chat", *pair, "--prompt", QUESTION)
        text = str(ROOT / "README.md")
        evaluation = command("evaluate", *pair, "--text", text, *MEASURED, "--output", str(numbers))
        report, row = (
            read_report(smaller),
            provenance(model="SmolLM2-135M-Instruct", input=Path(model).name, **SIZE, **LITTLE),
        )
        small, dense = json.loads(numbers.read_text())["evaluations"]
        append_row(
            "first_run",
            row
            | {
                "stored_parameters": report["stored_parameters"],
                "check": report["check"],
                "file_bytes": {"dense": weight_bytes(model), "compressed": weight_bytes(smaller)},
                "peak_bytes": report["peak_bytes"],
                "report_seconds": report["seconds"]["total"],
                "dry_run": dry["seconds"],
                "compression": compression["seconds"],
                "chat": chat["seconds"],
                "evaluation": evaluation["seconds"],
                "printed": compression["printed"],
                "question": QUESTION,
                "answers": chat["printed"].strip().splitlines(),
                "measured": {"compressed": small, "dense": dense},
                "load": os.getloadavg(),
            },
        )
    return 0


def command(*arguments: str) -> dict[str, object]:
    """Run a command of ours -> what it printed, and its seconds of CPU and by the clock."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    print("$ oneshot", *arguments, flush=True)
    done = subprocess.run([sys.executable, "-m", "oneshot", *arguments], stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, flush=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"printed": done.stdout, "seconds": {"cpu": cpu, "clock": time.perf_counter() - started}}


if __name__ == "__main__":
    sys.exit(main())
