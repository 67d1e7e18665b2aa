"""The rates of this machine, measured in some tenths of a second."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from oneshot_kernels import cholesky_pivots_
from oneshot_kernels.pivoted_qr.panels import WIDTH
from torch.nn import functional

from oneshot.linalg import products

MATRIX = 1024  # columns of the matrices that are timed on a CPU; a device gets four times as many
PIVOTED = 768
HEADS, HEAD_DIM = 8, 64  # whose attention to as many tokens is timed on a CPU
CAPTURE_SECONDS = 8e-3  # of the graph of a panel, captured anew for every Gram
MOVED_BYTES = 256 * 2**20
WARM_SECONDS = 0.05  # a device at rest has a low clock


@dataclass(frozen=True)
class Rates:
    """The rates of a machine.

    Attributes:
        stream, sums, energies, double: operations of products: in the forward passes, in Grams, in logits and the
            energies of errors, and in float64.
        attention: operations of causal attention's products; None: as many as of the other products in a forward pass.
        pivoted: operations of pivoted Cholesky on a CPU.
        pivot_seconds: seconds of one pivot on a device, without updates of the whole Gram; None for a CPU.
        bandwidth, link: bytes that a device moves in its memory, and to or from pinned host memory.
    """

    stream: float
    sums: float
    energies: float
    double: float
    attention: float | None = None
    pivoted: float = math.inf
    pivot_seconds: float | None = None
    bandwidth: float = math.inf
    link: float = math.inf

    @property
    def on_device(self) -> bool:
        return self.pivot_seconds is not None

    def pivots(self, size: int, kept: float, grams: int = 1) -> float:
        """Return the seconds of `kept` pivots of each of several Grams of `size` columns.

        A device takes a pivot of all Grams at once, and updates one triangle of each after every panel of pivots. The
        time of its memory and of its arithmetic add up, because one product follows the other.
        """
        if self.pivot_seconds is None:
            return grams * size**3 / 3 / self.pivoted
        update = 8 * size**2 / self.bandwidth + WIDTH * size**2 / self.double
        return kept * self.pivot_seconds + grams * kept / WIDTH * update + CAPTURE_SECONDS


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure the rates of this machine now; it takes some tenths of a second."""
    size = MATRIX if device.type == "cpu" else 4 * MATRIX

    def product(of: torch.dtype, by: Callable[[torch.Tensor, torch.Tensor], object] = torch.matmul) -> float:
        matrix = torch.ones(size, size, dtype=of, device=device)
        return 2 * size**3 / _seconds(lambda: by(matrix, matrix), device)

    def gram(columns: int) -> torch.Tensor:
        return torch.eye(columns, dtype=torch.float64, device=device) + 0.1

    if device.type == "cpu":
        single, small = product(torch.float32, products.product), gram(PIVOTED)
        pivoted = PIVOTED**3 / 3 / _seconds(lambda: cholesky_pivots_(small.clone(), rank=PIVOTED), device)
        return Rates(product(dtype), single, single, product(torch.float64), _attention(dtype), pivoted)
    _warm_up(device)
    large, moved = gram(size), torch.empty(MOVED_BYTES, dtype=torch.uint8, device=device)
    waiting = torch.empty(MOVED_BYTES, dtype=torch.uint8, pin_memory=True)
    stream, other = product(dtype), torch.empty_like(moved)

    def pivots(rank: int) -> float:
        return _seconds(lambda: cholesky_pivots_(large.clone(), rank=rank), device)

    return Rates(
        stream,
        sums=stream,
        energies=product(torch.float32),
        double=product(torch.float64),
        pivot_seconds=max(pivots(2 * PIVOTED) - pivots(PIVOTED), 0.0) / PIVOTED,  # without what is once for a Gram
        bandwidth=2 * MOVED_BYTES / _seconds(lambda: other.copy_(moved), device),
        link=MOVED_BYTES / _seconds(lambda: moved.copy_(waiting, non_blocking=True), device),
    )


def _attention(dtype: torch.dtype) -> float:
    """Return the rate of causal attention on a CPU, in 16 bits a fraction of the rate of other products."""
    x = torch.ones(1, HEADS, MATRIX, HEAD_DIM, dtype=dtype)
    attend = partial(functional.scaled_dot_product_attention, x, x, x, is_causal=True)
    return 2 * HEADS * HEAD_DIM * MATRIX**2 / _seconds(attend, x.device)


def _warm_up(device: torch.device) -> None:
    """Warm up the device to its sustained clock."""
    matrix, started = torch.ones(MATRIX, MATRIX, device=device), time.perf_counter()
    while time.perf_counter() - started < WARM_SECONDS:
        matrix = matrix @ matrix * 0.0
        torch.cuda.synchronize(device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the second of two runs."""
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - started
