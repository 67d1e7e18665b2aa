"""What the sections of `gpu.py` share: rows, timings, and the folder for what they make."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BIG_SHARED_MEMORY = 40 * 10**9


@dataclass(frozen=True)
class Job:
    """What a section is told.

    Attributes:
        section: its name. output: folder of the rows. bundle: what `gpu_bundle.py` made, or what of it has arrived.
        scratch: for models and results; a later section finds there what an earlier one has made.
        tiny: tiny matrices and models, to try the program.
        at_once: sections that share the device with this one, itself included; seconds of a row count for nothing then.
    """

    section: str
    output: Path
    bundle: Path
    scratch: Path
    device: str
    tiny: bool
    at_once: int = 1

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def emit(self, kind: str, **values: Any) -> None:
        """Append a row and show it."""
        row = {"kind": kind, "section": self.section, **values}
        row |= {"at_once": self.at_once} if self.at_once > 1 else {}
        line = json.dumps(row | {"commit": commit(self.bundle), "device": device_name(self.device)})
        with (self.output / "gpu.jsonl").open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(line, flush=True)

    def seconds_of(self, call: Callable[[], object], repetitions: int = 5, budget: float = 3.0) -> float:
        """Return the median seconds of a call after one that warms up; fewer repetitions if the budget is spent.

        A tiny job, which only tries the program, times one call.
        """
        if self.tiny:
            return self.seconds_once(call)
        self.seconds_once(call)
        times: list[float] = []
        begun = time.perf_counter()
        while not times or (len(times) < repetitions and time.perf_counter() - begun < budget):
            times.append(self.seconds_once(call))
        return sorted(times)[len(times) // 2]

    def seconds_once(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call; the device has nothing else to do."""
        self.wait()
        started = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        import torch

        if self.cuda:
            torch.cuda.synchronize()


@cache
def commit(bundle: Path) -> str:
    """Return the commit that the bundle was made of, because `.git` does not travel; without a bundle, git's."""
    notes = sorted(bundle.glob("*/COMMIT"))
    if notes:
        return notes[0].read_text().strip()
    done = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def device_name(device: str) -> str:
    """Return the name of the device that the rows are about."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def scratch_folder(name: str) -> Path:
    """Return a folder in memory if there is enough of it, else in the system's temporary folder."""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > BIG_SHARED_MEMORY:
        return memory / name
    return Path(tempfile.gettempdir()) / name
