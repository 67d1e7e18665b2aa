"""Commands in processes that fork from one that has imported everything: an import takes longer than most runs here."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["oneshot.cli.compress", "oneshot.pipeline", "oneshot.report.page", "transformers.models.llama.modeling_llama"]
)


def start(
    name: str,
    commands: Sequence[Sequence[str]],
    told: Path,
    environment: Mapping[str, str] | None = None,
    printed: Path | None = None,
) -> BaseProcess:
    """Start `oneshot NAME` for each list of arguments, one after the other; the first that fails ends the process.

    Args:
        told, printed: the files that receive what is written to stderr and to stdout. environment: further variables.
    """
    process = CONTEXT.Process(target=_run, args=(name, commands, told, environment or {}, printed))
    process.start()
    return process


def start_group(count: int, commands: Sequence[Sequence[str]], told: Path) -> list[BaseProcess]:
    """Start processes of `oneshot compress` that share their runs by gloo, as torchrun does; `told` as in `start`."""
    return [start("compress", commands, told, each) for each in launched(count)]


def launched(count: int) -> list[dict[str, str]]:
    """Return what torchrun sets in the environment of each of several processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(count)}
    place["OMP_NUM_THREADS"] = "1"  # as torchrun; accelerate would set others, and results have a thread count's bytes
    return [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def wait(processes: Sequence[BaseProcess], seconds: float = 120) -> list[int | None]:
    """Return the exit codes; None for a process that still runs after this time, and is then killed."""
    for process in processes:
        process.join(seconds)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def _run(
    name: str, commands: Sequence[Sequence[str]], told: Path, environment: Mapping[str, str], printed: Path | None
) -> None:
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job and its children ignore it
    os.environ.update(environment)
    tempfile.tempdir = None  # it is asked for anew
    for path, number in ((told, 2), (printed, 1)):
        if path is not None:
            with path.open("ab") as file:
                os.dup2(file.fileno(), number)
    main = import_module("oneshot.cli.main").main
    for arguments in commands:
        code = main([name, *arguments])
        if code != 0:
            sys.exit(code)


def run_module(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m` in a new process that has imported nothing, and return what it printed."""
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        cwd=Path(__file__).parents[1],
    )
