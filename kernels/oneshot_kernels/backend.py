"""The one place that chooses which implementation of a kernel runs.

Rule: the torch version, which on a GPU is cuBLAS; but Triton's, if Triton is installed, where it was measured to be
faster on one: pivots, and sketches that are summed in fp32. ``ONESHOT_KERNELS=reference|torch|triton`` forces one
version for the whole process; an operation without a Triton version then runs torch's. Nothing here falls back in
silence: a missing Triton when it was asked for, or a kernel that fails, is a `KernelError` that carries the reason.
Only a full device stays the `torch.OutOfMemoryError` that callers know.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Literal

import torch

ENVIRONMENT_VARIABLE = "ONESHOT_KERNELS"

Backend = Literal["reference", "torch", "triton"]

WITH_TRITON = ("count_sketch",)  # operations of `run`; pivots choose for themselves


class KernelError(RuntimeError):
    """A kernel cannot run, or failed while it ran. The message names the operation and the reason."""


def triton_installed() -> bool:
    """Return whether `import triton` would find a package (it is not imported here)."""
    return importlib.util.find_spec("triton") is not None


def triton_interpreted() -> bool:
    """Return whether Triton kernels run in Triton's CPU interpreter (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def runs_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is on a GPU of CUDA or ROCm that this build of torch can drive."""
    return tensor.is_cuda and torch.backends.cuda.is_built()


def triton_runs_on(tensor: torch.Tensor) -> bool:
    """Return whether Triton can launch kernels on the device of `tensor`."""
    return runs_on_gpu(tensor) and triton_installed()


def choose_backend(tensor: torch.Tensor, default: Backend = "torch") -> Backend:
    """Return the back end for an operation whose main operand is `tensor`: `default`, or the one that is forced.

    Raises `KernelError` when the environment variable holds an unknown name, or forces Triton where it cannot run.
    """
    forced = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if forced == "":
        return default
    if forced == "torch":
        return "torch"
    if forced == "reference":
        return "reference"
    if forced != "triton":
        raise KernelError(f"{ENVIRONMENT_VARIABLE}={forced!r}: expected reference, torch or triton")
    if not triton_installed():
        raise KernelError(f"{ENVIRONMENT_VARIABLE}=triton, but the package triton is not installed")
    if not tensor.is_cuda and not triton_interpreted():
        raise KernelError(
            f"{ENVIRONMENT_VARIABLE}=triton needs CUDA tensors (got {tensor.device}), or TRITON_INTERPRET=1 set "
            "before triton is imported"
        )
    return "triton"


def load_implementation(operation: str, backend: Backend) -> ModuleType:
    """Import the module of `operation` ("gram", "count_sketch") for `backend`; raises `KernelError` if it fails."""
    module = {"reference": "reference", "torch": "torch_impl", "triton": "kernel"}[backend]
    try:
        return importlib.import_module(f"oneshot_kernels.{operation}.{module}")
    except ImportError as error:
        raise KernelError(f"{operation}: the {backend} version cannot be imported: {error}") from error


def run(operation: str, function: str, tensor: torch.Tensor, *arguments: object, default: Backend = "torch") -> None:
    """Call `function` of the implementation of `operation` that `choose_backend(tensor, default)` names.

    A failure inside a Triton kernel (compilation, launch) is raised as `KernelError`. A full device is not: callers
    who can make their batches smaller wait for `torch.OutOfMemoryError`.
    """
    backend = choose_backend(tensor, default)
    if backend == "triton" and operation not in WITH_TRITON:
        backend = "torch"
    implementation = getattr(load_implementation(operation, backend), function)
    if backend != "triton":
        implementation(*arguments)
        return
    with explained(f"{operation}.{function}", *(one for one in arguments if isinstance(one, torch.Tensor))):
        implementation(*arguments)


@contextmanager
def explained(operation: str, *tensors: torch.Tensor) -> Iterator[None]:
    """Raise what a Triton kernel raises as `KernelError` with the operation and its tensors; a full device as it is."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{tuple(one.shape)}:{one.dtype}" for one in tensors)
        raise KernelError(f"{operation}: the Triton kernel failed on ({shapes}): {error!r}") from error
