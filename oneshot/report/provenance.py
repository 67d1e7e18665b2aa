"""The software that shaped a result."""

import platform
from importlib.metadata import PackageNotFoundError, version

from oneshot.version import __version__

PACKAGES = ("torch", "transformers", "safetensors", "datasets", "scipy", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that shape a result; packages that are absent are left out."""
    found = {"python": platform.python_version(), "oneshot": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a machine without datasets
            continue
    return found
