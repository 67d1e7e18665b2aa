"""Count what several processes share of a run: each has as many CPU seconds as it computes, whoever else runs.

A machine with fewer cores than processes cannot show how much faster they are. So each process notes its CPU seconds
between two exchanges. The one with the most is what all others wait for, as if each had a core of its own. Bytes are of
what a process sends and receives in the sums (a ring's, `2 (N − 1) / N` of each) and receives of what others solved.
Rows go to `results/processes_counted.jsonl`.
"""

import argparse
import functools
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from harness import add_text_options, append_row, parser, provenance, read_alone, smollm2_gguf

from oneshot import Config
from oneshot.checkpoint import locate_checkpoint
from oneshot.evaluation import load_model
from oneshot.pipeline import compress
from oneshot.report.progress import Stopwatch
from oneshot.text import load_tokenizer

EXCHANGES = ("all_reduce", "broadcast", "broadcast_object_list", "barrier")
Segment = tuple[float, str]  # CPU seconds before an exchange, and where it is


class Meter:
    """The CPU seconds of this process between exchanges with the others, by stage."""

    def __init__(self) -> None:
        self.segments: dict[str, list[Segment]] = defaultdict(list)
        self.alone: dict[str, float] = defaultdict(float)  # behind the last exchange of a stage
        self.exchanged: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])  # seconds, summed, sent bytes
        self._open: list[Segment] = []
        self._moved = [0.0, 0.0, 0.0]
        self._since, self._nested = time.process_time(), False

    def attach(self) -> None:
        """Let every exchange and every stage's end be noted."""
        for name in EXCHANGES:
            setattr(torch.distributed, name, self._noted(getattr(torch.distributed, name), name))
        ends = Stopwatch.lap

        def lap(watch: Stopwatch, stage: str) -> None:
            self.end(stage)
            ends(watch, stage)

        Stopwatch.lap = lap  # type: ignore[method-assign]

    def end(self, stage: str) -> None:
        """Count what was computed since the last stage ended."""
        now = time.process_time()
        self.alone[stage] += now - self._since
        self._since = now
        self.segments[stage] += self._open
        self.exchanged[stage] = [a + b for a, b in zip(self.exchanged[stage], self._moved, strict=True)]
        self._open, self._moved = [], [0.0, 0.0, 0.0]

    def _close(self, place: str) -> None:
        now = time.process_time()
        self._open.append((now - self._since, place))
        self._since = now

    def _noted(self, exchange: Any, name: str) -> Any:
        @functools.wraps(exchange)
        def noted(value: Any = None, *args: Any, **options: Any) -> Any:
            if self._nested:
                return exchange(value, *args, **options)
            self._close(_place())
            self._nested = True
            try:
                return exchange(*([] if value is None else [value]), *args, **options)
            finally:
                self._nested = False
                now = time.process_time()
                size = value.nbytes if isinstance(value, torch.Tensor) else 0
                moved = (now - self._since, size * (name == "all_reduce"), size * (name != "all_reduce"))
                self._moved = [a + b for a, b in zip(self._moved, moved, strict=True)]
                self._since = now

        return noted


def _place() -> str:
    """Return the functions of the package that lead to an exchange."""
    frames = [each for each in traceback.extract_stack() if "/oneshot/" in each.filename]
    frames = [each for each in frames if "/machine/" not in each.filename]
    return " < ".join(each.name for each in reversed(frames[-2:]))


def alone(options: argparse.Namespace) -> None:
    """Run as one of the processes, and write down what it computed."""
    torch.set_num_threads(1)
    meter = Meter()
    meter.attach()
    compress(Config.of(**json.loads(options.config)))
    meter.end("write")  # which the first process alone enters
    rank = os.environ.get("RANK", "0")
    (options.folder / f"{rank}.json").write_text(
        json.dumps({"segments": meter.segments, "alone": meter.alone, "exchanged": meter.exchanged})
    )


