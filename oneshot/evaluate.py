"""`python -m oneshot.evaluate OUT --baseline CHECKPOINT --text FILE`: quality, sizes and latency, side by side."""

import argparse
import json
import logging
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional
from tqdm import tqdm

from oneshot.arch.base import PER_LAYER_MODEL_TYPE
from oneshot.calibration import iter_documents, load_tokenizer, pack
from oneshot.checkpoint import Checkpoint
from oneshot.config import DTYPES
from oneshot.errors import CalibrationError, ConfigError, OneshotError, OutputError
from oneshot.export.per_layer import model_classes, per_layer_shape
from oneshot.records import StackShape
from oneshot.source import identify, resolve_checkpoint
from oneshot.stream import resolve_device, resolve_dtype

LATENCY_ROUNDS = 5


@dataclass(frozen=True)
class Evaluation:
    """One model's numbers. Perplexities by text; latencies in seconds, medians over rounds.

    `prefill_seconds` is one forward pass over `prefill_tokens` tokens; `decode_seconds` is per generated token.
    """

    checkpoint: str
    stored_parameters: int
    block_parameters: int
    file_bytes: int
    flops_per_token: int
    kv_bytes_per_token: int
    perplexity: dict[str, float]
    tokens_scored: dict[str, int]
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    tasks: dict[str, dict[str, float]] | None = None


@torch.inference_mode()
def perplexity(model: torch.nn.Module, token_ids: torch.Tensor, *, batch_size: int = 4) -> tuple[float, int]:
    """`exp` of the mean negative log-likelihood of each window's tokens 2 … L, log-softmax in float32.

    Windows do not overlap and see nothing of each other.

    Args:
        model: a causal language model of transformers. token_ids: int64 `(windows, L)`.

    Returns:
        The perplexity and the number of tokens scored, `windows · (L − 1)`.
    """
    device = next(model.parameters()).device
    total, scored = 0.0, 0
    for batch in tqdm(token_ids.split(batch_size), desc="perplexity", unit="batch", leave=False):
        batch = batch.to(device)
        for window in batch:  # one window of logits at a time: vocabulary × length in float32 is large
            logits = model(window.unsqueeze(0), use_cache=False).logits[0, :-1].float()
            total += functional.cross_entropy(logits, window[1:], reduction="sum").item()
            scored += len(window) - 1
    return math.exp(total / scored), scored


def load_model(folder: Path, *, device: torch.device, dtype: torch.dtype | str) -> Any:
    """The model of a local checkpoint, for inference; `dtype="auto"` is the stored one.

    A per-layer checkpoint is read by this package's own class: the modelling file in the folder is not run.
    """
    _, model_class = model_classes(json.loads((folder / "config.json").read_text()))
    model: Any = model_class.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to(device).eval()


