"""`python -m oneshot.compress CHECKPOINT --output OUT --sparsity 0.2`: the command line of the pipeline."""

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

from oneshot.config import (
    CORRECTIONS,
    DTYPES,
    FFN_SELECTORS,
    HEAD_SELECTORS,
    HEAD_UNITS,
    HIDDEN_METHODS,
    PIVOTINGS,
    SAVE_DTYPES,
    SKETCHES,
    TIERS,
    TOKEN_WEIGHTINGS,
    CompressionConfig,
    parse_count,
    parse_size,
)
from oneshot.errors import ConfigError, OneshotError
from oneshot.pipeline import compress
from oneshot.recipes import RECIPES
from oneshot.records import Report
from oneshot.report import print_report


def build_parser() -> argparse.ArgumentParser:
    """All options; their defaults are those of `CompressionConfig`."""
    defaults = CompressionConfig(checkpoint="", output="", sparsity=0.0)
    parser = argparse.ArgumentParser(
        prog="python -m oneshot.compress",
        description="Compress a Llama-like checkpoint into a smaller stock checkpoint, in one shot, without training.",
    )
    parser.add_argument("checkpoint", help="a folder of safetensors, a .gguf file, or a hub name")
    parser.add_argument("--output", required=True, help="folder to write; must not exist")
    target = parser.add_argument_group("target (give one)")
    target.add_argument("--sparsity", help="fraction of the stored parameters to remove, such as 0.2")
    target.add_argument("--params", help="stored parameters to keep, such as 900M or 5.5B")

    method = parser.add_argument_group("method")
    method.add_argument("--recipe", default=defaults.recipe, help=f"one of {', '.join(RECIPES)} (default: %(default)s)")
    method.add_argument("--ffn", choices=FFN_SELECTORS, help="how FFN neurons are chosen (default: the recipe's)")
    method.add_argument(
        "--heads", choices=HEAD_SELECTORS, help="how attention heads are chosen (default: the recipe's)"
    )
    method.add_argument("--hidden", choices=HIDDEN_METHODS, help="how the hidden size shrinks (default: the recipe's)")
    method.add_argument("--hidden-size", type=int, help="the kept hidden size (default: what the target asks for)")
    method.add_argument(
        "--group-size",
        type=int,
        help="blocks (attention or FFN) that share a projection of the hidden size, 0 for one in the whole model "
        "(default: the recipe's)",
    )
    method.add_argument(
        "--shared-weight",
        type=float,
        default=defaults.shared_weight,
        help="weight of all other blocks in a group's projection (default: %(default)s)",
    )
    method.add_argument(
        "--token-weighting",
        choices=TOKEN_WEIGHTINGS,
        default=defaults.token_weighting,
        help="in the hidden size's principal components tokens count alike (unit) or by their energy (raw)",
    )
    method.add_argument("--value-size", type=int, help="kept size of every head's values (per-layer tier)")
    method.add_argument(
        "--query-key-size", type=int, help="kept size of every head's queries and keys (per-layer tier)"
    )
    method.add_argument("--tier", choices=TIERS, help="form of the result: stock, or per-layer with a modelling file")
    method.add_argument("--head-unit", choices=HEAD_UNITS, default=defaults.head_unit, help="what is removed together")
    method.add_argument("--correction", choices=CORRECTIONS, help="least-squares correction (default: the recipe's)")
    method.add_argument("--pivoting", choices=PIVOTINGS, help="how pivots are found (default: the recipe's)")
    method.add_argument("--sketch", choices=SKETCHES, help="what pivots are found in (default: the recipe's)")
    method.add_argument("--sketch-size", type=int, help="rows of the sketch (default: twice the FFN width)")
    method.add_argument(
        "--pivot-group-size", type=int, default=defaults.pivot_group_size, help="columns in a group of pivots"
    )
    method.add_argument(
        "--damping", type=float, default=defaults.damping, help="ridge ÷ mean diagonal (default: %(default)s)"
    )
    method.add_argument(
        "--residual-weight",
        type=float,
        default=defaults.residual_weight,
        help="share of the dense stream's residual in a two-stream target (default: %(default)s)",
    )
    method.add_argument(
        "--round-to", type=int, help="FFN width is a multiple of this (default: 64, less for small models)"
    )
    method.add_argument("--seed", type=int, default=defaults.seed)

    text = parser.add_argument_group("calibration text")
    text.add_argument(
        "--calibration",
        default=defaults.calibration,
        help="c4, wikitext2, org/name:config:split:column, a .txt, .jsonl or .parquet file, or builtin "
        "(default: %(default)s)",
    )
    text.add_argument("--num-sequences", type=int, default=defaults.num_sequences, help="(default: %(default)s)")
    text.add_argument("--sequence-length", type=int, default=defaults.sequence_length, help="(default: %(default)s)")

    resources = parser.add_argument_group("resources")
    resources.add_argument("--device", default=defaults.device, help="auto, cpu, cuda or cuda:N")
    resources.add_argument("--dtype", choices=DTYPES, default=defaults.dtype, help="dtype of the forward passes")
    resources.add_argument("--batch-size", type=int, default=defaults.batch_size, help="sequences at a time")
    resources.add_argument("--max-memory", help="most memory for activations, such as 8GiB; beyond it they go to disk")
    resources.add_argument("--save-dtype", choices=SAVE_DTYPES, default=defaults.save_dtype)
    resources.add_argument("--max-shard-size", default="5GB", help="(default: %(default)s)")
    resources.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no tables")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def parse_config(arguments: argparse.Namespace) -> CompressionConfig:
    """Command-line arguments -> validated config. Raises `ConfigError`."""
    options = vars(arguments).copy()
    for name in ("quiet", "debug"):
        options.pop(name)
    sparsity, params = options.pop("sparsity"), options.pop("params")
    max_memory, max_shard = options.pop("max_memory"), options.pop("max_shard_size")
    return CompressionConfig(
        **options,
        sparsity=None if sparsity is None else _parse_fraction(sparsity),
        params=None if params is None else parse_count(params),
        max_memory_bytes=None if max_memory is None else parse_size(max_memory),
        max_shard_bytes=parse_size(max_shard),
    )


def _parse_fraction(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"--sparsity {text!r} is not a number; give a fraction such as 0.2.") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code: 0 done, 1 an error that the user can mend, 130 interrupted."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        report = compress(parse_config(arguments), show_progress=not arguments.quiet)
    except OneshotError as error:
        if arguments.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    if not arguments.quiet:
        print_report(report)
    return 0


class _CallableModule(ModuleType):
    """`import oneshot.compress` binds this module over the package's function of the same name; both compress."""

    def __call__(self, config: CompressionConfig, *, show_progress: bool = False) -> Report:
        return compress(config, show_progress=show_progress)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill cleans up like Ctrl-C
    sys.exit(main())
