"""`make demo`: SmolLM2-135M-Instruct without a tenth of its parameters, asked and measured beside the original.

It needs no network. The model comes as a 4-bit GGUF file and is written as bfloat16 first, so that sizes before and
after are of one kind. It is calibrated on little of the built-in text; the perplexity is measured on this repository's
documents, another kind. At the end stands what was measured elsewhere with more text, in favour and not.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import ROOT, smollm2_gguf

FOLDER = ROOT / "demo"
MODEL, OUTPUT, TEXT = FOLDER / "SmolLM2-135M-Instruct", FOLDER / "smaller", FOLDER / "documents.txt"
QUESTION = "What is the capital of France?"
SHARE = "0.1"
LITTLE = ["--num-sequences", "16", "--sequence-length", "256"]


def main() -> int:
    started = time.perf_counter()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    from oneshot.cli.compress import main as compress
    from oneshot.cli.evaluate import main as evaluate

    say("1. The model, written as bfloat16 (10 seconds)")
    write_model()
    run = [str(MODEL), "-o", str(OUTPUT), "--sparsity", SHARE, "--form", "per-layer"]
    run += ["--calibration", "builtin", *LITTLE, "--prompt", QUESTION]
    documents = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("kernels/oneshot_kernels/*/README.md"))
    TEXT.write_text("\n\n".join(path.read_text() for path in documents))
    measure = [str(OUTPUT), "--baseline", str(MODEL), "--text", str(TEXT), "--sequence-length", "512"]
    steps: list[tuple[str, Callable[[list[str]], int], list[str]]] = [
        (
            "2. Compression: a tenth of the parameters goes, and both are asked (two minutes on two idle cores)",
            compress,
            run,
        ),
        ("3. Both models on text of another kind (20 seconds)", evaluate, [*measure, "--max-windows", "4"]),
    ]
    for title, command, options in steps:
        say(title)
        if failed := command(options):
            return failed
    say("4. What was measured with 131,072 tokens of text, five kinds of text, −10 %")
    print(elsewhere())
    say(f"{time.perf_counter() - started:.0f} seconds; the result is in {OUTPUT}")
    return 0


def say(title: str) -> None:
    print(f"\n== {title}", flush=True)


def write_model() -> None:
    """Write the model of the GGUF file as a folder of bfloat16 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from oneshot.checkpoint import locate_checkpoint

    with tempfile.TemporaryDirectory(prefix="oneshot-") as scratch:
        folder = locate_checkpoint(str(smollm2_gguf()), Path(scratch))
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(MODEL)
        AutoTokenizer.from_pretrained(folder).save_pretrained(MODEL)


def elsewhere() -> str:
    """Return the comparison that is in favour and the one that is not, from the rows of the benchmarks."""
    from tables.gpu_quality import default_row
    from tables.other_tools import other_curves
    from tables.pareto import pareto_rows

    ours = default_row("SmolLM2-135M", 0.1)
    megabytes = 2 * ours["stored_parameters"] / 1e6  # as bfloat16
    others = {tool: scores[0.1] for tool, scores in other_curves().items()}
    own = others.pop("oneshot")
    best = min(others, key=others.__getitem__)
    small = next(row for row in pareto_rows() if (row["series"], row["type"]) == ("dense", "Q4_K_M"))
    return "\n".join(
        [
            f"oneshot, per-layer         perplexity × {ours['score']:.2f} at {megabytes:.0f} MB",
            f"in favour: on two texts oneshot has × {own:.2f}, and the best other tool, {best}, × {others[best]:.2f}",
            f"not in favour: quantised to Q4_K_M it has × {small['score']:.2f} at {small['file_bytes'] / 1e6:.0f} MB,",
            "               so give --form gguf --max-file-size where the size of the file counts (docs/llama-cpp.md)",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
