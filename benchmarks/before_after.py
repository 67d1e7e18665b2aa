"""What a change costs: the same compression of SmolLM2-135M by two checkouts, in turns; CPU seconds and peak memory.

    python benchmarks/before_after.py --before DIR

A row goes to `results/before_after.jsonl`. CPU seconds, because other work on the machine does not change them much.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from harness import ROOT, append_row, parser, provenance, smollm2_gguf

from oneshot.checkpoint import locate_checkpoint


def run(tree: Path, checkpoint: Path, output: Path, arguments: list[str]) -> tuple[float, int]:
    """Return the CPU seconds and the peak bytes of a compression by the packages of a checkout."""
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'kernels'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "oneshot.compress", str(checkpoint), f"--output={output}", "--overwrite"]
    process = subprocess.Popen([*command, *arguments], env=environment, cwd=tree)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{tree}: the compression failed")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--before", type=Path, required=True)
    options.add_argument("--turns", type=int, default=2)
    options.add_argument("--num-sequences", type=int, default=16)
    options.add_argument("--sequence-length", type=int, default=256)
    arguments = options.parse_args()
    more = ["--sparsity=0.2", "--calibration=builtin", "--device=cpu", "--dtype=float32", "--quiet"]
    more += [f"--num-sequences={arguments.num_sequences}", f"--sequence-length={arguments.sequence_length}"]
    trees = {"before": arguments.before.resolve(), "after": ROOT}
    commit = subprocess.run(
        ["git", "-C", trees["before"], "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = locate_checkpoint(str(smollm2_gguf()), Path(scratch))
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in trees}
        for _ in range(arguments.turns):
            for name, tree in trees.items():
                found[name].append(run(tree, checkpoint, Path(scratch) / name, more))
    ratios = [after / before for (before, _), (after, _) in zip(*found.values(), strict=True)]
    append_row(
        "before_after",
        provenance(
            before=commit.stdout.strip(),
            num_tokens=arguments.num_sequences * arguments.sequence_length,
            cpu_seconds={name: [seconds for seconds, _ in runs] for name, runs in found.items()},
            peak_bytes={name: max(peak for _, peak in runs) for name, runs in found.items()},
            ratio=median(ratios),
        ),
    )


if __name__ == "__main__":
    main()
