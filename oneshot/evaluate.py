"""`python -m oneshot.evaluate OUT --baseline CHECKPOINT --text FILE`: quality, sizes and latency, side by side."""

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oneshot.arch.base import PER_LAYER_MODEL_TYPE
from oneshot.calibration import iter_documents, load_tokenizer, pack
from oneshot.checkpoint import Checkpoint
from oneshot.comparison import Evaluation, print_evaluations, text_record, write_json
from oneshot.config import DTYPES
from oneshot.errors import CalibrationError, ConfigError, OutputError
from oneshot.export.per_layer import model_classes, per_layer_shape
from oneshot.options import run_command
from oneshot.records import StackShape
from oneshot.scoring import relative_score, score_windows
from oneshot.source import identify, resolve_checkpoint
from oneshot.stream import resolve_device, resolve_dtype

LATENCY_ROUNDS = 5
BOOTSTRAP_ROUNDS = 1000  # for lm-eval's standard error of a perplexity; its default of 100,000 takes minutes


def load_model(folder: Path, *, device: torch.device, dtype: torch.dtype | str) -> Any:
    """The model of a local checkpoint, for inference; `dtype="auto"` is the stored one.

    A per-layer checkpoint is read by this package's own class: the modelling file in the folder is not run.
    """
    _, model_class = model_classes(json.loads((folder / "config.json").read_text()))
    model: Any = model_class.from_pretrained(folder, dtype=dtype, local_files_only=True, use_safetensors=True)
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
    folder: Path,
    tasks: Sequence[str],
    *,
    limit: int | None,
    include_path: str | None,
    device: torch.device,
    dtype: torch.dtype | str = "auto",
    manager: Any = None,
) -> dict[str, dict[str, float]]:
    """lm-eval's own metrics for the tasks, through its stock `hf` model.

    `manager` is that of `task_manager`, where it is there already. Raises `ConfigError` as `task_manager` does.
    """
    manager = manager or task_manager(tasks, include_path)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    tokenizer = load_tokenizer(folder)
    loaded = load_model(folder, device=device, dtype=dtype)
    results = simple_evaluate(
        model=HFLM(pretrained=loaded, tokenizer=tokenizer, device=str(device)),
        tasks=list(tasks),
        limit=limit,
        task_manager=manager,
        bootstrap_iters=BOOTSTRAP_ROUNDS,
    )
    return {
        task: {name: value for name, value in metrics.items() if isinstance(value, float)}
        for task, metrics in results["results"].items()
    }


