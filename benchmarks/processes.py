"""Several processes beside one, on the real SmolLM2-135M: whether results have the same bytes, and the wall times.

Rows, one for each text and number of processes, go to `results/processes.jsonl`.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from faults import TELLING, Runs
from harness import append_row, parser, provenance, read_report, smollm2_gguf
from safetensors.torch import load_file

from oneshot.checkpoint import locate_checkpoint


def compare(one: Path, several: Path) -> dict[str, Any]:
    """Compare two results: if they have one plan and equal files, and the largest relative difference of a tensor."""
    plans = [read_report(folder)["plan"] for folder in (one, several)]
    files = [path for path in one.iterdir() if path.name not in TELLING]
    worst = 0.0
    for path in one.glob("*.safetensors"):
        ours, theirs = load_file(path), load_file(several / path.name)
        for name, tensor in ours.items():
            worst = max(worst, float((tensor.double() - theirs[name].double()).norm() / tensor.double().norm()))
    return {
        "same_plan": plans[0] == plans[1],
        "same_bytes": all(path.read_bytes() == (several / path.name).read_bytes() for path in files),
        "largest_difference": worst,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--num-sequences", type=int, default=32)
    options.add_argument("--sequence-length", type=int, default=256)
    options.add_argument("--processes", type=int, nargs="+", default=[2, 3])
    options.add_argument("--texts", nargs="+", default=["builtin"], help="as --calibration of compress")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)  # what the row says; of each process
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        runs = Runs(locate_checkpoint(str(smollm2_gguf()), folder), folder, arguments)
        for number, text in enumerate(arguments.texts):
            one = f"one-{number}"
            one_seconds = runs.finish(one, f"--calibration={text}")
            for processes in arguments.processes:
                name = f"{processes}-{number}"
                seconds = runs.finish(name, f"--calibration={text}", processes=processes)
                row = provenance(
                    model="SmolLM2-135M-Instruct",
                    num_tokens=arguments.num_sequences * arguments.sequence_length,
                    text=Path(text).name,
                    processes=processes,
                    one_seconds=one_seconds,
                    seconds=seconds,
                )
                append_row("processes", row | compare(folder / one, folder / name))


if __name__ == "__main__":
    main()
