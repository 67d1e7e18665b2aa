"""The software that shaped a result."""

import hashlib
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import oneshot_kernels
import torch

from oneshot.version import __version__

PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "datasets"),
    *("scipy", "numpy", "gguf", "triton", "compressed-tensors"),
)
PROCESSORS = Path("/proc/cpuinfo")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that shape a result; packages that are absent are left out."""
    installed = {name: found for name in PACKAGES if (found := _version(name)) is not None}
    return {"python": platform.python_version(), "oneshot": __version__} | installed


@cache
def code_hash() -> str:
    """Return the SHA-256 of this package's source: a version may have any code while it is developed."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parents[1], Path(str(oneshot_kernels.__file__)).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def processor_name() -> str:
    """Return the host's processor and the instructions that torch uses of it, which decide the rounding of sums."""
    lines = PROCESSORS.read_text().splitlines() if PROCESSORS.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


@cache
def _version(package: str) -> str | None:
    """Return the version of an installed package; None for one that is absent, as datasets may be."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
