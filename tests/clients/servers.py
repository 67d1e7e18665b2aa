"""Servers of the engines: started on a free port of this machine, and stopped at the end."""

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 300


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def environment_of_others() -> dict[str, str]:
    """Return the environment for programs with packages of their own: without ours, and without a network."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def serving(command: Sequence[str | Path], log: Path, **environment: str) -> Iterator[str]:
    """Yield the address of a server once it is healthy; `--port` is added to the command."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    settings = environment_of_others() | environment
    with (
        log.open("w") as file,
        subprocess.Popen([*command, "--port", str(port)], stdout=file, stderr=file, env=settings) as server,
    ):
        try:
            for _ in range(START_SECONDS):
                assert server.poll() is None, log.read_text()[-2000:]
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=5)
                    break
                except OSError:
                    time.sleep(1)
            yield address
        finally:
            server.terminate()
