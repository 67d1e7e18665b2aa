"""Products in float32, by either library of a CPU, against float64."""

import pytest
import torch

from oneshot.linalg.products import linear, mkl_is_narrow


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("shape", [(64, 48), (128, 576), (65, 48), (0, 48), (2, 64, 48)])
def test_products_are_float32(shape: tuple[int, ...], is_narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 or TF32 would be off by a thousandth; a slice of a larger matrix is not contiguous."""
    monkeypatch.setattr("oneshot.linalg.products.mkl_is_narrow", lambda: is_narrow)
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(*shape, generator=generator), torch.randn(200, shape[-1] + 8, generator=generator)[:, 8:]
    with torch.inference_mode():
        found = linear(x, weight)
    assert found.layout == torch.strided
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"cpu_name": "AMD EPYC", "avx512_f": True}, True),
        ({"cpu_name": "AMD EPYC", "avx512_f": False}, False),
        ({"cpu_name": "Intel Xeon", "avx512_f": True}, False),
        ({}, False),
    ],
)
def test_mkl_is_narrow_on_one_kind_of_cpu(
    capabilities: dict[str, object], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert mkl_is_narrow.__wrapped__() == expected
