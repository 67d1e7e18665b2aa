"""The cost of sums in float64 beside sums in float32: CPU seconds and peak bytes of a Gram of 4,096 rows, in turns.

Rows, one for each size, go to `results/sums.jsonl`. The batch is the usual one of 4 sequences of 1,024 tokens.
"""

import os
import time
from collections.abc import Callable
from statistics import median

import psutil
import torch
from harness import append_row, parser, provenance
from oneshot_kernels import gram_, mirror_

from oneshot.linalg.sums import add_gram_, finished_gram
from oneshot.machine.memory import peak_bytes

Update = Callable[[torch.Tensor, torch.Tensor], object]
NUM_ROWS = 4096
REPETITIONS = {1536: 15, 11008: 2}
KINDS: dict[str, tuple[torch.dtype, Update, Callable[[torch.Tensor], torch.Tensor]]] = {
    "float32": (torch.float32, lambda total, rows: gram_(total, rows, mirror=False), mirror_),
    "float64": (torch.float64, add_gram_, finished_gram),
}


def seconds(size: int, rows: torch.Tensor) -> dict[str, list[float]]:
    """Return CPU seconds of an update by kind; kinds take turns, because the machine's speed drifts."""
    totals = {kind: torch.zeros(size, size, dtype=dtype) for kind, (dtype, _, _) in KINDS.items()}
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for repetition in range(REPETITIONS[size] + 1):
        for kind, (_, update, _) in KINDS.items():
            started = time.process_time()
            update(totals[kind], rows)
            if repetition:  # the first touches fresh memory
                found[kind].append(time.process_time() - started)
    return found


def peak(size: int, rows: torch.Tensor, kind: str) -> int:
    """Return the bytes that a sum of one batch and its finish take at their peak, in a child process."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        dtype, update, finish = KINDS[kind]
        held = psutil.Process().memory_info().rss
        total = torch.zeros(size, size, dtype=dtype)
        update(total, rows)
        finish(total)
        os.write(writer, str(peak_bytes() - held).encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    return int(os.read(reader, 100))


def main() -> None:
    options = parser(__doc__)
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    for size in REPETITIONS:
        rows = torch.randn(NUM_ROWS, size, generator=torch.Generator().manual_seed(0))
        peaks = {kind: peak(size, rows, kind) for kind in KINDS}
        taken = seconds(size, rows)
        ratios = [ours / theirs for theirs, ours in zip(taken["float32"], taken["float64"], strict=True)]
        row = provenance(columns=size, rows=NUM_ROWS, peak_bytes=peaks, load=os.getloadavg()[0])
        append_row("sums", row | {"seconds": {k: median(v) for k, v in taken.items()}, "ratio": median(ratios)})


if __name__ == "__main__":
    main()
