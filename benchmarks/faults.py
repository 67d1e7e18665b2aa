"""What a run survives: kills at random moments, full disks, damaged files, dead processes; on the real SmolLM2-135M.

Every fault hits the real command line; then the same command with `--resume` runs until it is done. A fault is survived
where the end is byte for byte what an undisturbed run writes, and lost where it is not, or where a command hangs. One
row for every kind of fault goes to `results/faults.jsonl`.
"""

import argparse
import hashlib
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import append_row, parser, provenance, smollm2_gguf

from oneshot.checkpoint import locate_checkpoint
from oneshot.report.card import REPORT_NAME

PATIENCE_SECONDS = 900  # a command that takes longer hangs
TELLING = {REPORT_NAME, "report.html", "README.md"}  # of time and memory: no two runs write the same
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class Runs:
    """One compression, run again and again into folders of its own."""

    def __init__(self, checkpoint: Path, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder = folder
        self._options = [
            *(str(checkpoint), "--sparsity=0.2", "--calibration=builtin", "--device=cpu", "--quiet"),
            *(f"--num-sequences={arguments.num_sequences}", f"--sequence-length={arguments.sequence_length}"),
        ]
        self._environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}

    def start(self, name: str, *more: str, processes: int = 1, **popen: Any) -> subprocess.Popen[str]:
        """The command, in one process or in several."""
        command = [sys.executable, "-m", "oneshot.compress", *self._options, f"--output={self.folder / name}", *more]
        if processes > 1:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
            command = [*launcher, f"--nproc-per-node={processes}", *command]
        popen = {"preexec_fn": heed_interrupts} | popen
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=self._environment, **popen)

    def finish(self, name: str, *more: str, processes: int = 1) -> float:
        """Run to the end; its seconds."""
        started = time.perf_counter()
        process = self.start(name, *more, processes=processes)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
        if process.returncode != 0:
            raise SystemExit(f"{name} failed: {errors}")
        return time.perf_counter() - started

    def finished_layers(self, name: str) -> int:
        """Layers that an interrupted run left."""
        return len(list(self.folder.glob(f"{name}.incomplete/record-*.json")))

    def checksums(self, name: str) -> dict[str, str]:
        """Of every file of an output that does not tell of time or memory."""
        return {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted((self.folder / name).iterdir())
            if path.name not in TELLING
        }


def heed_interrupts() -> None:
    """A shell's background job ignores SIGINT, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop_early(process: subprocess.Popen[str]) -> str:
    """Wait for a process that was hit; its messages. Raises `subprocess.TimeoutExpired` where it hangs."""
    _, errors = process.communicate(timeout=60)
    return errors


def kill_at_random(runs: Runs, name: str, chance: random.Random, longest: float, kind: signal.Signals) -> bool:
    """Kill the run somewhere between its start and its end; False where it was done before."""
    process = runs.start(name, "--resume")
    time.sleep(chance.uniform(0, longest))
    if process.poll() is not None:
        return False
    process.send_signal(kind)
    stop_early(process)
    return True


def fill_disk(runs: Runs, name: str, limit_bytes: int) -> bool:
    """Let the system refuse to write files beyond a size, as a full disk does, part way through; whether it said so."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    process = runs.start(name, "--resume", preexec_fn=limit)
    errors = stop_early(process) if process.wait(PATIENCE_SECONDS) else ""
    return process.returncode == 1 and "cannot be written" in errors and "Traceback" not in errors


def interrupt_in_the_middle(runs: Runs, name: str, layers: int) -> None:
    """Stop a run once some layers are finished."""
    process = runs.start(name, "--resume")
    while process.poll() is None and runs.finished_layers(name) < layers:
        time.sleep(0.02)
    process.kill()
    stop_early(process)


def damage(runs: Runs, name: str, chance: random.Random, kind: str) -> None:
    """Turn a byte, or cut the end, of a random file of an interrupted run."""
    files = [
        path for path in (runs.folder / f"{name}.incomplete").rglob("*") if path.suffix in (".safetensors", ".json")
    ]
    files = [path for path in files if path.name != "fingerprint.json"]  # whose damage is told, and not made good
    path = chance.choice(sorted(files))
    content = bytearray(path.read_bytes())
    if kind == "turned":
        content[chance.randrange(len(content))] ^= 0xFF
    else:
        del content[chance.randrange(len(content)) :]
    path.write_bytes(content)


