"""The device and the dtype of a run; cards are described, not there."""

import contextlib

import pytest
import torch

from oneshot.errors import DeviceError
from oneshot.machine import exact_products, limited_memory, resolve_device, resolve_dtype, vendor_solvers


@pytest.mark.parametrize(("has_units", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_bfloat16_needs_units_for_it(has_units: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards before Ampere emulate it, which torch also calls supported."""
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or has_units
    )
    assert resolve_dtype("auto", torch.device("cuda", 0)) == expected


def test_float32_products_are_float32_during_a_run() -> None:
    """NVIDIA's containers set TF32 for the whole process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with exact_products():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cuda.matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("fails", [False, True])
def test_a_device_factorises_by_cusolver_during_a_run_only(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is a setting of the process, which also returns if the run fails."""
    chosen = ["magma"]

    def preferred(library: str | None = None) -> str:
        if library is not None:
            chosen.append(library)
        return chosen[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_linalg_library", preferred)
    with vendor_solvers(torch.device("cpu")):
        assert chosen == ["magma"]
    with contextlib.suppress(ZeroDivisionError), vendor_solvers(torch.device("cuda", 0)):
        assert chosen[-1] == "cusolver"
        if fails:
            raise ZeroDivisionError
    assert chosen[-1] == "magma"


def test_devices_have_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device("cuda") == resolve_device("cuda:1") == torch.device("cuda", 1)
    assert resolve_device("auto", 0) == torch.device("cuda", 0)
    with pytest.raises(DeviceError, match="2 CUDA devices"):
        resolve_device("cuda:2")


def test_the_allocator_keeps_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 80))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: shares.append(share))
    with limited_memory(torch.device("cuda", 0), 20):
        assert shares == [0.25]
    assert shares == [0.25, 1.0]
