"""A CUDA device that is not there: tensors that say `cuda:0`, hold host memory and refuse to meet host tensors.

    with pretend() as log:
        work(torch.randn(4, 3).to("cuda"))
    print(log.kernels, log.waits, log.peak_bytes)

Every operation on them is done on the host. On the way are checked or counted, by the line of the project:

- mixed devices: an error, as on CUDA. 0-dimensional host tensors and host indices pass, as CUDA lets them.
- kernels: operations that are no views. One of ours may be several of CUDA's (a sort), so this is a lower bound.
- waits: whatever makes the host wait for the device, by what torch's CUDA sources do (`item`, `nonzero`, masks,
  blocking copies, Python numbers through an index, host numbers in `where`).
- factorisations that torch would give to MAGMA: LU of matrices that are not square, without cuSOLVER preferred.
- operations whose result CUDA does not promise twice, by torch's list and cuSPARSE's (`_by_chance`).
- live and peak bytes of the device's storages, without what a kernel takes for itself: a lower bound, too.
- bytes copied each way, and numbers whose dtype the host converts for a blocking copy.

It patches torch for the whole process, so give it a process of its own. Triton, NCCL and generators are not pretended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # a dispatch mode imports it, and it must not see a patched torch
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).parent
ROOT = str(HERE.parents[1]) + os.sep
PACKAGES = tuple(f"{ROOT}{name}{os.sep}" for name in ("oneshot", "kernels"))
CUDA = torch.device("cuda", 0)

VIEWS = re.compile(
    "_reshape_alias|_unsafe_view|adjoint|alias|as_strided|chunk|detach|diagonal|expand|expand_as|flatten|is_contiguous|"
    "lift_fresh|mT|movedim|narrow|numel|numpy_T|permute|requires_grad_|reshape|resolve_conj|resolve_neg|select|slice|"
    "split|split_with_sizes|squeeze|stride|swapaxes|sym_size|t|transpose|unbind|unflatten|unsqueeze|view|view_as"
)
WAITS = re.compile(
    "_linalg_check_errors|_linalg_eigh|_linalg_svd|_local_scalar_dense|_unique2|argwhere|bincount|equal|is_nonzero|"
    "item|linalg_cholesky|linalg_eigh|linalg_inv|linalg_pinv|linalg_solve|linalg_svd|masked_select|nonzero|"
    "repeat_interleave|unique_consecutive|unique_dim"
)
BY_CHANCE = frozenset(
    ["index_add", "scatter_add", "scatter_reduce", "index_reduce", "put", "histc", "kthvalue", "median", "multinomial"]
)
INDEXED = frozenset(["index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"])
COPIES = frozenset(["copy_", "copy", "_copy_from"])


@dataclass
class Log:
    """What happened on the device; counters are by "file:line" of the project, or "elsewhere"."""

    kernels: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    to_device_bytes: Counter[str] = field(default_factory=Counter)
    from_device_bytes: Counter[str] = field(default_factory=Counter)
    converted_on_host: Counter[str] = field(default_factory=Counter)
    by_chance: Counter[str] = field(default_factory=Counter)
    by_magma: Counter[str] = field(default_factory=Counter)
    linalg_library: str = "default"
    live_bytes: int = 0
    peak_bytes: int = 0
    peak_site: str = ""

    def reset(self) -> None:
        """Forget all counts, and let the peak start from what is live now."""
        for counter in vars(self).values():
            if isinstance(counter, Counter):
                counter.clear()
        self.reset_peak()

    def reset_peak(self) -> None:
        """Let the peak start from what is live now."""
        self.peak_bytes = self.live_bytes


_log = Log()
_storages: dict[int, list[int]] = {}  # address -> [bytes, tensors that use it]


def site() -> str:
    """Return the innermost line of the project, tests apart, that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        if path := _path_in_project(frame.f_code.co_filename):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


@cache
def _path_in_project(path: str) -> str:
    """Return a file's path from the root if it is of the packages; the environment may be in the same folder."""
    return path[len(ROOT) :] if path.startswith(PACKAGES) else ""


