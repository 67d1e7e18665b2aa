"""Options that several commands share, and how they become a config."""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from oneshot.cli.parser import OneOf
from oneshot.cli.process import told
from oneshot.config import Config, Dtype, FormChoice, MachineOptions, QuantiseName, SaveDtype, TextOptions
from oneshot.errors import ConfigError, OneshotError
from oneshot.method import Method
from oneshot.parsing import launched_rank
from oneshot.recipes import RECIPES
from oneshot.settings import RECIPE_NAME, parse_setting, read_recipe, settings

TEXT, MACHINE = TextOptions(), MachineOptions()
CHECKPOINT_HELP = "a folder of safetensors or pytorch_model.bin, a .gguf file, or a hub name such as org/model"
AUTO_DTYPE = "bfloat16 if this machine multiplies it clearly faster than float32, else float32"
COMMAND_ONLY = ("config", "quiet", "debug", "dry_run", "set", "tcsp", "push_to_hub", "verbose", "no_check", "prompt")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint to read, and a file with options."""
    parser.add_argument("checkpoint", nargs="?", help=CHECKPOINT_HELP)
    parser.add_argument("--revision", help="branch, tag or commit of a hub name")
    parser.add_argument("--config", metavar="FILE", help="recipe file with options; those given here replace its own")


def add_text(parser: argparse.ArgumentParser) -> None:
    """Add the calibration text."""
    text = parser.add_argument_group("calibration text")
    text.add_argument(
        "--calibration",
        metavar="TEXT",
        help="c4, wikitext2, org/name:config:split:column, a .txt, .md, .jsonl, .csv or .parquet file, file:column, "
        "builtin, or self (the model writes it); sources joined by + give equally many sequences, twice as many if "
        "named twice; where parameters are removed, one source is read beside an eighth of builtin "
        f"(default: {TEXT.calibration})",
    )
    text.add_argument(
        "--num-sequences", type=int, metavar="N", help=f"sequences to read (default: {TEXT.num_sequences})"
    )
    text.add_argument(
        "--sequence-length", type=int, metavar="N", help=f"tokens of each (default: {TEXT.sequence_length})"
    )
    text.add_argument("--seed", type=int, metavar="N", help="seed of all random choices (default: 0)")


def add_settings(group: Any) -> None:
    """Add `--set`, and the list of its keys."""
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other choice, such as heads=id; may be repeated",
    )
    group.add_argument("--help-methods", action=_HelpMethods, help="list recipes and the keys of --set, and exit")


def add_device(group: Any, default: str | None = None) -> None:
    """Add device and dtype of the forward passes; without a `default` who makes the config has one."""
    group.add_argument("--device", default=default, help=f"auto, cpu, cuda or cuda:N (default: {MACHINE.device})")
    dtypes = get_args(Dtype)
    group.add_argument(
        "--dtype",
        type=OneOf(dtypes),
        metavar="DTYPE",
        default=default,
        help=f"dtype of the forward passes: {', '.join(dtypes)} (default: {MACHINE.dtype}, {AUTO_DTYPE})",
    )


def add_machine(parser: argparse.ArgumentParser) -> Any:
    """Add device, dtype and memory; return the group for more options."""
    machine = parser.add_argument_group("machine")
    add_device(machine)
    machine.add_argument(
        "--batch-size", type=int, metavar="N", help=f"sequences in one forward pass (default: {MACHINE.batch_size})"
    )
    machine.add_argument(
        "--max-memory",
        metavar="SIZE",
        help="bound of the host memory, such as 8GiB; activations go to disk if they have to (default: what is free)",
    )
    machine.add_argument(
        "--max-device-memory", metavar="SIZE", help="bound of the memory on a CUDA device (default: what is free)"
    )
    machine.add_argument(
        "--offload-dir", metavar="FOLDER", help="for scratch files (default: the system's temporary folder)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no tables")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and other libraries' messages")
    return machine


def add_output_form(group: Any) -> None:
    """Add how weights are written."""
    dtypes = get_args(SaveDtype)
    shown = f"dtype of the stored weights: {', '.join(dtypes)} (default: keep, the input's; bfloat16 if quantised)"
    group.add_argument("--save-dtype", type=OneOf(dtypes), metavar="DTYPE", help=shown)
    group.add_argument("--max-shard-size", metavar="SIZE", help=argparse.SUPPRESS)  # docs/command-line.md has it
    group.add_argument(
        "--bits",
        type=float,
        metavar="B",
        help="mean bits of the weights of a GGUF file, such as 4.5 (default: not fewer)",
    )
    group.add_argument(
        "--max-file-size",
        metavar="SIZE",
        help="bytes of the GGUF file at most, instead of --bits; without --sparsity the run finds how much to remove",
    )
    names = get_args(QuantiseName)
    shown = f"round the linears of layers for vLLM and transformers: {', '.join(names)} (default: none is rounded)"
    group.add_argument("--quantise", type=OneOf(names), metavar="NAME", help=shown)
    group.add_argument("--tie", action="store_true", help=argparse.SUPPRESS)  # a run says where it helps
    group.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    group.add_argument("--resume", action="store_true", help="continue an interrupted run if there is one")


def add_form(group: Any) -> None:
    """Add the form of the result."""
    forms = get_args(FormChoice)
    shown = f"what the result is written as: {', '.join(forms)} (default: auto, the best that can hold the result)"
    group.add_argument("--form", type=OneOf(forms), metavar="FORM", help=shown)


class _HelpMethods(argparse.Action):
    """Print the recipes and the keys of `--set`, and exit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(describe_methods())
        parser.exit()


