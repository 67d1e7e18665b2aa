"""Types per tensor (`--max-file-size`) against llama-quantize's with llama-imatrix, at the bytes of its files.

The model is a dense folder of the Llama type off any quantised grid. Both calibrate on the same text.
llama-perplexity judges the second halves of chunks of texts of other kinds, against the predictions of the file in F16:
by divergence, and by the log-loss, which few tokens leave to chance. One row for each file and text goes to
`tensor_types.jsonl`. A file that is there is not made again, so an interrupted call continues; its rows then state no
predicted loss.
"""

import re
import subprocess
from functools import cache
from pathlib import Path

import torch
from harness import Row, append_row, parser, provenance
from judging import CODE, KINDS, OWN_TYPES, kind_text

from oneshot import Config
from oneshot.export.result_model import result_importance
from oneshot.export.result_of_stock import open_result
from oneshot.export.result_sensitivity import SENSITIVITY_TOKENS
from oneshot.export.tensor_types import Priced, beside_bytes, chosen_types, damage_of, price_result, write_quantised
from oneshot.machine import Machine
from oneshot.machine.workers import ALONE
from oneshot.pipeline import compress
from oneshot.text import load_text, load_tokenizer
from oneshot.text.token_files import save_token_ids

LENGTH = 512  # tokens of a chunk


def run(*command: str | Path | int) -> str:
    """Run a program and return what it printed."""
    done = subprocess.run([str(each) for each in command], check=True, capture_output=True, text=True)
    return done.stdout + done.stderr


MEASURES = {  # of llama-perplexity's printed lines; each has an error behind it
    "divergence": r"Mean    KLD: *([-\d.]+) ± *([\d.]+)",
    "lost_nats": r"Mean ln\(PPL\(Q\)/PPL\(base\)\) *: *([-\d.]+) ± *([\d.]+)",
    "perplexity": r"Mean PPL\(Q\) *: *([\d.]+) ± *([\d.]+)",
}


def judge(programs: Path, model: Path, logits: Path, chunks: int, threads: int) -> Row:
    """Return llama-perplexity's measures of a file against the saved predictions of another, with their errors."""
    options = ["--kl-divergence", "--kl-divergence-base", logits, "-c", LENGTH, "--chunks", chunks, "-t", threads]
    printed = run(programs / "llama-perplexity", "-m", model, *options)
    row: Row = {}
    for name, pattern in MEASURES.items():
        value, error = re.findall(pattern, printed)[-1]
        row |= {name: float(value), f"{name}_error": float(error)}
    return row


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, required=True, help="dense folder")
    options.add_argument("--name", required=True, help="of the model, for the rows")
    options.add_argument("--programs", type=Path, required=True, help="folder of llama.cpp's programs")
    options.add_argument("--calibration", required=True)
    options.add_argument("--data-dir", type=Path, required=True, help="folder of the texts; see benchmarks/README.md")
    options.add_argument("--kinds", nargs="+", default=[*KINDS, CODE], help="of texts that are judged on")
    options.add_argument("--folder", type=Path, required=True, help="for files")
    options.add_argument("--num-sequences", type=int, default=64)
    options.add_argument("--chunks", type=int, default=32)
    options.add_argument("--types", nargs="+", default=["Q4_K_M", "Q3_K_M", "Q2_K"])
    options.add_argument("--dtype", default="float32")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    folder, programs = arguments.folder, arguments.programs
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(arguments.model)
    text = load_text(
        arguments.calibration, tokenizer, num_sequences=arguments.num_sequences, sequence_length=LENGTH, seed=0
    )
    tokens, words, plain = folder / "tokens.safetensors", folder / "calibration.txt", folder / "plain"
    save_token_ids(text.token_ids, tokens)
    words.write_text("".join(tokenizer.decode(ids) for ids in text.token_ids))
    if not plain.exists():
        sizes = {"num_sequences": arguments.num_sequences, "sequence_length": LENGTH}
        settings = {"form": "gguf", "sparsity": 0.0, "save_dtype": "float16", "dtype": arguments.dtype}
        compress(Config.of(arguments.model, plain, calibration=str(tokens), **settings, **sizes))
    source, matrix = plain / "model.gguf", folder / "llama-imatrix.gguf"
    if not matrix.exists():
        threads = arguments.threads
        same: list[str | Path | int] = ["-f", words, "--parse-special"]  # of which the marks of documents are a part
        run(programs / "llama-imatrix", "-m", source, *same, "-c", LENGTH, "-t", threads, "-o", matrix)
    machine = Machine(torch.device("cpu"), getattr(torch, arguments.dtype), folder, ALONE, batch_size=4)
    few = text.first(SENSITIVITY_TOKENS)

    @cache
    def prices() -> tuple[list[Priced], dict[str, str]]:
        with torch.no_grad():
            inputs = result_importance(open_result(source, text, machine), lambda tokens: None)
        return price_result(source, inputs, few, machine, 0)

    files: dict[str, tuple[Path, float | None]] = {}
    for kind in arguments.types:
        theirs, ours = folder / f"{kind}.gguf", folder / f"{kind}-own-types.gguf"
        if not theirs.exists():
            pure = ["--pure"] * kind.endswith("-pure")
            run(programs / "llama-quantize", "--imatrix", matrix, *pure, source, theirs, kind.removesuffix("-pure"))
        damage = None
        if not ours.exists():
            priced, names = prices()
            kinds = chosen_types(priced, theirs.stat().st_size - beside_bytes(source, names))
            damage = damage_of(priced, kinds)
            ours.symlink_to(source)  # which the result replaces
            with torch.no_grad():
                write_quantised(ours, priced, kinds, names, open_result(source, text, machine), lambda layer: None)
        files |= {kind: (theirs, None), f"{OWN_TYPES}{kind}": (ours, damage)}
    for kind in arguments.kinds:
        words, logits = folder / f"{kind}.txt", folder / "logits.bin"
        words.write_text(kind_text(kind, arguments.data_dir))
        saved = ["-f", words, "-c", LENGTH, "--chunks", arguments.chunks, "-t", arguments.threads]
        run(programs / "llama-perplexity", "-m", source, "--save-all-logits", logits, *saved)
        for name, (path, damage) in files.items():
            row = {"model": arguments.name, "types": name, "bytes": path.stat().st_size, "predicted_nats": damage}
            row |= judge(programs, path, logits, arguments.chunks, arguments.threads)
            row |= {"text": kind, "chunks": arguments.chunks, "calibration": Path(arguments.calibration).name}
            append_row("tensor_types", row | {"calibration_tokens": text.num_tokens} | provenance())
        logits.unlink()


if __name__ == "__main__":
    main()
