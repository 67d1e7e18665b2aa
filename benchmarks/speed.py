"""Prefill and decoding of compressed models beside the dense one, from the folders that a score is measured on.

`speed.py DENSE RESULT …` times all models in turns, and adds one row to `speed.jsonl` for every result, batch size,
length and mode. Times are minima over rounds: on one CPU thread of the process's CPU seconds, which other processes
disturb least, and elsewhere of the clock's. With `--data-dir` the same models are also scored on the five kinds of
text. It needs only this repository and the folders, so it also runs on a machine without a network.
"""

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Row, append_row, calibration_record, own_settings, parser, provenance, read_report
from judging import judging_windows, score, text_records

from oneshot.checkpoint import Checkpoint
from oneshot.evaluation import load_model, score_windows
from oneshot.evaluation.models import cached
from oneshot.text import load_tokenizer

DECODE_TOKENS = 16
MODES = ("eager", "compiled")

Seconds = dict[str, float]  # of `prefill`, and of one decoded token (`decode`)


def describe(folder: Path) -> Row:
    """What a row says of a result: its form, target, size, and where its method differs from the recipe."""
    report, checkpoint = read_report(folder), Checkpoint(folder)
    config = report["config"]
    return calibration_record(report) | {
        "form": config["form"],
        "asked": config["target"]["sparsity"],
        "budget": config["target"]["budget"],
        "seed": config["seed"],
        "settings": own_settings(report),
        "stored_parameters": checkpoint.num_parameters,
        "dense_parameters": report["stored_parameters"]["dense"],
        "file_bytes": checkpoint.num_bytes,
    }


class Clock:
    """Seconds of a call on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = "process" if device.type == "cpu" and torch.get_num_threads() == 1 else "wall"
        self._now = time.process_time if self.name == "process" else time.perf_counter

    def __call__(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Return the result of a call, and its seconds."""
        self._wait()
        started = self._now()
        result = call()
        self._wait()
        return result, self._now() - started

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def generate(model: Any, cache: dict[str, Any], step: torch.Tensor) -> torch.Tensor:
    """Decode greedily after a prefill; the number of steps is fixed."""
    for _ in range(DECODE_TOKENS):
        step = model(step, **cache, use_cache=True).logits[:, -1:].argmax(-1)
    return step


def timed(model: Any, ids: torch.Tensor, clock: Clock, rounds: list[Seconds]) -> None:
    """Add one round of a model."""
    output, prefill = clock(partial(model, ids, use_cache=True, logits_to_keep=1))
    _, decode = clock(partial(generate, model, cached(output), ids[:, -1:]))
    rounds.append({"prefill": prefill, "decode": decode / DECODE_TOKENS})


@torch.inference_mode()
def measure(models: dict[str, Any], ids: torch.Tensor, clock: Clock, rounds: int) -> dict[str, Seconds]:
    """The least seconds of every model; they take turns, and a first round warms up."""
    taken: dict[str, list[Seconds]] = {name: [] for name in models}
    for _ in range(rounds + 1):
        for name, model in models.items():
            timed(model, ids, clock, taken[name])
    return {name: {kind: min(one[kind] for one in of[1:]) for kind in of[0]} for name, of in taken.items()}


def scores(models: dict[str, Any], dense: Path, arguments: argparse.Namespace) -> dict[str, Row]:
    """The score of every result on the five kinds of text; nothing without their folder."""
    names = [name for name in models if name != str(dense)]
    if arguments.data_dir is None:
        return {name: {} for name in names}
    with tempfile.TemporaryDirectory() as scratch:
        windows = judging_windows(arguments.data_dir, Path(scratch), load_tokenizer(dense), arguments.max_windows)
    perplexities: dict[str, dict[str, float]] = {name: {} for name in models}
    for kind, ids in windows.items():
        found = score_windows([models[name] for name in names], ids, baseline=models[str(dense)])
        for name, one in zip([*names, str(dense)], found, strict=True):
            perplexities[name][kind] = one.perplexity
    shared = {"texts": text_records(windows), "max_windows": arguments.max_windows}
    of_dense = perplexities[str(dense)]
    return {name: shared | {"perplexity": perplexities[name]} | score(perplexities[name], of_dense) for name in names}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("dense", type=Path)
    options.add_argument("results", type=Path, nargs="+")
    options.add_argument("--device", default="cpu")
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options.add_argument("--modes", choices=MODES, nargs="+", default=MODES)
    options.add_argument("--batches", type=int, nargs="+", default=(1, 16))
    options.add_argument("--lengths", type=int, nargs="+", default=(512, 2048))
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--expand", type=float, help="call expand_() with this share on per-layer results")
    options.add_argument("--lay-out", action="store_true", help="also time per-layer results after lay_out_()")
    options.add_argument("--data-dir", type=Path, help="also score the models; see benchmarks/README.md")
    options.add_argument("--max-windows", type=int, default=4)
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    folders = [arguments.dense, *arguments.results]
    models = {str(folder): load_model(folder, device=device, dtype=dtype) for folder in folders}
    if arguments.expand is not None:
        for model in models.values():
            if hasattr(model, "expand_"):
                model.expand_(arguments.expand)
    # the models share the code of their modules: none may fall back to eager mode because the others were compiled
    torch._dynamo.config.recompile_limit = 16 * len(models)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    judged = scores(models, arguments.dense, arguments)
    timed_files = [(str(folder), folder, False) for folder in arguments.results]
    for name, folder, _ in tuple(timed_files) if arguments.lay_out else ():
        if hasattr(models[name], "lay_out_"):
            again = f"{name} by columns"
            models[again] = copy.deepcopy(models[name])
            models[again].lay_out_()
            timed_files.append((again, folder, True))
    vocabulary, clock = next(iter(models.values())).config.vocab_size, Clock(device)
    generator = torch.Generator().manual_seed(0)
    machine = {"device": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    for mode in arguments.modes:
        called = models if mode == "eager" else {name: torch.compile(model) for name, model in models.items()}
        for batch in arguments.batches:
            for length in arguments.lengths:
                ids = torch.randint(vocabulary, (batch, length), generator=generator).to(device)
                taken = measure(called, ids, clock, arguments.rounds)
                dense = taken[str(arguments.dense)]
                for name, folder, by_columns in timed_files:
                    own = taken[name]
                    record = {f"{kind}_seconds": seconds for kind, seconds in own.items()}
                    record |= {f"dense_{kind}_seconds": seconds for kind, seconds in dense.items()}
                    record |= {f"{kind}_ratio": seconds / dense[kind] for kind, seconds in own.items()}
                    case = {
                        "place": device.type,
                        "dtype": arguments.dtype,
                        "mode": mode,
                        "batch": batch,
                        "length": length,
                        "expanded": arguments.expand if hasattr(models[name], "expand_") else None,
                        "laid_out": by_columns,
                    }
                    row = {"model": arguments.dense.name} | describe(folder) | case | record | judged[str(folder)]
                    append_row("speed", provenance(clock=clock.name, rounds=arguments.rounds, **machine) | row)


if __name__ == "__main__":
    main()
