"""Kernels are tested in Triton's CPU interpreter; Triton decides at import, so this comes first."""

import importlib.util
import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

BACKENDS = ["reference", "torch", "triton"]


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
def generator() -> torch.Generator:
    """A fixed source of test data."""
    return torch.Generator().manual_seed(1234)
