"""Kernels are tested on the CPU, Triton's in its interpreter; with ONESHOT_TEST_DEVICE=cuda all of them on a real GPU.

Triton decides at import whether it interprets, so that comes first.
"""

import importlib.util
import os
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1" if os.environ.get("ONESHOT_TEST_DEVICE", "cpu") == "cpu" else "0"

import pytest
import torch
from matrices import seeded

DEVICE = os.environ.get("ONESHOT_TEST_DEVICE", "cpu")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cpu_only: about what happens without a GPU, so not run on one")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect on a GPU what is about machines without one."""
    left_out = [item for item in items if DEVICE != "cpu" and item.get_closest_marker("cpu_only")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _test_device() -> Iterator[None]:
    """Tensors are made on the device that is tested, unless they say otherwise."""
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def _no_forced_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """No forced back end unless a test forces one."""
    monkeypatch.delenv("ONESHOT_KERNELS", raising=False)


@pytest.fixture(params=["torch", "triton"])
def fast_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each version that has to agree with the reference; Triton ones are skipped, with the reason, without Triton."""
    if request.param == "triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: its kernels cannot run, not even in the interpreter")
    monkeypatch.setenv("ONESHOT_KERNELS", request.param)
    return str(request.param)


@pytest.fixture
def generator(_test_device: None) -> torch.Generator:
    """A fixed source of test data."""
    return seeded(1234)
