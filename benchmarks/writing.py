"""Seconds, bytes and disk space of writing a result, by two checkouts in turns, on layers of a 7B model.

    python benchmarks/writing.py --before DIR

A random model of Llama's 7B shape with few layers is compressed by weights alone, so that little but reading and
writing is left. Bytes are what `/proc/self/io` says that the process read and wrote; mapped files do not count there.
`layers` includes the journal, and `write` is the end of the run. Rows go to `results/writing.jsonl`, one for each
checkout and turn, with whether the checkouts wrote equal files.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, append_row, parser, provenance
from memory import write_random_checkpoint
from transformers import LlamaConfig

SAMPLE_SECONDS = 0.05
BLOCK_BYTES = 512  # of st_blocks
DRIVER = """
import json, sys
import torch
import oneshot.pipeline as pipeline
from oneshot import Config

def moved():
    lines = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
    return {"read": int(lines["rchar"]), "written": int(lines["wchar"])}

class Stopwatch(pipeline.Stopwatch):
    def __init__(self):
        super().__init__()
        self.last, found["bytes"] = moved(), {}

    def lap(self, stage):
        super().lap(stage)
        now = moved()
        found["bytes"][stage] = {kind: now[kind] - self.last[kind] for kind in now}
        self.last = now

found = {}
pipeline.Stopwatch = Stopwatch
torch.set_num_threads(int(sys.argv[2]))
report = pipeline.compress(Config.of(**json.loads(sys.argv[1])))
print(json.dumps(found | {"seconds": report.seconds}))
"""


def used_bytes(folders: list[Path]) -> int:
    """Return the bytes of the disk that folders take now; files may vanish meanwhile."""
    total = 0
    for path in (path for folder in folders for path in folder.rglob("*")):
        try:
            total += path.stat().st_blocks * BLOCK_BYTES
        except FileNotFoundError:
            continue
    return total


def run(tree: Path, config: dict[str, Any], threads: int) -> dict[str, Any]:
    """Compress with the packages of a checkout; return stages, bytes and the peak of the disk."""
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'kernels'}", "OMP_NUM_THREADS": str(threads)}
    output = Path(config["output"])
    folders, peak, done = [output, output.with_name(f"{output.name}.incomplete")], 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(SAMPLE_SECONDS):
            peak = max(peak, used_bytes(folders))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        command = [sys.executable, "-c", DRIVER, json.dumps(config), str(threads)]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=tree)
    finally:
        done.set()
        watching.join()
    return dict(json.loads(printed.stdout.splitlines()[-1])) | {"disk_peak_bytes": peak}


def weights_hash(folder: Path) -> str:
    """Return the SHA-256 of the weight files and their index."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors*")):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--before", type=Path, required=True)
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--scratch", type=Path, help="folder for the checkpoints (default: the system's)")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    shape = LlamaConfig(
        vocab_size=49152,  # the demo model's tokenizer
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=arguments.layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    trees = {"before": arguments.before.resolve(), "after": ROOT}
    command = ["git", "-C", str(trees["before"]), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as name:
        scratch, hashes = Path(name), dict[str, str]()
        write_random_checkpoint(scratch / "dense", shape)
        config: dict[str, Any] = {"checkpoint": str(scratch / "dense"), "sparsity": 0.2, "overwrite": True}
        config |= {"ffn": "magnitude", "correction": "none", "max_file_bytes": 10**9, "device": "cpu"}
        for turn in range(arguments.turns):
            for tree, folder in trees.items():
                shutil.rmtree(scratch / tree, ignore_errors=True)  # it would count in the peak of the disk
                os.sync()  # what the run before it left
                started = time.perf_counter()
                found = run(folder, config | {"output": str(scratch / tree)}, arguments.threads)
                hashes[tree] = weights_hash(scratch / tree)
                row: dict[str, Any] = {"model": "Llama-2-7B's layers", "layers": arguments.layers, "tree": tree}
                row |= {"before": commit, "turn": turn, "whole_seconds": time.perf_counter() - started}
                row |= {"result_bytes": sum(path.stat().st_size for path in (scratch / tree).glob("*.safetensors"))}
                row |= {"equal": len(set(hashes.values())) == 1}
                append_row("writing", provenance(**row, **found))


if __name__ == "__main__":
    main()
