"""`python -m oneshot.compress CHECKPOINT --output OUT --sparsity 0.2`: the command line of the pipeline."""

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

from oneshot.config import (
    ALLOCATIONS,
    BUDGETS,
    CORRECTIONS,
    DEPTHS,
    EMBEDDING_METHODS,
    HIDDEN_METHODS,
    PIVOTINGS,
    SELECTORS,
    SKETCHES,
    TIERS,
    TOKEN_WEIGHTINGS,
    CompressionConfig,
)
from oneshot.errors import ConfigError
from oneshot.options import (
    DEFAULTS,
    add_checkpoint,
    add_output_form,
    add_resources,
    add_shared_method,
    add_text,
    parse_config,
    run_command,
)
from oneshot.pipeline import compress, compress_sizes, predict
from oneshot.recipes import RECIPES
from oneshot.records import Report
from oneshot.report import print_footprint, print_report
from oneshot.workers import launched_rank


def build_parser() -> argparse.ArgumentParser:
    """All options; their defaults are those of `CompressionConfig`."""
    parser = argparse.ArgumentParser(
        prog="python -m oneshot.compress",
        description="Compress a Llama-like checkpoint into a smaller stock checkpoint, in one shot, without training.",
    )
    add_checkpoint(parser)
    parser.add_argument("--output", required=True, help="folder to write; must not exist")
    target = parser.add_argument_group("target (give one)")
    target.add_argument(
        "--sparsity",
        nargs="+",
        help="fraction of the stored parameters (or of --budget) to remove, such as 0.2; several write "
        "OUT/sparsity-0.10 and so on",
    )
    target.add_argument(
        "--budget",
        choices=BUDGETS,
        default=DEFAULTS.budget,
        help="what --sparsity is a fraction of; latency is measured here, for one sequence (default: %(default)s)",
    )
    target.add_argument("--params", help="stored parameters to keep, such as 900M or 5.5B")

    method = parser.add_argument_group("method")
    method.add_argument("--recipe", default=DEFAULTS.recipe, help=f"one of {', '.join(RECIPES)} (default: %(default)s)")
    method.add_argument("--ffn", choices=SELECTORS, help="how FFN neurons are chosen (default: the recipe's)")
    method.add_argument("--heads", choices=SELECTORS, help="how attention heads are chosen (default: the recipe's)")
    method.add_argument("--hidden", choices=HIDDEN_METHODS, help="how the hidden size shrinks (default: the recipe's)")
    method.add_argument(
        "--embedding",
        choices=EMBEDDING_METHODS,
        help="a rank for every range of the vocabulary: per-layer tier, tied output head (default: the recipe's)",
    )
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
        default=DEFAULTS.shared_weight,
        help="weight of all other blocks in a group's projection (default: %(default)s)",
    )
    method.add_argument(
        "--token-weighting",
        choices=TOKEN_WEIGHTINGS,
        default=DEFAULTS.token_weighting,
        help="in the hidden size's principal components tokens count alike (unit) or by their energy (raw)",
    )
    method.add_argument("--value-size", type=int, help="kept size of every head's values (per-layer tier)")
    method.add_argument(
        "--query-key-size", type=int, help="kept size of every head's queries and keys (per-layer tier)"
    )
    method.add_argument("--tier", choices=TIERS, help="form of the result: stock, or per-layer with a modelling file")
    method.add_argument(
        "--allocation", choices=ALLOCATIONS, help="how sizes are shared out among layers (default: the recipe's)"
    )
    method.add_argument("--depth", choices=DEPTHS, help="how whole layers are left out (default: the recipe's)")
    method.add_argument("--profile", help="folder of a profile to plan from (default: made where it is needed)")
    method.add_argument(
        "--correction", choices=CORRECTIONS, help="of what is kept, for what is gone (default: the recipe's)"
    )
    method.add_argument(
        "--up-steps",
        type=int,
        help="steps of conjugate gradients that correct up_proj, too, behind the correction (default: the recipe's)",
    )
    method.add_argument("--pivoting", choices=PIVOTINGS, help="how pivots are found (default: the recipe's)")
    method.add_argument("--sketch", choices=SKETCHES, help="what pivots are found in (default: the recipe's)")
    method.add_argument("--sketch-size", type=int, help="rows of the sketch (default: twice the FFN width)")
    method.add_argument(
        "--pivot-group-size", type=int, default=DEFAULTS.pivot_group_size, help="columns in a group of pivots"
    )
    method.add_argument(
        "--residual-weight",
        type=float,
        default=DEFAULTS.residual_weight,
        help="share of the dense stream's residual in a two-stream target (default: %(default)s)",
    )
    method.add_argument(
        "--round-to", type=int, help="FFN width is a multiple of this (default: 64, less for small models)"
    )
    add_shared_method(method)
    add_text(parser)
    add_output_form(add_resources(parser))
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print predicted peaks of memory, disk, parameters and time, and do nothing (a hub name is fetched)",
    )
    return parser


def _parse_fraction(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"--sparsity {text!r} is not a number; give a fraction such as 0.2.") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code, as `options.run_command`."""
    arguments = build_parser().parse_args(argv)

    def run() -> None:
        sparsities = [_parse_fraction(text) for text in arguments.sparsity or []]
        config = parse_config(arguments, sparsity=sparsities[0] if sparsities else None)
        if arguments.dry_run:
            for one in [replace(config, sparsity=sparsity) for sparsity in sparsities] or [config]:
                print_footprint(predict(one))
            return
        if len(sparsities) > 1:
            reports = compress_sizes(config, sparsities, show_progress=not arguments.quiet)
        else:
            reports = [compress(config, show_progress=not arguments.quiet)]
        if not arguments.quiet and launched_rank() == 0:
            for report in reports:
                print_report(report)

    return run_command(arguments, run)


class _CallableModule(ModuleType):
    """`import oneshot.compress` binds this module over the package's function of the same name; both compress."""

    def __call__(self, config: CompressionConfig, *, show_progress: bool = False) -> Report:
        return compress(config, show_progress=show_progress)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill cleans up like Ctrl-C
    sys.exit(main())