def kill_one_of_two(runs: Runs, name: str, chance: random.Random) -> bool:
    """Kill one of two processes once a layer is finished; whether the other ended, too."""
    process = runs.start(name, "--resume", processes=2)
    while process.poll() is None and runs.finished_layers(name) < 1:
        time.sleep(0.02)
    time.sleep(chance.uniform(0, 3))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(chance.choice(children)), signal.SIGKILL)
    stop_early(process)
    return process.returncode != 0


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=27, help="at random moments of one run after the other")
    options.add_argument("--others", type=int, default=4, help="of every other kind")
    options.add_argument("--num-sequences", type=int, default=8)
    options.add_argument("--sequence-length", type=int, default=256)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)  # what the rows say
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        runs = Runs(locate_checkpoint(str(smollm2_gguf()), folder), folder, arguments)
        seconds = runs.finish("undisturbed")
        wanted = runs.checksums("undisturbed")
        shared = provenance(
            model="SmolLM2-135M-Instruct",
            num_tokens=arguments.num_sequences * arguments.sequence_length,
            undisturbed_seconds=seconds,
            seed=arguments.seed,
        )

        def judge(fault: str, injected: int, survived: int, **more: Any) -> None:
            row = {"fault": fault, "injected": injected, "survived": survived, "lost": injected - survived}
            append_row("faults", shared | row | more)

        def survives(name: str, **finish: Any) -> bool:
            runs.finish(name, "--resume", **finish)
            return runs.checksums(name) == wanted

        runs.finish("again")
        judge("the same command twice: equal checksums", 1, int(runs.checksums("again") == wanted))

        for kind in KILLS:
            injected = outputs = good = 0
            while injected < arguments.kills // len(KILLS):
                name = f"{kind.name}-{outputs}"
                if kill_at_random(runs, name, chance, 0.5 * seconds, kind):
                    injected += 1
                else:
                    outputs, good = outputs + 1, good + (runs.checksums(name) == wanted)
            good += survives(name)
            outputs += 1
            judge(
                f"{kind.name} at a random moment, then --resume",
                injected,
                injected if good == outputs else 0,
                outputs=outputs,
            )

        def each(fault: str, hit: Callable[[str, int], bool], **finish: Any) -> None:
            survived = 0
            for number in range(arguments.others):
                name = f"{fault.split()[0]}-{number}"
                survived += hit(name, number) and survives(name, **finish)
            judge(fault, arguments.others, survived)

        largest = max(path.stat().st_size for path in (folder / "undisturbed").glob("*.safetensors"))
        each("full disk part way through", lambda name, _: fill_disk(runs, name, chance.randrange(10**6, largest)))

        def damaged(kind: str) -> Callable[[str, int], bool]:
            def hit(name: str, number: int) -> bool:
                interrupt_in_the_middle(runs, name, 5 + number)
                damage(runs, name, chance, kind)
                return True

            return hit

        each("turned byte in an interrupted run", damaged("turned"))
        each("cut file in an interrupted run", damaged("cut"))

        def second_writer(name: str, _: int) -> bool:
            process = runs.start(name, "--resume")
            while process.poll() is None and runs.finished_layers(name) < 1:
                time.sleep(0.02)
            other = runs.start(name, "--overwrite")
            refused = "Another process" in stop_early(other) and other.returncode == 1
            process.communicate(timeout=PATIENCE_SECONDS)
            return refused and process.returncode == 0

        each("second process on the same output", second_writer)

        runs.finish("two", processes=2)
        two = runs.checksums("two")
        survived = 0
        for number in range(arguments.others):
            name = f"dead-{number}"
            died = kill_one_of_two(runs, name, chance)
            runs.finish(name, "--resume", processes=2)
            survived += died and runs.checksums(name) == two
        judge("one of two processes killed", arguments.others, survived)


if __name__ == "__main__":
    main()
