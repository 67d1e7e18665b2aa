"""Options that several command lines share, and how they become a config."""

import argparse
import logging
import sys
from collections.abc import Callable
from typing import Any

from oneshot.config import (
    DTYPES,
    HEAD_UNITS,
    SAVE_DTYPES,
    CompressionConfig,
    parse_count,
    parse_size,
)
from oneshot.errors import OneshotError
from oneshot.workers import launched_rank

DEFAULTS = CompressionConfig(checkpoint="", output="", sparsity=0.0)
NOT_OF_THE_CONFIG = ("quiet", "debug", "dry_run")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """The checkpoint to read."""
    parser.add_argument("checkpoint", help="a folder of safetensors, a .gguf file, or a hub name")


def add_shared_method(group: Any) -> None:
    """What shapes both the profile and the compression."""
    group.add_argument("--head-unit", choices=HEAD_UNITS, default=DEFAULTS.head_unit, help="what is removed together")
    group.add_argument(
        "--damping",
        type=_damping,
        default=DEFAULTS.damping,
        help="ridge ÷ mean diagonal, or auto: what errs least on a held-out eighth of the text (default: %(default)s)",
    )
    group.add_argument("--seed", type=int, default=DEFAULTS.seed)


def _damping(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # which the config takes or refuses


def add_text(parser: argparse.ArgumentParser) -> None:
    """The calibration text."""
    text = parser.add_argument_group("calibration text")
    text.add_argument(
        "--calibration",
        default=DEFAULTS.calibration,
        help="c4, wikitext2, org/name:config:split:column, a .txt, .jsonl or .parquet file, builtin, or self: text "
        "that the model writes; several joined by + give equally many sequences each, as c4+self "
        "(default: %(default)s)",
    )
    text.add_argument("--num-sequences", type=int, default=DEFAULTS.num_sequences, help="(default: %(default)s)")
    text.add_argument("--sequence-length", type=int, default=DEFAULTS.sequence_length, help="(default: %(default)s)")


def add_resources(parser: argparse.ArgumentParser) -> Any:
    """Device, dtype, memory; the group, for more of them."""
    resources = parser.add_argument_group("resources")
    resources.add_argument("--device", default=DEFAULTS.device, help="auto, cpu, cuda or cuda:N")
    resources.add_argument("--dtype", choices=DTYPES, default=DEFAULTS.dtype, help="dtype of the forward passes")
    resources.add_argument("--batch-size", type=int, default=DEFAULTS.batch_size, help="sequences at a time")
    resources.add_argument(
        "--max-memory",
        help="most host memory that the process may take, such as 8GiB: activations go to disk for it, and a run that "
        "cannot keep to it is refused (default: what is free says where activations go)",
    )
    resources.add_argument("--max-device-memory", help="most memory that the run may take on a CUDA device")
    resources.add_argument(
        "--offload-dir",
        help="folder for activations that do not fit and for scratch files (default: the system's temporary folder)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no tables")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return resources


def add_output_form(resources: Any) -> None:
    """How weights are written."""
    resources.add_argument("--save-dtype", choices=SAVE_DTYPES, default=DEFAULTS.save_dtype)
    resources.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    resources.add_argument(
        "--resume", action="store_true", help="go on where an interrupted run stopped, if there is one"
    )


def parse_config(arguments: argparse.Namespace, **more: Any) -> CompressionConfig:
    """Command-line arguments, and settings that stand in for some of them, -> validated config.

    Raises `ConfigError`.
    """
    options = {name: value for name, value in vars(arguments).items() if name not in NOT_OF_THE_CONFIG} | more
    for text, field, parse in (
        ("params", "params", parse_count),
        ("max_memory", "max_memory_bytes", parse_size),
        ("max_device_memory", "max_device_memory_bytes", parse_size),
    ):
        given = options.pop(text, None)
        if given is not None:
            options[field] = parse(given)
    return CompressionConfig(**options)


def run_command(arguments: argparse.Namespace, run: Callable[[], None]) -> int:
    """Run; returns the exit code: 0 done, 1 an error that the user can mend (said on stderr), 130 interrupted."""
    rank = launched_rank()  # of several processes only the first warns
    logging.basicConfig(level=logging.ERROR if rank else logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        run()
    except OneshotError as error:
        if arguments.debug:
            raise
        print(f"error: {error}" if rank == 0 else f"process {rank}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
