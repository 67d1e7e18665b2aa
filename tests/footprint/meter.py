"""Count bytes while code runs on tensors without values: what it would hold at once, and the line that holds most.

    with Meter(answers) as meter:
        work(tensors on torch's meta device)
    print(meter.peak_bytes, meter.peak_site)

A value that the code reads must have an answer, by the name of the function that reads it; a new one is an error.
Memory that a kernel takes for itself is not seen.
"""

import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = f"{Path(__file__).parents[2]}/"
PACKAGES = tuple(f"{ROOT}{name}/" for name in ("oneshot", "kernels"))
READS = {"_local_scalar_dense", "item", "is_nonzero"}


class Meter(TorchDispatchMode):
    """Count live and peak bytes of storages on the meta device, and operations.

    Args:
        answers: the value that a function of the project reads, by the function's name.
    """

    def __init__(self, answers: Mapping[str, Any]) -> None:
        super().__init__()
        self._answers = answers
        self._uncounted: set[int] = set()
        self._live: dict[int, int] = {}
        self.live_bytes = self.peak_bytes = self.operations = 0
        self.peak_site = ""

    def hold(self, *tensors: torch.Tensor) -> None:
        """Count the storages of these tensors as long as they live."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if tensor.device.type == "meta" and key not in self._live and key not in self._uncounted:
                self._live[key] = storage.nbytes()
                self.live_bytes += self._live[key]
                weakref.finalize(storage, self._release, key)
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_site = self.live_bytes, _site()

    def leave_out(self, *tensors: torch.Tensor) -> None:
        """Do not count the storages of these tensors."""
        self._uncounted |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def _release(self, key: int) -> None:
        self.live_bytes -= self._live.pop(key)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or its parts, or give the answer that it reads."""
        kwargs, name = kwargs or {}, function.overloadpacket.__name__
        on_meta = any(isinstance(one, torch.Tensor) and one.is_meta for one in tree_leaves((args, kwargs)))
        if on_meta and name in READS:
            return self._answers[_site().rpartition(" ")[2]]
        if on_meta and (name == "cpu" or torch.device("cpu") in kwargs.values()):
            answer = self._answers.get(_site().rpartition(" ")[2], 1)
            return torch.full(args[0].shape, answer, dtype=kwargs.get("dtype") or args[0].dtype)
        if on_meta and torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd"):
            with self:  # inference mode leaves it whole
                return function.decompose(*args, **kwargs)
        self.operations += 1
        made = function(*args, **kwargs)
        self.hold(*(one for one in tree_leaves(made) if isinstance(one, torch.Tensor)))
        return made


def _site() -> str:
    """Return the innermost line of the project that is being run, and its function."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGES):
            return f"{name[len(ROOT) :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"
