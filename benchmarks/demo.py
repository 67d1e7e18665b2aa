"""`make demo`: compress SmolLM2-135M-Instruct by a tenth, off-line, and put the result beside the original.

The model comes as a 4-bit GGUF file and is written as bfloat16 first, so that sizes before and after are of one kind.
Calibration is the text that is in the package, eight kinds in English. The perplexity is measured on this repository's
documents, which are not among it.
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, smollm2_gguf

FOLDER = ROOT / "demo"
MODEL, OUTPUT, TEXT = FOLDER / "SmolLM2-135M-Instruct", FOLDER / "smaller", FOLDER / "documents.txt"


def main() -> int:
    started = time.perf_counter()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    say("1. The model, as bfloat16")
    write_model()
    say("2. Compression by a tenth (oneshot compress)")
    from oneshot.cli.compress import main as compress
    from oneshot.cli.evaluate import main as evaluate

    text = ["--calibration", "builtin", "--num-sequences", "16", "--sequence-length", "512"]
    failed = compress([str(MODEL), "-o", str(OUTPUT), "--sparsity", "0.1", *text])
    if failed:
        return failed
    say("3. Both models on text of another kind (oneshot evaluate)")
    documents = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("kernels/oneshot_kernels/*/README.md"))
    TEXT.write_text("\n\n".join(path.read_text() for path in documents))
    windows = ["--sequence-length", "512", "--max-windows", "4"]
    failed = evaluate([str(OUTPUT), "--baseline", str(MODEL), "--text", str(TEXT), *windows])
    say(f"{time.perf_counter() - started:.0f} seconds; the result is in {OUTPUT}")
    return failed


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


if __name__ == "__main__":
    sys.exit(main())
