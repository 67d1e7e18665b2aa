"""The dtype of the forward passes: `--dtype auto` takes bfloat16 where the machine multiplies it clearly faster."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from oneshot.errors import ConfigError
from oneshot.parsing import did_you_mean, full_dtype

NAMES = ("auto", "float32", "bfloat16", "float16")
COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLEARLY_FASTER = 1.2  # bfloat16 rounds more; and a rate that varies should not change what is taken
ROUNDS = 4  # the fastest counts, because other programs take the caches from some
ROWS = 1024  # tokens of a timed product, fewer if it is large
SMALLEST, LARGEST = 512, 4096  # inputs and outputs of a timed product
OPERATIONS = 2e9  # of a timed product: tens of milliseconds of a core

Rates = Mapping[str, float]  # operations per CPU second by dtype


@dataclass(frozen=True)
class DtypeChoice:
    """A dtype, and why it was taken; no reason is needed if the user named it."""

    dtype: torch.dtype
    reason: str = ""
    measured: bool = False

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@cache
def product_rates(inputs: int, outputs: int, threads: int) -> Rates:
    """Return the operations per CPU second of tokens times a linear of so many inputs and outputs, in either dtype.

    `threads`: those that torch uses now. It takes some tenths of a second, once in a process.
    """
    inputs, outputs = (min(max(size, SMALLEST), LARGEST) for size in (inputs, outputs))
    rows = max(1, min(ROWS, math.ceil(OPERATIONS / (2 * inputs * outputs))))
    seconds = dict.fromkeys(COMPUTE_DTYPES, math.inf)
    for turn in range(1 + ROUNDS):  # the first loads kernels
        for name, dtype in COMPUTE_DTYPES.items():
            tokens, weights = torch.ones(rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
            started = time.process_time()  # other programs take time of the wall's clock alone
            torch.nn.functional.linear(tokens, weights)
            if turn:
                seconds[name] = min(seconds[name], time.process_time() - started)
    return {name: 2 * rows * inputs * outputs / taken for name, taken in seconds.items()}


def stored_dtype(given: Any) -> torch.dtype | str:
    """Return a dtype of torch that is given as such or by a name, also a short one; `auto` stays.

    Raises `ConfigError` for anything else.
    """
    name = full_dtype(str(given))
    if name not in NAMES:
        raise ConfigError(f"--dtype {given} is not one of {', '.join(NAMES)}{did_you_mean(name, NAMES)}")
    dtype: torch.dtype | str = name if name == "auto" else getattr(torch, name)
    return dtype


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a name; see `choose_dtype`."""
    return choose_dtype(name, device).dtype


def choose_dtype(
    name: str, device: torch.device, *, sizes: tuple[int, int] = (1024, 1024), rates: Callable[..., Rates] | None = None
) -> DtypeChoice:
    """Return the dtype of a name; `auto` is bfloat16 on hardware that multiplies it faster, float32 elsewhere.

    Args:
        sizes: inputs and outputs of the linears that take most of the time.
        rates: as `product_rates`, which is not called where one dtype is known to be the right one.
    """
    if name != "auto":
        return DtypeChoice(COMPUTE_DTYPES[name])
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return DtypeChoice(torch.bfloat16, "bfloat16, for which this GPU has units")
        return DtypeChoice(torch.float32, "float32, because this GPU has no units for bfloat16")
    capabilities = torch.cpu.get_capabilities()
    if not (capabilities.get("amx_bf16", False) or capabilities.get("avx512_bf16", False)):
        return DtypeChoice(torch.float32, "float32, because this CPU has no instructions for bfloat16")
    found = (product_rates if rates is None else rates)(*sizes, torch.get_num_threads())
    faster = found["bfloat16"] / found["float32"]
    taken = "bfloat16" if faster >= CLEARLY_FASTER else "float32"
    reason = f"{taken}, because this CPU multiplies bfloat16 {faster:.2g} times as fast as float32"
    return DtypeChoice(COMPUTE_DTYPES[taken], reason, measured=True)
