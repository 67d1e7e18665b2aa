"""The software that shaped a result."""

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from oneshot.version import __version__

PACKAGES = ("torch", "transformers", "safetensors", "datasets", "scipy", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that shape a result; packages that are absent are left out."""
    installed = {name: found for name in PACKAGES if (found := _version(name)) is not None}
    return {"python": platform.python_version(), "oneshot": __version__} | installed


@cache
def _version(package: str) -> str | None:
    """Return the version of an installed package; None for one that is absent, as datasets may be."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