def together(count: int, config: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Run in so many processes, and return what the slowest of them takes between exchanges."""
    folder = scratch / f"of-{count}"
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--folder", str(folder), "--config", json.dumps(config)]
    running = [
        subprocess.Popen(command, env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]
    if any(process.wait() for process in running):
        raise SystemExit(f"a process of {count} failed")
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
    stages: dict[str, float] = {}
    places: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for stage in told[0]["segments"]:
        rows = [one["segments"][stage] for one in told]
        assert len({len(row) for row in rows}) == 1, f"the processes met in different places of {stage}"
        stages[stage] = max(one["alone"][stage] for one in told)
        places[f"{stage}: the end"] = [stages[stage], sum(one["alone"][stage] for one in told)]
        for meeting in zip(*rows, strict=True):
            seconds = [each[0] for each in meeting]
            stages[stage] += max(seconds)
            found = places[f"{stage}: {meeting[0][1]}"]
            found[0] += max(seconds)
            found[1] += sum(seconds)
    exchanged = {stage: [one["exchanged"].get(stage, [0, 0, 0]) for one in told] for stage in stages}
    moved = {stage: max(2 * (count - 1) / count * each[1] + each[2] for each in of) for stage, of in exchanged.items()}
    spent = {stage: max(each[0] for each in of) for stage, of in exchanged.items()}
    all_seconds = sum(each[1] for each in places.values())
    slowest = dict(sorted(places.items(), key=lambda item: -item[1][0])[:24])
    return {
        "processes": count,
        "stages": stages,
        "exchange_cpu_seconds": spent,
        "moved_bytes": moved,
        "seconds": sum(stages.values()),
        "all_seconds": all_seconds,
        "places": slowest,
    }


def first_layers(scratch: Path, count: int | None) -> Path:
    """Return the folder of SmolLM2, with its first layers alone if their number is given."""
    whole = locate_checkpoint(str(smollm2_gguf()), scratch)
    if count is None:
        return whole
    model, place = load_model(whole, device=torch.device("cpu"), dtype=torch.float32), scratch / "first"
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:count], count
    model.config.layer_types = None
    model.save_pretrained(place)
    load_tokenizer(whole).save_pretrained(place)
    return place


def digest(folder: Path) -> str:
    """Return a hash of the weights of a result."""
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--config", help=argparse.SUPPRESS)
    if "--folder" in sys.argv:
        return alone(options.parse_args())
    add_text_options(options, num_sequences=16)
    options.add_argument("--sequence-length", type=int, default=1024)
    options.add_argument("--batch-size", type=int)
    options.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    options.add_argument("--form", default="per-layer")
    options.add_argument("--layers", type=int, help="of SmolLM2, the first ones")
    options.add_argument("--with-own-text", action="store_true", help="half of the text is written by the model")
    options.add_argument("--places", action="store_true", help="also show where processes wait for the slowest")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        text = str(arguments.data_dir / "general.jsonl")
        config = {
            "checkpoint": str(first_layers(scratch, arguments.layers)),
            "sparsity": 0.2,
            "form": arguments.form,
            "calibration": f"{text}+self" if arguments.with_own_text else read_alone(text),
            "num_sequences": arguments.num_sequences,
            "sequence_length": arguments.sequence_length,
            "dtype": "float32",
        }
        config |= {"batch_size": arguments.batch_size} if arguments.batch_size else {}
        first = ""
        for count in arguments.processes:
            output = scratch / f"out-{count}"
            row = together(count, config | {"output": str(output)}, scratch)
            places, first = row.pop("places"), first or digest(output)
            if arguments.places:
                for place, (longest, whole) in places.items():
                    print(f"{longest:8.1f} {whole:8.1f}  {place}")
            settings = {
                "model": "SmolLM2-135M-Instruct",
                "layers": arguments.layers,
                "form": arguments.form,
                "num_tokens": arguments.num_sequences * arguments.sequence_length,
                "own_text": arguments.with_own_text,
            }
            same = {} if count == arguments.processes[0] else {"same_bytes": digest(output) == first}
            append_row("processes_counted", provenance(**settings, **row, **same))


if __name__ == "__main__":
    main()