class PretendCuda(torch.Tensor):
    """A tensor that says `cuda:0`; `host` holds its numbers."""

    host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> PretendCuda:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=CUDA,
        )
        made.host = host
        address = host.untyped_storage().data_ptr()
        if address:
            entry = _storages.setdefault(address, [host.untyped_storage().nbytes(), 0])
            if entry[1] == 0:
                _log.live_bytes += entry[0]
            entry[1] += 1
            if _log.live_bytes > _log.peak_bytes:
                _log.peak_bytes, _log.peak_site = _log.live_bytes, site()
            weakref.finalize(made, _release, address)
        return made

    def __repr__(self, **_: object) -> str:
        return f"PretendCuda({self.host!r})"

    def tolist(self) -> Any:
        _log.waits[f"{site()} tolist"] += 1
        return self.host.tolist()

    def numpy(self, **_: object) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, list):
            _log.waits[f"{site()} list as an index"] += 1
            key = torch.tensor(key, dtype=torch.int64, device=CUDA)
        super().__setitem__(key, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a tensor on the device is being pickled")

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def _release(address: int) -> None:
    entry = _storages[address]
    entry[1] -= 1
    if entry[1] == 0:
        _log.live_bytes -= entry[0]
        del _storages[address]


def _check_numbered(device: Any) -> None:
    """Refuse a device without a number, as `torch.cuda.set_device` does."""
    if torch.device(device).index is None:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")


class _Stream:
    """A stream or an event of a device that does everything at once; only `synchronize` is a wait of the host."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def synchronize(self) -> None:
        _log.waits[f"{site()} synchronize"] += 1

    def wait_stream(self, _: object = None) -> None:
        pass

    wait_event = record = wait = wait_stream


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _on_device(value: Any) -> bool:
    """Return whether a tensor is on the pretended device; sparse ones, which cannot be wrapped, carry a mark."""
    return isinstance(value, PretendCuda) or getattr(value, "_on_pretended_device", False)


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do one operation on the host, and log what CUDA would have done."""
    name = _name(function)
    tensors = _tensors((*args, *kwargs.values()))
    device_tensors = [each for each in tensors if _on_device(each)]
    host_args, host_kwargs = args, dict(kwargs)
    if device_tensors:
        host_args, host_kwargs = _mapped(_host, args), _mapped(_host, host_kwargs)
    asked = host_kwargs.get("device")
    if _is_cuda(asked):
        host_kwargs["device"] = torch.device("cpu")
    if host_kwargs.get("pin_memory"):
        host_kwargs["pin_memory"] = False
    if name in ("to", "_to_copy"):
        return _convert(function, name, args, kwargs)
    if name == "pin_memory":
        return args[0]
    if name == "is_pinned":
        return True
    if name == "_has_compatible_shallow_copy_type":
        return False
    if name in COPIES:
        target, source = args[0], args[1]
        if _on_device(target) != _on_device(source) and source.numel() > 0:
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            _count_copy(_on_device(target), source, target.dtype, blocking)
        elif device_tensors:
            _log.kernels[site()] += 1
        function(*host_args, **host_kwargs)
        return target
    if device_tensors:
        _check_devices(name, args, tensors)
        _count_waits(name, args)
        if name.startswith("linalg_lu") and args[0].shape[-1] != args[0].shape[-2] and _log.linalg_library == "default":
            _log.by_magma[f"{site()} {name}"] += 1
        if _by_chance(name, args, kwargs):
            _log.by_chance[f"{site()} {name}"] += 1
    if (device_tensors or _is_cuda(asked)) and not (_is_one_of(VIEWS, name) or _is_one_of(WAITS, name)):
        _log.kernels[site()] += 1
    if name == "addmm" and function._overloadname in ("dtype", "dtype_out"):
        result = _addmm_in_wider_dtype(*host_args, **host_kwargs)
    elif name == "bmm" and function._overloadname == "dtype":
        result = _bmm_in_wider_dtype(*host_args, **host_kwargs)
    elif name == "histc":  # of integers, which the host does not have
        result = function(host_args[0].float(), *host_args[1:], **host_kwargs).to(host_args[0].dtype)
    else:
        result = function(*host_args, **host_kwargs)
    to_device = bool(device_tensors) if asked is None else _is_cuda(asked)
    known = {id(each.host): each for each in tensors if isinstance(each, PretendCuda)}
    return _mapped(lambda each: _wrap(each, to_device, known), result)


@cache
def _name(function: Any) -> str:
    name: str = function.overloadpacket._qualified_op_name.split("::")[1]
    return name


@cache
def _is_one_of(names: re.Pattern[str], name: str) -> bool:
    return names.fullmatch(name) is not None


def _tensors(value: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors in lists and tuples; torch's own functions for trees take most of the time of small runs."""
    found: list[torch.Tensor] = []
    for part in value:
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif isinstance(part, list | tuple):
            found += _tensors(part)
    return found


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return lists, tuples and dictionaries with every value in them changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([_mapped(change, part) for part in value])
    if isinstance(value, dict):
        return {key: _mapped(change, part) for key, part in value.items()} if value else value
    return change(value)


def _host(value: Any) -> Any:
    return value.host if isinstance(value, PretendCuda) else value


def _wrap(value: Any, to_device: bool, known: dict[int, PretendCuda]) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, PretendCuda):
        return value
    if id(value) in known:  # an operation in place returns its argument
        return known[id(value)]
    if value.layout != torch.strided:
        value._on_pretended_device = to_device  # type: ignore[attr-defined]
        return value
    return PretendCuda(value) if to_device and value.device.type == "cpu" else value


def _addmm_in_wider_dtype(
    start: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return start + left right, products and sums in `out_dtype`: cuBLAS has that for halves, the host has not."""
    halves = (torch.bfloat16, torch.float16)
    if left.dtype != right.dtype or left.dtype not in halves or not start.dtype == out_dtype == torch.float32:
        raise RuntimeError("addmm with out_dtype takes bf16 or fp16 rows and sums in fp32")
    found = torch.addmm(start, left.to(out_dtype), right.to(out_dtype))
    return found if out is None else out.copy_(found)


def _bmm_in_wider_dtype(left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Return products of several matrices in `out_dtype`, otherwise as `_addmm_in_wider_dtype`."""
    if left.dtype != right.dtype or left.dtype not in (torch.bfloat16, torch.float16) or out_dtype != torch.float32:
        raise RuntimeError("bmm with out_dtype takes bf16 or fp16 rows and sums in fp32")
    return torch.bmm(left.to(out_dtype), right.to(out_dtype))


def _check_devices(name: str, args: Any, tensors: list[torch.Tensor]) -> None:
    if name in INDEXED:
        indices = _tensors(args[1])
        if not _on_device(args[0]) and any(map(_on_device, indices)):
            raise _mixed(name)
        if name.startswith("index_put") and not _on_device(args[2]) and args[2].dim() > 0:
            raise _mixed(name)
    elif any(not _on_device(each) and each.dim() > 0 and each.device.type == "cpu" for each in tensors):
        raise _mixed(name)


def _mixed(name: str) -> RuntimeError:
    return RuntimeError(
        f"{site()} {name}: expected all tensors to be on the same device, but found two, cuda:0 and cpu!"
    )


def _by_chance(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether CUDA may give other bits for the same operands: sums by atomics, and scans of a single row."""
    base = name.removesuffix("_")
    if base in ("index_put", "_index_put_impl"):
        return bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False))
    if base == "bincount":
        return len(args) > 1 and args[1] is not None
    if base == "histc":  # whole numbers add up to the same in any order
        return args[0].is_floating_point()
    if base == "median":  # the number is the same, and its place is not
        return len(args) > 1
    if base in ("cumsum", "cumprod"):
        return args[0].is_floating_point() and args[0].numel() == args[0].shape[args[1]] > 1
    operands = (each for each in args if isinstance(each, torch.Tensor))
    return base in BY_CHANCE or any(each.layout != torch.strided for each in operands)


def _count_waits(name: str, args: Any) -> None:
    found = []
    if _is_one_of(WAITS, name):
        found.append(name)
    if name in INDEXED:
        indices = _tensors(args[1])
        masks = [each for each in indices if each.dtype in (torch.bool, torch.uint8)]
        writes = name.startswith("index_put")
        found += ["boolean mask" for _ in masks if not writes]
        found += ["host index" for each in indices if not _on_device(each)]
        # A number written where a mask is true is `masked_fill_`, which takes it along; elsewhere it is copied.
        if writes and not _on_device(args[2]) and not masks:
            found.append("host number written through an index")
    if name == "where" and any(isinstance(each, torch.Tensor) and not _on_device(each) for each in args):
        found.append("host tensor in where")
    if name in ("index_fill", "index_fill_", "masked_fill", "masked_fill_") and _on_device(args[-1]):
        found.append("device number to fill with")
    for each in found:
        _log.waits[f"{site()} {each}"] += 1


def _count_copy(to_device: bool, source: torch.Tensor, dtype: torch.dtype, blocking: bool) -> None:
    """Log a copy between host and device. A blocking one converts on the host, before or after the transfer."""
    where, converts = site(), source.dtype != dtype
    size = source.numel() * (dtype.itemsize if to_device and converts else source.element_size())
    (_log.to_device_bytes if to_device else _log.from_device_bytes)[where] += size
    if blocking:
        _log.waits[f"{where} blocking copy {'to' if to_device else 'from'} the device"] += 1
        if converts:
            _log.converted_on_host[where] += source.numel()


def _convert(function: Any, name: str, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Do `Tensor.to` in any of its forms."""
    tensor, rest = args[0], list(args[1:])
    options = dict(kwargs)
    if function._overloadname == "other":
        options |= {"device": rest[0].device, "dtype": rest[0].dtype}
        rest = rest[1:]
    names = {"device": ["device", "dtype"], "dtype": ["dtype"], "other": []}.get(function._overloadname, [])
    options |= dict(zip([*names, "non_blocking", "copy"], rest, strict=False))
    device, dtype = options.get("device"), options.get("dtype") or tensor.dtype
    if device is not None and torch.device(device).type == "meta":
        return torch.empty_like(getattr(tensor, "host", tensor), device="meta", dtype=dtype)
    was = _on_device(tensor)
    will = was if device is None else _is_cuda(device)
    if was == will and dtype == tensor.dtype and not options.get("copy", name == "_to_copy"):
        return tensor
    if was != will and tensor.numel() > 0:
        _count_copy(will, tensor, dtype, not options.get("non_blocking", False))
    elif will:
        _log.kernels[site()] += 1
    layout = {} if options.get("memory_format") is None else {"memory_format": options["memory_format"]}
    made = getattr(tensor, "host", tensor).to(dtype=dtype, copy=True, **layout)
    return PretendCuda(made) if will else made


def _load_guard() -> None:
    """Load `guard.cpp`, compiled on first use into the user's cache for this version of torch.

    Raises RuntimeError where there is no g++.
    """
    source = HERE / "guard.cpp"
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "oneshot"
    library = cache / f"guard-{re.sub('[^0-9A-Za-z.]', '-', torch.__version__)}-{int(source.stat().st_mtime)}.so"
    if not library.exists():
        compiler = shutil.which("g++")
        if compiler is None:
            raise RuntimeError("The pretended CUDA device needs g++ to compile tests/device/guard.cpp: install it.")
        cache.mkdir(parents=True, exist_ok=True)
        made, parts = library.with_suffix(f".{os.getpid()}"), Path(torch.__file__).parent
        flags = ["-std=c++20", "-fPIC", "-shared", f"-I{parts / 'include'}", f"-L{parts / 'lib'}", "-lc10"]
        subprocess.run([compiler, str(source), *flags, "-o", str(made)], check=True)
        made.replace(library)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


@contextlib.contextmanager
def pretend(total_bytes: int = 80 * 10**9) -> Iterator[Log]:
    """Make `cuda:0` a device of so many bytes for the time of the block; yields the log."""
    _load_guard()
    _log.reset()
    tensor, new_tensor = torch.tensor, torch.Tensor.new_tensor

    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        made = tensor(data, *args, **kwargs)
        if not _is_cuda(device):
            return made
        _log.waits[f"{site()} torch.tensor onto the device"] += 1
        return PretendCuda(made)

    def make_like(self: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
        made = new_tensor(getattr(self, "host", self), data, **kwargs)
        return PretendCuda(made) if _on_device(self) else made

    def preferred_library(library: str | None = None) -> str:
        _log.linalg_library = library or _log.linalg_library
        return _log.linalg_library

    def nothing(*_: object, **__: object) -> None:
        return None

    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "mem_get_info": lambda device=None: (total_bytes - _log.live_bytes, total_bytes),
        "memory_allocated": lambda device=None: _log.live_bytes,
        "memory_reserved": lambda device=None: _log.live_bytes,
        "max_memory_allocated": lambda device=None: _log.peak_bytes,
        "max_memory_reserved": lambda device=None: _log.peak_bytes,
        "reset_peak_memory_stats": lambda device=None: _log.reset_peak(),
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_name": lambda device=None: "Pretended",
        "set_device": _check_numbered,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": _Stream,
        "stream": contextlib.nullcontext,
        "get_device_capability": lambda device=None: (9, 0),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        **dict.fromkeys(
            [
                "synchronize",
                "_lazy_init",
                "empty_cache",
                "manual_seed",
                "manual_seed_all",
                "set_per_process_memory_fraction",
                "set_rng_state",
            ],
            nothing,
        ),
    }
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(torch.backends.cuda, "preferred_linalg_library", preferred_library),
        mock.patch.object(torch, "tensor", make),
        mock.patch.object(torch.Tensor, "new_tensor", make_like),
        mock.patch.object(torch.Tensor, "pin_memory", lambda self: self),  # also in threads, which have no mode
        mock.patch.object(torch.Tensor, "record_stream", nothing),
        _Mode(),
    ):
        yield _log
