"""Products in float32, by either library of a CPU, against float64."""

import pytest
import torch

from oneshot.linalg.products import linear, mkl_is_narrow, product, rounded_product


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (128, 576), (65, 64), (64, 48), (0, 64), (2, 64, 64)])
def test_products_are_float32(shape: tuple[int, ...], is_narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 or TF32 would be off by a thousandth; a slice of a larger matrix is not contiguous."""
    monkeypatch.setattr("oneshot.linalg.products.mkl_is_narrow", lambda: is_narrow)
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(*shape, generator=generator), torch.randn(192, shape[-1] + 8, generator=generator)[:, 8:]
    with torch.inference_mode():
        found = [linear(x, weight), product(x, weight.T), product(x.mT.contiguous().mT, weight.T)]
    for one in found:
        torch.testing.assert_close(one.double(), x.double() @ weight.double().T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("is_narrow", [False, True])
def test_products_have_gradients(is_narrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's operator has no derivative, and would leave the factors out of a graph without a word."""
    monkeypatch.setattr("oneshot.linalg.products.mkl_is_narrow", lambda: is_narrow)
    weight = torch.ones(64, 64, requires_grad=True)
    linear(torch.ones(64, 64), weight).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((64, 64), 64.0))


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.bfloat16, 2.0**-8)])
def test_a_product_of_float64_is_rounded_once(dtype: torch.dtype, error: float) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.rand(64, 64, generator=generator), torch.rand(64, 64, generator=generator).double()
    found, exact = rounded_product(left, right, dtype), left.double() @ right
    assert found.dtype == dtype
    assert float(((found.double() - exact) / exact).abs().max()) < error


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
