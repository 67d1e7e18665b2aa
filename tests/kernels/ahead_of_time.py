"""Compile every Triton launch of the package for real GPUs on a machine that has none, and print what came out.

    PYTHONPATH=kernels python tests/kernels/ahead_of_time.py [--json]

A driver that only names a target takes the place of CUDA's, and every launch becomes a compilation. So signatures,
constants and the specialisation of arguments are as in the package's own calls. Run it in a process of its own: it
replaces Triton's driver for good, and Triton must not have been imported for its interpreter before.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
os.environ["ONESHOT_KERNELS"] = "triton"

import torch
import triton
from oneshot_kernels import backend, sketch_
from oneshot_kernels.count_sketch import kernel as sketch_kernel
from oneshot_kernels.pivoted_qr import triton_panel
from oneshot_kernels.pivoted_qr.panels import WIDTH, Panel
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm89": GPUTarget("cuda", 89, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm80": 166_912, "sm89": 101_376, "sm90": 232_448, "gfx942": 65_536}  # bytes a block may have
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Compiled:
    """What one launch was compiled to.

    `spilled_bytes` of a thread live in memory for want of registers.
    """

    call: str
    kernel: str
    target: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    shared_limit: int


class Driver:
    """A driver of Triton that knows which GPU it would be, and nothing else."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> ModuleType:
        return torch.cpu


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield (name, call) of everything that the package can launch: dtypes, with n divisible by 16 and not.

    fp16 differs from bf16 in the name of one instruction, so it is compiled for the harder n alone.
    """
    for rows in DTYPES:
        for out in (torch.float32, torch.float64):
            for columns in (65,) if rows == torch.float16 else (128, 65):
                a, sketch = torch.zeros(40, columns).to(rows), torch.zeros(32, columns, dtype=out)
                what = f"{_name(rows)} → {_name(out)}, n = {columns}"
                yield f"sketch {what}", lambda sketch=sketch, a=a: sketch_(sketch, a, row_offset=0, seed=1)
    for out in (torch.float32, torch.float64):
        for columns in (2047, 28_672):  # the number of tiles is a constant of the kernel: few, and the most
            panel = Panel(torch.zeros(1, 1, 1, dtype=out).expand(1, columns, columns), WIDTH, columns)
            yield f"pivots {_name(out)}, n = {columns}", lambda panel=panel: triton_panel.take_pivots_(panel)
    turned = torch.zeros(64, 40, dtype=torch.bfloat16).mT
    yield "sketch of columns, bf16 → fp32", lambda: sketch_(torch.zeros(32, 64), turned, row_offset=0, seed=1)
    late = torch.zeros(40, 64)
    yield "sketch of late rows", lambda: sketch_(torch.zeros(32, 64), late, row_offset=2**33, seed=1)


def compile_for(name: str) -> list[Compiled]:
    """Return a record of every binary that the calls need on the target of that name, under the first such call."""
    found: list[Compiled] = []
    for module in (sketch_kernel, triton_panel):
        for function in vars(module).values():
            if isinstance(function, JITFunction):
                function.device_caches.clear()  # its key is the device, which is "0" for every target
    triton.runtime.driver.set_active(Driver(TARGETS[name]))
    made: dict[tuple[str, str], Any] = {}
    seen: set[tuple[str, str]] = set()
    launch = JITFunction.run

    def compile_only(self: JITFunction, *arguments: object, warmup: bool, **options: object) -> object:
        binary = launch(self, *arguments, warmup=True, **options)
        made[self.__name__, binary.hash] = binary
        return binary

    JITFunction.run = compile_only
    try:
        for call, run in calls():
            made.clear()
            run()
            found += [_record(call, key[0], name, binary) for key, binary in made.items() if key not in seen]
            seen.update(made)
    finally:
        JITFunction.run = launch
    return found


def _record(call: str, kernel: str, target: str, binary: Any) -> Compiled:
    if target.startswith("sm"):
        used = _cuobjdump(binary.asm["cubin"])
        registers, spilled = used["REG"], used["STACK"] + used["LOCAL"]
    else:
        text = binary.asm["amdgcn"]
        registers, spilled = _field(text, ".vgpr_count"), _field(text, ".private_segment_fixed_size")
    shared = int(binary.metadata.shared)
    return Compiled(call, kernel, target, registers, spilled, shared, SHARED_LIMIT[target])


def _cuobjdump(cubin: bytes) -> dict[str, int]:
    """Return what the assembler says of a binary: `REG`, `STACK` and `LOCAL` of a thread, among others."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", text)}


def _field(metadata: str, name: str) -> int:
    """Return a number of the metadata that ends AMD's assembly."""
    (value,) = re.findall(rf"^\s+-?\s*{re.escape(name)}:\s+(\d+)$", metadata, flags=re.MULTILINE)
    return int(value)


def _name(dtype: torch.dtype) -> str:
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}[str(dtype).split(".")[1]]


def table(found: list[Compiled]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| call | kernel | target | registers | spilled bytes | shared bytes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in found:
        cells = (each.call, each.kernel, each.target, each.registers, each.spilled_bytes, each.shared_bytes)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the records of all targets, as Markdown or with `--json` as JSON lines."""
    backend.triton_interpreted = lambda: False
    backend.choose_backend = lambda tensor, default="torch": "triton"  # although no tensor is on a GPU
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with multiprocessing.get_context("fork").Pool(min(len(TARGETS), os.cpu_count() or 1)) as pool:
            found = [record for records in pool.map(compile_for, TARGETS, chunksize=1) for record in records]
    if "--json" in sys.argv[1:]:
        print("\n".join(json.dumps(asdict(record)) for record in found))
    else:
        print(table(found))


if __name__ == "__main__":
    main()
