"""Tensors on their way to where they are used: read ahead, and moved between the host and a CUDA device.

On a CPU nothing is copied.

A blocking copy between host and device converts on the host if the dtypes differ. So here every tensor crosses in its
own dtype or in the target's, whichever the device has, and is converted on the device. Host memory on the way is
pinned, so that copies need not wait; torch keeps pinned memory for the next layer.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from oneshot.tensors import Tensors


def as_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `tensor.to(like)`, converted on the device if one of them is there."""
    if like.device.type == "cpu":
        return tensor.to(like.dtype).to(like.device)
    return tensor.to(like.device).to(like.dtype)


def uploaded(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on a device, in its own dtype; a CUDA device is not waited for."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def pinned(tensors: Tensors, device: torch.device) -> Tensors:
    """Return the tensors in pinned host memory, to be copied to a CUDA device; unchanged for a CPU."""
    if device.type != "cuda":
        return tensors
    return {name: tensor.pin_memory() for name, tensor in tensors.items()}


def to_host(tensors: Tensors) -> Tensors:
    """Return the tensors in host memory; the device is waited for once."""
    waiting, on_host = False, {}
    for name, tensor in tensors.items():
        if tensor.device.type == "cpu":
            on_host[name] = tensor
            continue
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        on_host[name] = copy.copy_(tensor, non_blocking=True)
        waiting = True
    if waiting:
        torch.cuda.current_stream().synchronize()
    return on_host


class Uploader:
    """Copy tensors to a device on a stream of their own, beside what the device still computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, tensors: Tensors) -> Tensors:
        """Return the tensors on the device, in their own dtypes; the same record on a CPU."""
        if self._stream is None:
            return tensors
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            on_device = {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}
        computing.wait_stream(self._stream)
        for tensor in on_device.values():
            tensor.record_stream(computing)  # its memory is used there and was taken on the other stream
        return on_device


Item = TypeVar("Item")


def prefetch(load: Callable[[int], Item], count: int) -> Iterator[Item]:
    """Yield `load(0) … load(count − 1)`; a thread loads the next item while the caller works on the last."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch") as executor:
        pending = executor.submit(load, 0)
        for index in range(count):
            loaded = pending.result()
            if index + 1 < count:
                pending = executor.submit(load, index + 1)
            yield loaded
            del loaded  # free before the next item is waited for
