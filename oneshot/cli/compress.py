"""`oneshot compress CHECKPOINT --output OUT --sparsity 0.2`: the command line of the pipeline."""

import argparse
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from oneshot.cli.options import (
    add_checkpoint,
    add_form,
    add_machine,
    add_output_form,
    add_settings,
    add_text,
    begin_work,
    each_warning_once,
    noted_warnings,
    parse_config,
    refuse_recipe,
    run_command,
)
from oneshot.cli.parser import OneOf, Parser
from oneshot.config import BudgetUnit, Config, default_output, refuse_prompt, tcsp_options
from oneshot.errors import ConfigError
from oneshot.parsing import launched_rank
from oneshot.recipes import RECIPES
from oneshot.serving import ENGINES

if TYPE_CHECKING:
    from oneshot.report.progress import Tracker
    from oneshot.report.records import Report


def build_parser(prog: str = "oneshot compress") -> argparse.ArgumentParser:
    """Return the parser of all options; what is not given has the default of `Config`."""
    parser = Parser(
        prog,
        "CHECKPOINT --sparsity 0.2 [-o OUT] [options]",
        "Make a checkpoint of a language model smaller, in one run and without training.",
    )
    add_checkpoint(parser)
    parser.add_argument(
        "-o", "--output", metavar="OUT", help="folder to write (default: NAME-oneshot-0.20 in the working folder)"
    )
    target = parser.add_argument_group("target (give one)")
    target.add_argument(
        "--sparsity",
        action="extend",
        nargs="+",
        metavar="S",
        help="fraction of the stored parameters to remove, such as 0.2; several write OUT/sparsity-0.10 and so on",
    )
    target.add_argument(
        "--tcsp",
        nargs=2,
        metavar=("A", "B"),
        help=argparse.SUPPRESS,  # a preset for experiments: docs/recipes/tcsp.md
    )
    budgets = get_args(BudgetUnit)
    target.add_argument(
        "--budget",
        type=OneOf(budgets),
        metavar="BUDGET",
        help=f"what --sparsity is a share of: {', '.join(budgets)} (default: parameters)",
    )
    target.add_argument(
        "--params", metavar="P", help="stored parameters to keep at most, such as 900M or 5.5B, instead of --sparsity"
    )
    target.add_argument(
        "--max-size", metavar="SIZE", help="bytes of the weight files at most, such as 2GB, instead of --sparsity"
    )
    target.add_argument(
        "--max-loss",
        metavar="L",
        help="rise of the perplexity that is allowed, such as 5%%, instead of --sparsity: the run finds the size, and "
        "checks it on texts of several kinds",
    )
    method = parser.add_argument_group("method")
    method.add_argument("--recipe", metavar="NAME", help=f"one of {', '.join(RECIPES)} (default: oneshot)")
    add_form(method)
    method.add_argument("--profile", metavar="FOLDER", help="a profile to plan from (default: made if it is needed)")
    method.add_argument("--up-steps", type=int, help=argparse.SUPPRESS)  # slow; docs/command-line.md has it
    method.add_argument(
        "--round-to", type=int, metavar="N", help="sizes are multiples of this (default: 64, less in small models)"
    )
    method.add_argument(
        "--serve",
        metavar="WITH",
        help="sizes and a form that open there, such as tp=2,group=128 or engine=vllm,tp=2,pp=2; engines: "
        f"{', '.join(ENGINES)}",
    )
    method.add_argument(
        "--keep",
        action="extend",
        nargs="+",
        metavar="PATTERN",
        help="what stays as it is, by names of modules, such as 'layers.0.*' '*.self_attn.*' embed_tokens",
    )
    add_settings(method)
    add_text(parser)
    add_output_form(add_machine(parser))
    parser.add_argument("--verbose", action="store_true", help="also show tables of sizes and of every layer's error")
    parser.add_argument("--no-check", action="store_true", help="leave out the check on held-out text at the end")
    parser.add_argument(
        "--prompt", metavar="TEXT", help="question that the check asks both models (default: one of its own)"
    )
    parser.add_argument("--push-to-hub", metavar="REPO", help="also upload the result, as NAME or ORGANISATION/NAME")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print predicted memory, disk, parameters and time, and write nothing (only headers are fetched)",
    )
    return parser


def _parse_fraction(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"--sparsity {text!r} is not a number; give a fraction such as 0.2.") from error


