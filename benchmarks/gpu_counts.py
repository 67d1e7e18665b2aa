"""Count what a GPU would do for a model of one layer, on the pretended device of tests/device; nothing is timed.

Kernels, waits of the host, numbers that the host converts, and device bytes at the peak over the prediction, by stage.
Rows go to `results/gpu_counts.jsonl`. `--tree DIR` counts another checkout, for a comparison.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEVICE = ROOT / "tests" / "device"
# width of the FFN -> sparsity; few of 11,008 neurons stay, because the host does the device's work
SPARSITIES = {1536: 0.2, 11008: 0.85}
SIZES = {"hidden": 64, "heads": 4, "groups": 4, "layers": 1, "vocabulary": 400}
TEXT = {"num_sequences": 16, "sequence_length": 128, "batch_size": 4}  # more tokens than neurons stay
SLACK_BYTES = 2**20  # instead of 384 MiB for the workspaces of libraries, which the pretended device has not
# The stage of a line of the project, by the longest beginning of its path; also of older commits.
STAGES = {
    "kernels/oneshot_kernels/gram": "sums",
    "kernels/oneshot_kernels/count_sketch": "sums",
    "kernels/oneshot_kernels/pivoted_qr": "pivots",
    "oneshot/compression/statistics.py": "sums",
    "oneshot/linalg/sums.py": "sums",
    "oneshot/compression/selection.py": "pivots",
    "oneshot/selection": "pivots",
    "oneshot/linalg/pivoted_qr.py": "pivots",
    "oneshot/compression/correction.py": "correction",
    "oneshot/compression/measuring.py": "correction",
    "oneshot/compression/solving.py": "correction",
    "oneshot/compression/sublayer.py": "correction",
    "oneshot/linalg": "correction",
    "oneshot/stream": "forward",
    "oneshot/machine/transfer.py": "upload",
    "oneshot/statistics.py": "sums",
    "oneshot/selection.py": "pivots",
    "oneshot/factorise.py": "correction",
    "oneshot/stream.py": "forward",
    "oneshot/activations.py": "forward",
}


def count(tree: Path, folder: Path, width: int) -> dict[str, Any]:
    """Return the counts of one compression with the packages of `tree`; it patches torch for the whole process."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"HF_DEACTIVATE_ASYNC_LOAD": "1", "ONESHOT_KERNELS": "torch"}
    sys.path[:0] = [str(tree), str(tree / "kernels"), str(DEVICE)]
    import pretend_cuda
    import torch

    import oneshot
    import oneshot.footprint.bounds as bounds

    pretend_cuda.ROOT = str(tree) + os.sep
    pretend_cuda.PACKAGES = tuple(f"{tree}{os.sep}{name}{os.sep}" for name in ("oneshot", "kernels"))
    vars(bounds)["DEVICE_SLACK_BYTES"] = SLACK_BYTES
    torch.set_num_threads(1)
    options: dict[str, Any] = TEXT | {
        "checkpoint": str(folder / "model"),
        "output": str(folder / "out"),
        "calibration": str(folder / "text.txt"),
        "sparsity": SPARSITIES[width],
        "device": "cuda",
    }
    make: Any = oneshot.Config.of if hasattr(oneshot, "Config") else vars(oneshot)["CompressionConfig"]
    with pretend_cuda.pretend() as log:
        report: Any = oneshot.compress(make(**options))
    return {
        "width": width,
        "kept": report.plan["layers"][0]["intermediate_size"],
        "kernels": by_stage(log.kernels),
        "waits": by_stage(log.waits),
        "converted_on_host": sum(log.converted_on_host.values()),
        "peak_bytes": log.peak_bytes,
        "predicted_bytes": report.footprint.device_bytes,
    }


def by_stage(counts: dict[str, int]) -> dict[str, int]:
    """Return counts summed over the lines of each stage; "rest" has what is once a run or belongs to none."""
    total: dict[str, int] = {}
    for site, number in counts.items():
        paths = [path for path in STAGES if site.startswith(path)]
        stage = STAGES[max(paths, key=len)] if paths else "rest"
        total[stage] = total.get(stage, 0) + number
    return total


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tree", type=Path, default=ROOT)
    options.add_argument("--sizes", type=int, nargs="+", choices=SPARSITIES, default=list(SPARSITIES))
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    tree = arguments.tree.resolve()
    if arguments.folder:
        print(json.dumps(count(tree, arguments.folder, *arguments.sizes)))
        return
    sys.path[:0] = [str(ROOT / "tests")]
    import torch
    from factories import build_model, tiny_tokenizer, topics
    from harness import append_row, provenance

    commit = subprocess.run(["git", "-C", tree, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    for width in arguments.sizes:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "text.txt").write_text(topics(0, 30))
            model = build_model(dtype=torch.bfloat16, width=width, **SIZES)
            model.save_pretrained(folder / "model")
            tiny_tokenizer().save_pretrained(folder / "model")
            command = [sys.executable, __file__, f"--tree={tree}", f"--sizes={width}", f"--folder={folder}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(f"{tree} at n = {width}: {done.stderr[-2000:]}")
            append_row(
                "gpu_counts",
                provenance(commit=commit.stdout.strip(), is_before=tree != ROOT)
                | json.loads(done.stdout.splitlines()[-1]),
            )


if __name__ == "__main__":
    main()