@torch.inference_mode()
def measure_latency(
    models: Sequence[Any], token_ids: torch.Tensor, *, decode_tokens: int, rounds: int = LATENCY_ROUNDS
) -> list[tuple[float, float]]:
    """Median seconds of one prefill of `token_ids (1, L)` and of one decoded token, for each model.

    The models take turns in every round, so that noise of the machine hits all of them.
    """
    prefills: list[list[float]] = [[] for _ in models]
    decodes: list[list[float]] = [[] for _ in models]
    for _ in range(rounds + 1):
        for position, model in enumerate(models):
            ids = token_ids.to(next(model.parameters()).device)
            output, seconds = _timed(partial(model, ids, use_cache=True, logits_to_keep=1))
            prefills[position].append(seconds)
            cache, step = output.past_key_values, ids[:, -1:]
            started = time.perf_counter()
            for _ in range(decode_tokens):
                step = model(step, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            step.item()  # waits for the device
            decodes[position].append((time.perf_counter() - started) / decode_tokens)
    # the first round warms up
    return [
        (statistics.median(prefill[1:]), statistics.median(decode[1:]))
        for prefill, decode in zip(prefills, decodes, strict=True)
    ]


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - started


def load_windows(text: str, tokenizer: Any, *, sequence_length: int, max_windows: int | None) -> torch.Tensor:
    """A text's first windows, int64 `(windows, sequence_length)`, documents in their stored order."""
    return pack(
        iter_documents(text, seed=None),
        tokenizer,
        num_sequences=max_windows,
        sequence_length=sequence_length,
        source=text,
    )


def run_tasks(
    folder: Path, tasks: Sequence[str], *, limit: int | None, include_path: str | None, device: torch.device
) -> dict[str, dict[str, float]]:
    """lm-eval's own metrics for the tasks, through its stock `hf` model. Raises `ConfigError` where it is missing."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError("--tasks needs lm-eval; run pip install 'oneshot[eval]'.") from error
    manager = TaskManager(include_path=include_path)
    for task in tasks:
        if task not in manager.all_tasks and not Path(task).is_file():
            raise ConfigError(f"--tasks {task} is not known to lm-eval; check the name, or give --include-path.")
    tokenizer = load_tokenizer(folder)
    loaded = load_model(folder, device=device, dtype="auto")
    results = simple_evaluate(
        model=HFLM(pretrained=loaded, tokenizer=tokenizer, device=str(device)),
        tasks=list(tasks),
        limit=limit,
        task_manager=manager,
    )
    return {
        task: {name: value for name, value in metrics.items() if isinstance(value, float)}
        for task, metrics in results["results"].items()
    }


def evaluate(
    checkpoints: Sequence[str],
    texts: Sequence[str],
    *,
    sequence_length: int = 1024,
    max_windows: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    prefill_tokens: int = 512,
    decode_tokens: int = 32,
    tasks: Sequence[str] = (),
    limit: int | None = None,
    include_path: str | None = None,
) -> list[Evaluation]:
    """Evaluate checkpoints side by side on the same windows; all are in memory at once.

    `decode_tokens=0` leaves the latency out. Raises a subclass of `OneshotError` for what a user can mend.
    """
    where = resolve_device(device)
    compute = resolve_dtype(dtype, where)
    with tempfile.TemporaryDirectory(prefix="oneshot-") as scratch:
        opened = [_open(name, Path(scratch)) for name in checkpoints]
        folders = [checkpoint.folder for checkpoint, _ in opened]
        tokenizer = load_tokenizer(folders[0])
        windows = {
            text: load_windows(text, tokenizer, sequence_length=sequence_length, max_windows=max_windows)
            for text in texts
        }
        for folder, (_, shape) in zip(folders, opened, strict=True):
            for text, ids in windows.items():
                if int(ids.max()) >= shape.vocab_size:
                    raise CalibrationError(
                        f"The tokenizer in {folders[0]} gives tokens of {text} that {folder} has no embedding for; "
                        "give models with one tokenizer, the one that belongs to them."
                    )
        loaded = [load_model(folder, device=where, dtype=compute) for folder in folders]
        scores = [{text: perplexity(model, ids) for text, ids in windows.items()} for model in loaded]
        latencies: list[tuple[float | None, float | None]] = [(None, None)] * len(loaded)
        if decode_tokens > 0:
            prompt = (
                next(iter(windows.values()))[:1, :prefill_tokens] if windows else torch.ones(1, prefill_tokens).long()
            )
            latencies = list(measure_latency(loaded, prompt, decode_tokens=decode_tokens))
        del loaded
        results = []
        for name, (checkpoint, shape), score, latency in zip(checkpoints, opened, scores, latencies, strict=True):
            results.append(
                Evaluation(
                    checkpoint=name,
                    stored_parameters=checkpoint.num_parameters,
                    block_parameters=shape.block_parameters(),
                    file_bytes=checkpoint.num_bytes,
                    flops_per_token=shape.flops_per_token(),
                    kv_bytes_per_token=shape.kv_bytes_per_token(),
                    perplexity={text: value for text, (value, _) in score.items()},
                    tokens_scored={text: count for text, (_, count) in score.items()},
                    prefill_seconds=latency[0],
                    decode_seconds=latency[1],
                    tasks=run_tasks(checkpoint.folder, tasks, limit=limit, include_path=include_path, device=where)
                    if tasks
                    else None,
                )
            )
    return results


def _open(name: str, scratch: Path) -> tuple[Checkpoint, StackShape]:
    """A checkpoint and its sizes; a per-layer one states them itself."""
    checkpoint = Checkpoint(resolve_checkpoint(name, scratch))
    if checkpoint.config.get("model_type") == PER_LAYER_MODEL_TYPE:
        return checkpoint, per_layer_shape(checkpoint.config)
    return checkpoint, identify(checkpoint).shape.stack()


def print_evaluations(evaluations: Sequence[Evaluation]) -> None:
    """A table with a column for each model and, for two, the ratio of the first to the second."""
    table = Table("", *(Path(evaluation.checkpoint).name for evaluation in evaluations))
    if len(evaluations) == 2:
        table.add_column("ratio")
    flat = [_flatten(evaluation) for evaluation in evaluations]
    for name in flat[0]:
        values = [row.get(name) for row in flat]
        cells = [
            "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.4f}" for value in values
        ]
        if len(values) == 2:
            cells.append(f"{values[0] / values[1]:.3f}" if values[0] is not None and values[1] else "–")
        table.add_row(name, *cells)
    Console().print(table)


def _flatten(evaluation: Evaluation) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, value in asdict(evaluation).items():
        if name in ("checkpoint", "tokens_scored") or value is None:
            continue
        if name == "perplexity":
            rows |= {
                f"perplexity {Path(text).name} ({evaluation.tokens_scored[text]:,} tokens)": score
                for text, score in value.items()
            }
        elif name == "tasks":
            rows |= {f"{task} {metric}": score for task, metrics in value.items() for metric, score in metrics.items()}
        else:
            rows[name.replace("_", " ")] = value
    return rows


def build_parser() -> argparse.ArgumentParser:
    """All options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m oneshot.evaluate", description=__doc__)
    parser.add_argument("checkpoint", help="a folder of safetensors, a .gguf file, or a hub name")
    parser.add_argument("--baseline", help="the checkpoint to stand beside it, usually the dense one")
    parser.add_argument(
        "--text", action="append", default=[], help="text for perplexity, as for --calibration; may be repeated"
    )
    parser.add_argument("--sequence-length", type=int, default=1024, help="tokens in a window (default: %(default)s)")
    parser.add_argument(
        "--max-windows",
        type=int,
        help="at most this many windows of each text (default: all of it; c4 has hundreds of millions)",
    )
    parser.add_argument("--tasks", nargs="+", default=[], help="lm-eval tasks")
    parser.add_argument("--limit", type=int, help="at most this many documents of each task")
    parser.add_argument("--include-path", help="folder with task YAML files of your own, for lm-eval")
    parser.add_argument("--prefill-tokens", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--decode-tokens", type=int, default=32, help="0 leaves latency out (default: %(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--output", help="write the numbers as JSON here, too")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        if arguments.sequence_length < 2:
            raise CalibrationError(f"--sequence-length {arguments.sequence_length} is too small; give at least 2.")
        if arguments.max_windows is not None and arguments.max_windows < 1:
            raise ConfigError(f"--max-windows {arguments.max_windows} is too small; give at least 1.")
        if arguments.output and not Path(arguments.output).absolute().parent.is_dir():
            raise OutputError(f"{arguments.output} cannot be written: its folder does not exist; create it first.")
        evaluations = evaluate(
            [arguments.checkpoint] + ([arguments.baseline] if arguments.baseline else []),
            arguments.text,
            sequence_length=arguments.sequence_length,
            max_windows=arguments.max_windows,
            device=arguments.device,
            dtype=arguments.dtype,
            prefill_tokens=arguments.prefill_tokens,
            decode_tokens=arguments.decode_tokens,
            tasks=arguments.tasks,
            limit=arguments.limit,
            include_path=arguments.include_path,
        )
    except OneshotError as error:
        if arguments.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_evaluations(evaluations)
    if arguments.output:
        Path(arguments.output).write_text(
            json.dumps([asdict(evaluation) for evaluation in evaluations], indent=2) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
