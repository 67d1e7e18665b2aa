"""Two machines, each with its launcher: here two agents of torchrun, at two addresses of the loopback interface."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from child_processes import launched
from factories import MakeCheckpoint
from test_workers import OPTIONS, digests

from oneshot.cli.compress import main
from oneshot.errors import WorkerError
from oneshot.machine.workers import INTERFACE, join_workers

pytestmark = pytest.mark.long

ADDRESSES = "127.0.0.1", "127.0.0.2"
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
SECONDS = 180


@contextmanager
def machines(arguments: list[str], folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield the launchers of two machines that share a run; `folder` gets what each of them says."""
    port = launched(2)[0]["MASTER_PORT"]
    agents = []
    try:
        for rank, address in enumerate(ADDRESSES):
            place = [f"--node-rank={rank}", f"--local-addr={address}"]
            place += [f"--master-addr={ADDRESSES[0]}", f"--master-port={port}"]
            with (folder / f"told {rank}").open("wb") as told:
                agents.append(
                    subprocess.Popen(
                        [*LAUNCH, *place, "-m", "oneshot.compress", *arguments],
                        stdout=told,
                        stderr=told,
                        cwd=Path(__file__).parents[2],
                        env=os.environ | {"OMP_NUM_THREADS": "1"},
                    )
                )
        yield agents
    finally:
        for agent in agents:
            agent.terminate()  # the agent ends its process also
            agent.wait()


def told_by(folder: Path, rank: int) -> str:
    return (folder / f"told {rank}").read_text()


def test_a_machine_that_dies_ends_the_run_and_both_resume_it(
    make_checkpoint: MakeCheckpoint, text_file: Path, tmp_path: Path
) -> None:
    """The other says one sentence, and the resumed run has the bytes of one process."""
    shared = [str(make_checkpoint(layers=6, hidden=64, width=512)), f"--calibration={text_file}", *OPTIONS]
    shared += ["--sparsity=0.2", "--form=stock"]
    arguments = [*shared, f"--output={tmp_path / 'out'}", "--resume"]
    with machines(arguments, tmp_path) as (first, second):
        while first.poll() is None and not list(tmp_path.glob("out.incomplete/record-*.json")):
            time.sleep(0.01)
        [process] = psutil.Process(second.pid).children()
        process.send_signal(signal.SIGKILL)
        second.kill()
        assert first.wait(SECONDS) == 1, told_by(tmp_path, 0)
    ours, _, _ = told_by(tmp_path, 0).partition("torch/distributed/elastic")  # then the launcher tells of the failure
    assert "error: Another process of this run ended" in ours
    assert "Traceback" not in ours
    assert (tmp_path / "out.incomplete").exists()
    with machines(arguments, tmp_path) as agents:
        assert [agent.wait(SECONDS) for agent in agents] == [0, 0], told_by(tmp_path, 0) + told_by(tmp_path, 1)
    assert main([*shared, f"--output={tmp_path / 'one'}"]) == 0
    assert digests(tmp_path / "out") == digests(tmp_path / "one")


def joined(monkeypatch: pytest.MonkeyPatch, first: str) -> str | None:
    """Return the interface that gloo is told when processes join whose first one is at an address."""
    told: list[str | None] = []

    class State:
        process_index, num_processes, local_process_index = 1, 2, 0

        def __init__(self, **_: Any) -> None:
            told.append(os.environ.get(INTERFACE))

    monkeypatch.setattr("accelerate.PartialState", State)
    monkeypatch.setattr("torch.distributed.distributed_c10d._set_pg_timeout", lambda _: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", first)
    before = os.environ.get(INTERFACE)
    assert join_workers(on_cpu=True).rank == 1
    assert os.environ.get(INTERFACE) == before, "a run leaves the environment as it was"
    return told[0]


def own_addresses() -> dict[str, str]:
    """Return the IPv4 addresses of this machine that others may reach, and their interfaces."""
    known = psutil.net_if_addrs().items()
    held = {each.address: name for name, addresses in known for each in addresses}
    return {address: name for address, name in held.items() if re.fullmatch(r"(?!127\.)\d+(\.\d+){3}", address)}


def test_gloo_takes_the_way_to_the_first_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own choice is the address of the host's name: the loopback address, where /etc/hosts says so."""
    for address, interface in own_addresses().items():
        assert joined(monkeypatch, address) == interface
    assert joined(monkeypatch, "127.0.0.1") is None
    assert joined(monkeypatch, "localhost") is None
    assert joined(monkeypatch, "no.such.host.invalid") is None
    monkeypatch.setenv(INTERFACE, "stated")
    assert joined(monkeypatch, "127.0.0.1") == "stated"


def test_who_cannot_be_reached_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("Gloo connectFullMesh failed")

    monkeypatch.setattr("accelerate.PartialState", fail)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(WorkerError, match=rf"cannot be reached.*--master-addr.*{INTERFACE}"):
        join_workers(on_cpu=True)
