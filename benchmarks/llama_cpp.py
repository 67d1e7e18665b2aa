"""A stock result in llama.cpp: its own converter, quantiser and perplexity, beside transformers' on the same tokens.

Needs a llama.cpp source tree with `llama-quantize` and `llama-perplexity` built in `build/bin`, and what its converter
imports (`pip install sentencepiece`). One row for the dense model and one for the compressed go to `llama_cpp.jsonl`.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import add_text_options, append_row, calibration_record, kind_text, parser, provenance, smollm2_gguf

from oneshot import Config, compress
from oneshot.checkpoint import Checkpoint, locate_checkpoint
from oneshot.evaluation import load_model
from oneshot.text import load_tokenizer

TYPES = ("F32", "Q8_0", "Q4_K_M")
CONTEXT = 512  # llama-perplexity's own: tokens of a chunk, of which the second half is scored


def run(command: list[str | Path]) -> str:
    """What a program of llama.cpp prints. Raises `SystemExit` with its last words where it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout + done.stderr


@torch.inference_mode()
def half_chunk_perplexity(folder: Path, text: str, chunks: int) -> float:
    """As llama-perplexity: chunks of `CONTEXT` tokens that see nothing of each other, second halves count."""
    model, tokenizer = load_model(folder, device=torch.device("cpu"), dtype=torch.float32), load_tokenizer(folder)
    token_ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"][: chunks * CONTEXT]).view(chunks, CONTEXT)
    half = slice(CONTEXT // 2, CONTEXT - 1)
    losses = []
    for chunk in token_ids.split(1):
        logits = model(chunk, use_cache=False).logits[0, half]
        losses.append(torch.nn.functional.cross_entropy(logits, chunk[0, CONTEXT // 2 + 1 :]))
    return float(torch.stack(losses).double().mean().exp())


def in_llama_cpp(folder: Path, text: Path, scratch: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """File size and perplexity of a checkpoint in every type."""
    programs = arguments.llama_cpp / "build" / "bin"
    plain = scratch / "F32.gguf"
    run([sys.executable, arguments.llama_cpp / "convert_hf_to_gguf.py", folder, "--outtype", "f32", "--outfile", plain])
    found = {}
    for kind in TYPES:
        file = scratch / f"{kind}.gguf"
        if file != plain:
            run([programs / "llama-quantize", plain, file, kind])
        size = ["-c", str(CONTEXT), "--chunks", str(arguments.chunks), "-t", str(arguments.threads)]
        printed = run([programs / "llama-perplexity", "-m", file, "-f", text, *size])
        estimate = re.search(r"Final estimate: PPL = ([\d.]+)", printed)
        if estimate is None:
            raise SystemExit(f"llama-perplexity printed no estimate: {printed[-2000:]}")
        found[kind] = {"file_bytes": file.stat().st_size, "perplexity": float(estimate[1])}
    return found


def main() -> None:
    options = parser(__doc__)
    add_text_options(options, num_sequences=128)
    options.add_argument("--llama-cpp", type=Path, required=True, help="source tree with build/bin")
    options.add_argument("--chunks", type=int, default=16)
    options.add_argument("--sparsity", type=float, default=0.2)
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    version = run([arguments.llama_cpp / "build" / "bin" / "llama-perplexity", "--version"]).splitlines()[0]
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        text = scratch / "wikitext2.txt"
        text.write_text(kind_text("wikitext2", arguments.data_dir))
        dense = locate_checkpoint(str(smollm2_gguf()), scratch)
        config = Config.of(
            checkpoint=str(dense),
            output=str(scratch / "compressed"),
            sparsity=arguments.sparsity,
            calibration=str(arguments.data_dir / "general.jsonl"),
            num_sequences=arguments.num_sequences,
        )
        of_compressed = calibration_record(compress(config)) | {"seed": config.seed}
        for folder, origin in ((dense, {}), (Path(config.output), of_compressed)):
            row = provenance(model="SmolLM2-135M-Instruct", llama_cpp=version, chunks=arguments.chunks, context=CONTEXT)
            row |= origin | {
                "dense": folder == dense,
                "stored_parameters": Checkpoint(folder).num_parameters,
                "transformers_perplexity": half_chunk_perplexity(folder, text.read_text(), arguments.chunks),
                "types": in_llama_cpp(folder, text, scratch, arguments),
            }
            append_row("llama_cpp", row)


if __name__ == "__main__":
    main()
