"""Hundreds of kills at random moments of small runs: every kind of run continues and ends with the same bytes.

The model is tiny and random. Every run is the real command in a process of its own, forked from one that has imported
the libraries, so that a run takes a second. A signal hits it at a random moment; then the same command with `--resume`
starts again, and is hit again. Each output that is finished is compared, file by file, with an undisturbed run. One row
for every kind of run goes to `results/kills.jsonl`.
"""

import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import ROOT, append_row, parser, provenance

import oneshot.pipeline  # noqa: F401 (loaded before the fork)
from oneshot.cli.main import main as oneshot_command
from oneshot.report.card import REPORT_NAME

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
TELLING = {REPORT_NAME, "report.html", "README.md"}  # they state time and memory, which differ between runs
PATIENCE_SECONDS = 120
KINDS: dict[str, list[str]] = {
    "stock": ["--sparsity", "0.1", "--form", "stock"],
    "per-layer": ["--sparsity", "0.1", "--form", "per-layer"],
    "per-layer, small files": ["--sparsity", "0.1", "--form", "per-layer", "--max-shard-size", "40KB"],
    "up steps, heads": ["--sparsity", "0.15", "--form", "stock", "--up-steps", "2", "--set", "heads=id"],
    "hidden size": ["--recipe", "tcsp", "--sparsity", "0.1"],
    "hidden size by groups": ["--recipe", "group-pca", "--sparsity", "0.1", "--set", "group_size=2"],
    "text of its own": ["--sparsity", "0.1", "--form", "stock", "--calibration", "builtin+self"],
    "several sizes": ["--sparsity", "0.05", "0.1", "--form", "per-layer"],
}


def make_model(folder: Path) -> Path:
    """Save a random Llama of six layers with a tokenizer."""
    sys.path.insert(0, str(ROOT / "tests"))
    from factories import build_model, tiny_tokenizer

    tiny_tokenizer().save_pretrained(folder)
    build_model("llama", tied=True, width=128, layers=6).save_pretrained(folder)
    return folder


def start(arguments: list[str]) -> int:
    """Fork a process that runs the command, and return its number."""
    process = os.fork()
    if process:
        return process
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    code = 99
    try:
        torch.set_num_threads(1)
        code = oneshot_command(["compress", *arguments])
    finally:
        os._exit(code)


def wait(process: int, seconds: float) -> int | None:
    """Return the exit status of a process; None if it runs longer."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def finish(arguments: list[str]) -> float:
    """Run a command to its end and return its seconds."""
    started = time.monotonic()
    code = wait(start(arguments), PATIENCE_SECONDS)
    if code != 0:
        raise SystemExit(f"{' '.join(arguments)} ended with {code}")
    return time.monotonic() - started


def checksums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of an output that does not state time or memory."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in TELLING
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=500)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    chance = random.Random(arguments.seed)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make_model(folder / "model")
        shared = ["--num-sequences", "16", "--sequence-length", "64", "--batch-size", "4", "--device", "cpu"]
        shared += ["--dtype", "float32", "--quiet", "--offload-dir", scratch]
        for number, (kind, settings) in enumerate(KINDS.items()):
            command = [str(model), "--calibration", "builtin", *shared, *settings]
            seconds = finish([*command, "--output", str(folder / "undisturbed")])
            expected = checksums(folder / "undisturbed")
            injected = finished = good = 0
            share = arguments.kills // len(KINDS) + (number < arguments.kills % len(KINDS))
            output = folder / "output-0"
            pending = True  # the present output is not finished
            while injected < share or pending:
                process = start([*command, "--output", str(output), "--resume"])
                hits = injected < share
                code = wait(process, chance.uniform(0, 1.1 * seconds) if hits else PATIENCE_SECONDS)
                if code is None and hits:
                    os.kill(process, chance.choice(SIGNALS))
                    injected, pending = injected + 1, True
                    if wait(process, PATIENCE_SECONDS) is None:
                        raise SystemExit(f"{kind}: a run did not end after a signal")
                    continue
                if code != 0:
                    raise SystemExit(f"{kind}: a run ended with {code}")
                finished, good, pending = finished + 1, good + (checksums(output) == expected), False
                output = folder / f"output-{finished}"
            row = {"kind": kind, "injected": injected, "outputs": finished, "equal": good}
            row |= {"survived": injected if good == finished else 0, "lost": 0 if good == finished else injected}
            append_row("kills", provenance(model="tiny random Llama", undisturbed_seconds=seconds) | row)
            for path in folder.iterdir():
                if path != model:
                    shutil.rmtree(path)


if __name__ == "__main__":
    main()
