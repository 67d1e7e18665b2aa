"""The cost of a change: compressions of one model by two checkouts, in turns; CPU seconds, memory and perplexity.

    python benchmarks/before_after.py --before DIR --text FILE -- --form=per-layer --dtype=auto

What stands behind `--` is given to both compressions. The row also has the seconds of a pass of the dense model in
float32 over as many tokens. Rows go to `results/before_after.jsonl`. CPU seconds, because other work on the machine
does not change them much.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from harness import ROOT, append_row, cpu_and_peak, parser, provenance, smollm2_gguf
from overhead import forward_seconds
from real_models import FOLDER as MODELS_FOLDER
from real_models import NAMES, fetch

from oneshot.checkpoint import locate_checkpoint
from oneshot.evaluation import load_model, load_windows, perplexity
from oneshot.text import load_tokenizer


def run(tree: Path, checkpoint: Path, output: Path, arguments: list[str]) -> tuple[float, int]:
    """Return the CPU seconds and the peak resident bytes of a compression by the packages of a checkout."""
    command = [sys.executable, "-m", "oneshot.compress", str(checkpoint), f"--output={output}", "--overwrite"]
    return cpu_and_peak([*command, *arguments], {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'kernels'}"}, cwd=tree)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--before", type=Path, required=True)
    options.add_argument("--text", type=Path, required=True, help="what both results are judged on")
    options.add_argument("--model", choices=sorted(NAMES), help="of real_models.py (default: SmolLM2-135M)")
    options.add_argument("--turns", type=int, default=2)
    options.add_argument("--num-sequences", type=int, default=8)
    options.add_argument("--sequence-length", type=int, default=1024)
    options.add_argument("further", nargs="*", help="arguments of both compressions")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    more = ["--sparsity=0.2", "--calibration=builtin", "--device=cpu", "--dtype=float32", "--quiet"]
    more += [f"--num-sequences={arguments.num_sequences}", f"--sequence-length={arguments.sequence_length}"]
    more += arguments.further  # an argument that is given twice has its last value
    trees = {"before": arguments.before.resolve(), "after": ROOT}
    commit = subprocess.run(
        ["git", "-C", trees["before"], "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    file = smollm2_gguf() if arguments.model is None else fetch(arguments.model, MODELS_FOLDER)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = locate_checkpoint(str(file), Path(scratch))
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in trees}
        for _ in range(arguments.turns):
            for name, tree in trees.items():
                found[name].append(run(tree, checkpoint, Path(scratch) / name, more))
        windows = load_windows(
            str(arguments.text),
            load_tokenizer(checkpoint),
            sequence_length=256,
            max_windows=16,
        )
        ids = torch.zeros(arguments.num_sequences, arguments.sequence_length, dtype=torch.long)
        passes = [forward_seconds(checkpoint, ids, 4)[1] for _ in range(arguments.turns)]
        perplexities = {
            name: perplexity(
                load_model(Path(scratch) / name, device=torch.device("cpu"), dtype=torch.float32), windows
            )[0]
            for name in trees
        }
    ratios = [after / before for (before, _), (after, _) in zip(*found.values(), strict=True)]
    append_row(
        "before_after",
        provenance(
            model=file.stem,
            before=commit.stdout.strip(),
            num_tokens=arguments.num_sequences * arguments.sequence_length,
            arguments=more,
            dense_pass_seconds=passes,
            cpu_seconds={name: [seconds for seconds, _ in runs] for name, runs in found.items()},
            peak_bytes={name: max(peak for _, peak in runs) for name, runs in found.items()},
            ratio=median(ratios),
            perplexity=perplexities,
        ),
    )


if __name__ == "__main__":
    main()