def describe_methods() -> str:
    """Return the recipes and the keys of `--set` with their choices, as text of at most 80 columns."""
    lines = ["recipes (--recipe), each with the settings that differ from the defaults:"]
    plain = {field.name: field.default for field in fields(Method)}
    for name, method in RECIPES.items():
        differing = {
            field.name: getattr(method, field.name)
            for field in fields(Method)
            if getattr(method, field.name) != plain[field.name]
        }
        lines += _wrapped(f"  {name}: ", [f"{key}={value}" for key, value in differing.items()], " ")
    lines += ["", "keys of --set:"]
    for key, record in settings().items():
        hint = get_type_hints(record)[key]
        choices = [choice for part in (hint, *get_args(hint)) for choice in get_args(part) if isinstance(choice, str)]
        kinds = [kind.__name__ for kind in (hint, *get_args(hint)) if kind in (int, float)]
        lines += _wrapped(f"  {key}: ", [*kinds, *dict.fromkeys(choices)], " | ")
    lines += ["", "docs/command-line.md explains every key; docs/recipes has the equations."]
    return "\n".join(lines)


def _wrapped(start: str, words: list[str], separator: str, width: int = 80) -> list[str]:
    lines, indent = [start], " " * 6
    for number, word in enumerate(words):
        piece = word if number == 0 else separator + word
        if len(lines[-1]) + len(piece) > width:
            lines.append(indent + piece.lstrip())
        else:
            lines[-1] += piece
    return lines


def parse_config(arguments: argparse.Namespace, **more: Any) -> Config:
    """Return the validated config of command-line arguments and of options that replace some of them.

    Raises `ConfigError`.
    """
    options = {name: value for name, value in vars(arguments).items() if name not in COMMAND_ONLY} | more
    options = {name: value for name, value in options.items() if value is not None and value is not False}
    options |= _settings(arguments.set)
    if arguments.config is not None:
        options = read_recipe(arguments.config, options)
    if "checkpoint" not in options:
        raise ConfigError("No checkpoint is given: name a folder, a .gguf file, or a model on the hub.")
    return Config.of(**options)


def refuse_recipe(recipe: str | None, outputs: Iterable[str]) -> None:
    """Raise `OutputError` if a recipe file lies where a result appears; the result writes its own `recipe.yaml` again.

    `outputs`: the results' folders or files.
    """
    from oneshot.checkpoint import output_folder, refuse_inputs

    if recipe is None:
        return
    path = Path(recipe).expanduser()
    for output in map(output_folder, outputs):
        if path.resolve() != output.resolve() / RECIPE_NAME:
            refuse_inputs(output, {f"the recipe {recipe}": [path]})


def _settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return the values of all `--set`. Raises `ConfigError` for a key that is given twice."""
    found: dict[str, Any] = {}
    for key, value in map(parse_setting, texts):
        if key in found:
            raise ConfigError(f"--set {key}= is given twice; leave one out.")
        found[key] = value
    return found


def run_command(arguments: argparse.Namespace, run: Callable[[], None], *, writes: bool = True) -> int:
    """Run and return the exit code: 0 done, 1 an error that the user can mend (said on stderr), 130 interrupted.

    `writes`: whether something else than standard output has the result (`streams.told`).

    No large library is loaded here: `run` calls `begin_work` after it has found the options to be right.
    """
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
    return told(written=writes)


@contextmanager
def noted_warnings() -> Iterator[list[str]]:
    """Yield a list of the warnings that a terminal shows meanwhile."""
    shown: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oneshot").addHandler(handler)
    try:
        yield shown
    finally:
        logging.getLogger("oneshot").removeHandler(handler)


@contextmanager
def each_warning_once() -> Iterator[None]:
    """Let the terminal show every warning once meanwhile, however many predictions warn of it."""
    shown: set[tuple[logging.Handler, str]] = set()

    def is_new(handler: logging.Handler, record: logging.LogRecord) -> bool:
        count = len(shown)
        shown.add((handler, record.getMessage()))
        return len(shown) > count

    filters = {handler: partial(is_new, handler) for handler in logging.getLogger().handlers}
    for handler, only_new in filters.items():
        handler.addFilter(only_new)
    try:
        yield
    finally:
        for handler, only_new in filters.items():
            handler.removeFilter(only_new)


def begin_work(arguments: argparse.Namespace) -> None:
    """Turn off the bars and messages of large libraries, unless `--debug` is given.

    This loads them and takes seconds, so options are read before.
    """
    if sys.stderr.isatty() and not getattr(arguments, "quiet", False):
        print("loading torch and transformers …", file=sys.stderr, flush=True)
    if not arguments.debug:
        silence_libraries()


def silence_libraries() -> None:
    """Turn off the progress bars and messages of transformers, datasets and the hub; errors of ours say as much."""
    for torch_says_once in ("Sparse CSR tensor support is in beta", ".*preferred_linalg_library is an experimental"):
        warnings.filterwarnings("ignore", message=torch_says_once)
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # read when datasets is imported, with the first table
    if not sys.stderr.isatty():  # lm-eval's bars fill a file; read when tqdm is imported, with torch
        os.environ.setdefault("TQDM_DISABLE", "1")
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    hub_logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bars()