def task_manager(tasks: Sequence[str], include_path: str | None) -> Any:
    """lm-eval's index of tasks: those of `include_path` where they are enough (its own take ten seconds), or both.

    A task defined in `include_path` is that one, also where lm-eval has one of the same name. Raises `ConfigError`
    where lm-eval is missing or does not know a task.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError("--tasks needs lm-eval; run pip install 'oneshot[eval]'.") from error
    if include_path is not None:
        if not Path(include_path).is_dir():
            raise ConfigError(f"--include-path {include_path} is not a folder; give the one with your task YAML files.")
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if set(tasks) <= set(manager.all_subtasks):
            return manager
    manager = TaskManager(include_path=include_path)  # the later definition wins: that of include_path
    for task in tasks:
        if task not in manager.all_tasks and not Path(task).is_file():
            raise ConfigError(f"--tasks {task} is not known to lm-eval; check the name, or give --include-path.")
    return manager


def evaluate(
    checkpoints: Sequence[str],
    texts: Sequence[str],
    *,
    baseline: str | None = None,
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
    """Evaluate checkpoints side by side on the same windows: in order, then the baseline. All are in memory at once.

    `decode_tokens=0` leaves the latency out. Raises a subclass of `OneshotError` for what a user can mend.
    """
    where = resolve_device(device)
    compute = resolve_dtype(dtype, where)
    manager = task_manager(tasks, include_path) if tasks else None  # a wrong name is known before hours of scoring
    names = [*checkpoints, baseline] if baseline is not None else [*checkpoints]
    with tempfile.TemporaryDirectory(prefix="oneshot-") as scratch:
        opened = [_open(name, Path(scratch)) for name in names]
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
        models, reference = (loaded[:-1], loaded[-1]) if baseline is not None else (loaded, None)
        scores = {text: score_windows(models, ids, baseline=reference) for text, ids in windows.items()}
        latencies: list[tuple[float | None, float | None]] = [(None, None)] * len(loaded)
        if decode_tokens > 0:
            prompt = (
                next(iter(windows.values()))[:1, :prefill_tokens] if windows else torch.ones(1, prefill_tokens).long()
            )
            latencies = list(measure_latency(loaded, prompt, decode_tokens=decode_tokens))
        del loaded, models, reference
        records = {text: text_record(ids) for text, ids in windows.items()}
        results = []
        for position, (name, (checkpoint, shape)) in enumerate(zip(names, opened, strict=True)):
            score = {text: of_models[position] for text, of_models in scores.items()}
            results.append(
                Evaluation(
                    checkpoint=name,
                    stored_parameters=checkpoint.num_parameters,
                    block_parameters=shape.block_parameters(),
                    file_bytes=checkpoint.num_bytes,
                    flops_per_token=shape.flops_per_token(),
                    kv_bytes_per_token=shape.kv_bytes_per_token(),
                    perplexity={text: value.perplexity for text, value in score.items()},
                    tokens_scored={text: value.tokens_scored for text, value in score.items()},
                    top1_agreement=_known({text: value.top1_agreement for text, value in score.items()}),
                    kl_divergence=_known({text: value.kl_divergence for text, value in score.items()}),
                    prefill_seconds=latencies[position][0],
                    decode_seconds=latencies[position][1],
                    tasks=run_tasks(
                        checkpoint.folder,
                        tasks,
                        limit=limit,
                        include_path=include_path,
                        device=where,
                        dtype=compute,
                        manager=manager,
                    )
                    if tasks
                    else None,
                    texts=records,
                )
            )
    if baseline is None or not windows:
        return results
    *compared, dense = results
    return [*(_beside(result, dense) for result in compared), dense]


def _known(values: dict[str, float | None]) -> dict[str, float] | None:
    """The values that are known; None where there is none."""
    return {text: value for text, value in values.items() if value is not None} or None


def _beside(result: Evaluation, baseline: Evaluation) -> Evaluation:
    """The result with its score relative to the baseline."""
    score, _, worst_ratio = relative_score(result.perplexity, baseline.perplexity)
    return replace(result, score=score, worst_ratio=worst_ratio)


def _open(name: str, scratch: Path) -> tuple[Checkpoint, StackShape]:
    """A checkpoint and its sizes; a per-layer one states them itself."""
    checkpoint = Checkpoint(resolve_checkpoint(name, scratch))
    if checkpoint.config.get("model_type") == PER_LAYER_MODEL_TYPE:
        return checkpoint, per_layer_shape(checkpoint.config)
    return checkpoint, identify(checkpoint).shape.stack()


def build_parser() -> argparse.ArgumentParser:
    """All options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m oneshot.evaluate", description=__doc__)
    parser.add_argument("checkpoint", help="a folder of safetensors, a .gguf file, or a hub name")
    parser.add_argument("--baseline", help="the checkpoint to compare it with, usually the dense one")
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
    parser.add_argument(
        "--include-path", help="folder with task YAML files of your own; they win over lm-eval's of the same name"
    )
    parser.add_argument("--prefill-tokens", type=int, default=512, help="(default: %(default)s)")
    parser.add_argument("--decode-tokens", type=int, default=32, help="0 leaves latency out (default: %(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--output", help="write the numbers, and where they come from, as JSON here, too")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code, as `options.run_command`."""
    arguments = build_parser().parse_args(argv)

    def run() -> None:
        if arguments.sequence_length < 2:
            raise CalibrationError(f"--sequence-length {arguments.sequence_length} is too small; give at least 2.")
        if arguments.max_windows is not None and arguments.max_windows < 1:
            raise ConfigError(f"--max-windows {arguments.max_windows} is too small; give at least 1.")
        if arguments.output and not Path(arguments.output).absolute().parent.is_dir():
            raise OutputError(f"{arguments.output} cannot be written: its folder does not exist; create it first.")
        evaluations = evaluate(
            [arguments.checkpoint],
            arguments.text,
            baseline=arguments.baseline,
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
        print_evaluations(evaluations)
        if arguments.output:
            write_json(Path(arguments.output), evaluations, vars(arguments))

    return run_command(arguments, run)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill cleans up like Ctrl-C
    sys.exit(main())
