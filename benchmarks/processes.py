"""Two processes beside one, on the real SmolLM2-135M: the same plan, tensors equal to rounding, wall time of each.

The row goes to `results/processes.jsonl`. With fewer tokens than an FFN has neurons some choices of neurons are between
equals, and rounding decides them; the default is more than five times as many.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from faults import Runs
from harness import append_row, parser, provenance, smollm2_gguf
from safetensors.torch import load_file

from oneshot.checkpoint import locate_checkpoint
from oneshot.report.card import REPORT_NAME


def compare(one: Path, two: Path) -> dict[str, Any]:
    """Whether two results have one plan, and the largest difference of a tensor relative to its norm."""
    plans = [json.loads((folder / REPORT_NAME).read_text())["plan"] for folder in (one, two)]
    worst = 0.0
    for path in one.glob("*.safetensors"):
        ours, theirs = load_file(path), load_file(two / path.name)
        for name, tensor in ours.items():
            worst = max(worst, float((tensor.double() - theirs[name].double()).norm() / tensor.double().norm()))
    return {"same_plan": plans[0] == plans[1], "largest_difference": worst}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--num-sequences", type=int, default=32)
    options.add_argument("--sequence-length", type=int, default=256)
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)  # what the row says; of each process
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        runs = Runs(locate_checkpoint(str(smollm2_gguf()), folder), folder, arguments)
        seconds = {"one_seconds": runs.finish("one"), "two_seconds": runs.finish("two", processes=2)}
        row = provenance(model="SmolLM2-135M-Instruct", num_tokens=arguments.num_sequences * arguments.sequence_length)
        append_row("processes", row | seconds | compare(folder / "one", folder / "two"))


if __name__ == "__main__":
    main()
