"""CPU seconds of prefill and decoding in llama.cpp: types per tensor beside llama-quantize's files of equal bytes.

The files are of `tensor_types.py`; with `--pure`, llama-quantize makes one of each type, and the table of
`oneshot/export/quantisers.py` is of their rows. Every round runs llama-bench on one file after another, with one
thread. What a process takes beside the work is removed: the seconds of one repetition are taken from the seconds of
several. CPU seconds, unlike seconds of the clock, hardly know of other processes. One row for each file goes to
`types_speed.jsonl`, with the least of its rounds.
"""

import os
import subprocess
from pathlib import Path

from harness import Row, append_row, parser, provenance
from judging import ALONE, OWN_TYPES

PREFILL, DECODE = 512, 64  # tokens
REPETITIONS = 2
NAMES = {"Q5_K": "Q5_K_S", "Q4_K": "Q4_K_S", "Q3_K": "Q3_K_S", "Q2_K": "Q2_K_S", "IQ2_S": "IQ2_M"}  # of one type alone


def cpu_seconds(bench: Path, model: Path, *size: str, repetitions: int) -> float:
    """Return the CPU seconds of a whole call of llama-bench."""
    before = os.times()
    options = ["-m", model, *size, "-r", repetitions, "-t", 1]
    subprocess.run([bench, *map(str, options)], check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def seconds_each(bench: Path, model: Path, *size: str) -> float:
    """Return the CPU seconds of one repetition."""
    once, several = (cpu_seconds(bench, model, *size, repetitions=count) for count in (1, 1 + REPETITIONS))
    return (several - once) / REPETITIONS


def pure(programs: Path, folder: Path, kind: str) -> Path:
    """Return a file of one type, which llama-quantize makes if it is not there."""
    path = folder / f"{kind}-alone.gguf"
    if not path.exists():
        options = ["--imatrix", folder / "llama-imatrix.gguf", "--pure", folder / "plain" / "model.gguf"]
        name = NAMES.get(kind, kind)
        subprocess.run(
            [programs / "llama-quantize", *map(str, [*options, path, name])], check=True, capture_output=True
        )
    return path


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--name", required=True, help="of the model, for the rows")
    options.add_argument("--programs", type=Path, required=True, help="folder of llama.cpp's programs")
    options.add_argument("--folder", type=Path, required=True, help="of the files of tensor_types.py")
    options.add_argument("--types", nargs="+", default=["Q4_K_M", "Q3_K_M", "Q2_K"])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--pure", action="store_true", help="files that have one type of --types alone")
    arguments = options.parse_args()
    programs, folder = arguments.programs, arguments.folder
    bench, files = programs / "llama-bench", {"F16": folder / "plain" / "model.gguf"}
    for kind in arguments.types:
        if arguments.pure:
            files[kind + ALONE] = pure(programs, folder, kind)
        else:
            files |= {kind: folder / f"{kind}.gguf", f"{OWN_TYPES}{kind}": folder / f"{kind}-own-types.gguf"}
    rounds: dict[str, list[Row]] = {name: [] for name in files}
    for _ in range(arguments.rounds):
        for name, path in files.items():
            prefill = seconds_each(bench, path, "-p", str(PREFILL), "-n", "0")
            decode = seconds_each(bench, path, "-p", "0", "-n", str(DECODE))
            rounds[name].append({"prefill": PREFILL / prefill, "decode": DECODE / decode})
            print(name, rounds[name][-1], flush=True)
    for name, path in files.items():
        row = {"model": arguments.name, "types": name, "bytes": path.stat().st_size}
        for measure in ("prefill", "decode"):
            found = [one[measure] for one in rounds[name]]
            row |= {f"{measure}_tokens_per_cpu_second": max(found), f"{measure}_of_rounds": found}
        append_row("types_speed", row | {"rounds": arguments.rounds} | provenance())


if __name__ == "__main__":
    main()
