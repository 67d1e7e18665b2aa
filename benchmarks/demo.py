"""`make demo`: compress SmolLM2-135M-Instruct by a fifth, off-line, and put the result beside the original.

Calibration is Python's own help text, which every machine has: a narrow, technical kind, fit for a demo and nothing
more. The perplexity is measured on this repository's documents, another kind of text.
"""

import shutil
import sys

from harness import ROOT, smollm2_gguf

from oneshot.cli.compress import main as compress
from oneshot.cli.evaluate import main as evaluate


def main() -> int:
    folder = ROOT / "demo"
    folder.mkdir(exist_ok=True)
    output, text = folder / "smollm2-20", folder / "documents.txt"
    shutil.rmtree(output, ignore_errors=True)
    documents = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("kernels/oneshot_kernels/*/README.md"))
    text.write_text("\n\n".join(path.read_text() for path in documents))
    model = str(smollm2_gguf())
    settings = ["--calibration", "builtin", "--num-sequences", "24", "--sequence-length", "512"]
    failed = compress([model, "--output", str(output), "--sparsity", "0.2", *settings])
    return failed or evaluate(
        [str(output), "--baseline", model, "--text", str(text), "--sequence-length", "512", "--max-windows", "16"]
    )


if __name__ == "__main__":
    sys.exit(main())