def _apply_tcsp(arguments: argparse.Namespace) -> None:
    """Set the options that `--tcsp` stands for; a form and settings that are given stay."""
    try:
        hidden, inner = (float(text) for text in arguments.tcsp)
    except ValueError as error:
        raise ConfigError(f"--tcsp {' '.join(arguments.tcsp)} is not two numbers; give per cents, as 25 25.") from error
    if arguments.recipe not in (None, "oneshot", "tcsp"):
        raise ConfigError(f"--tcsp is a preset of its own; leave out --recipe {arguments.recipe}.")
    for name, value in tcsp_options(hidden, inner).items():
        if name != "form" or arguments.form is None:
            setattr(arguments, name, value)


def _finish(
    config: Config, report: "Report", arguments: argparse.Namespace, tracker: "Tracker", told: Collection[str]
) -> None:
    """Check a result, show what came out, and upload it if that is asked for."""
    from oneshot.api.check import check_result, weight_bytes
    from oneshot.api.result import push
    from oneshot.export import FORMS
    from oneshot.export.gguf import FILE_NAME
    from oneshot.report.summary import summary
    from oneshot.report.terminal import print_report

    checks = not arguments.quiet and not arguments.no_check
    if checks and config.target.max_loss is None:  # which was checked in the run
        report = check_result(config, report, tracker, question=arguments.prompt)
    tracker.close()
    if not arguments.quiet:
        if arguments.verbose:
            print_report(report)
        weights = weight_bytes(config.checkpoint), weight_bytes(config.output)
        gguf = str(Path(config.output) / FILE_NAME) if FORMS[report.config["form"]].opened_by == "llama.cpp" else None
        print(
            summary(
                report,
                weights=weights,
                check=report.check if checks else None,
                source=config.checkpoint,
                gguf=gguf,
                told=told,
            )
        )
    if arguments.push_to_hub is not None:
        address = push(Path(config.output).expanduser(), report, arguments.push_to_hub)
        print(f"uploaded to {address}")


def main(argv: Sequence[str] | None = None, prog: str = "oneshot compress") -> int:
    """Run and return the exit code, as `options.run_command`."""
    arguments = build_parser(prog).parse_args(argv)

    def run() -> None:
        if arguments.prompt is not None and arguments.no_check:
            raise ConfigError("--prompt is asked by the check, which --no-check leaves out; give one of the two.")
        if arguments.max_loss is not None and arguments.no_check:
            raise ConfigError("--max-loss is judged by the check, which --no-check leaves out; give one of the two.")
        if arguments.prompt is not None and arguments.quiet:
            raise ConfigError("--prompt shows answers, which --quiet leaves out; give one of the two.")
        sparsities = [_parse_fraction(text) for text in arguments.sparsity or []]
        if arguments.tcsp is not None:
            _apply_tcsp(arguments)
        config = parse_config(arguments, sparsity=sparsities[0] if sparsities else None)
        refuse_prompt(arguments.prompt, config.form)
        begin_work(arguments)
        from oneshot.api.check import CHECK, check_result
        from oneshot.max_loss import compress_within
        from oneshot.pipeline import compress, compress_sizes, configs_of, predict
        from oneshot.report.progress import Tracker
        from oneshot.report.terminal import print_footprint, print_footprints

        if len(sparsities) > 1 and arguments.output is None:
            config = replace(config, output=default_output(config.checkpoint, config.target, several=True))
        checks = not arguments.quiet and not arguments.no_check
        if arguments.dry_run:
            if len(sparsities) > 1:
                with each_warning_once():
                    predicted = [predict(one) for one in configs_of(config, sparsities)]
                print_footprints(predicted, checks=checks)
            else:
                print_footprint(predict(config), checks=checks)
            return
        several = configs_of(config, sparsities) if len(sparsities) > 1 else [config]
        refuse_recipe(arguments.config, [one.output for one in several])
        with (
            noted_warnings() as told,
            Tracker(not arguments.quiet, ending=[CHECK] * checks * max(1, len(sparsities))) as tracker,
        ):
            if len(sparsities) > 1:
                reports = compress_sizes(config, sparsities, show_progress=tracker)
            elif config.target.max_loss is not None:
                check = partial(check_result, tracker=tracker, question=arguments.prompt)
                reports = [compress_within(config, check, show_progress=tracker)]
            else:
                reports = [compress(config, show_progress=tracker)]
            if launched_rank() == 0:
                for report in reports:
                    _finish(replace(config, output=report.config["output"]), report, arguments, tracker, told)

    return run_command(arguments, run, writes=not arguments.dry_run)
