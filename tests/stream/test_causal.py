"""Causal attention by blocks of queries, against scaled dot product attention in float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from oneshot.stream import causal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("length", "heads", "groups"), [(64, 1, 1), (causal.BLOCK, 4, 4), (2 * causal.BLOCK + 64, 6, 2)]
)
def test_blocks_attend_as_one(
    length: int, heads: int, groups: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is rounded once; the module's own attention would be off by more in bfloat16."""
    monkeypatch.setattr("oneshot.linalg.products.mkl_is_narrow", lambda: True)
    query, key, value = _drawn(length, heads, groups, dtype)
    before = [one.clone() for one in (query, key, value)]
    with torch.inference_mode():
        found, _ = causal._by_blocks(_module(groups, heads), query, key, value, None, scaling=0.2)
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert all(map(torch.equal, before, (query, key, value)))
    expected = functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=True, scale=0.2, enable_gqa=True
    ).transpose(1, 2)
    error = (found.double() - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype == torch.float32 else 2.0**-8)


@pytest.mark.parametrize(
    ("changes", "is_causal"),
    [
        ({"attention_mask": torch.ones(1, 1, 64, 64).tril(-1).bool() | torch.eye(64).bool()}, True),
        ({}, False),
        ({"is_causal": False}, True),
    ],
)
def test_what_is_not_plainly_causal_stays_torchs(changes: dict[str, Any], is_causal: bool) -> None:
    """A mask, as of a window or of padding, and attention to all tokens."""
    from transformers import AttentionInterface

    query, key, value = _drawn(64, 2, 2, torch.float32)
    arguments: dict[str, Any] = {"attention_mask": None, "scaling": None} | changes
    module = _module(2, 2, is_causal)
    with torch.inference_mode():
        found, _ = causal._by_blocks(module, query, key, value, **arguments)
        expected, _ = AttentionInterface()["sdpa"](module, query, key, value, **arguments)
        everywhere = causal.causal(query, key, value, 64**-0.5)
    assert torch.equal(found, expected)
    assert not torch.allclose(found, everywhere)


def test_attention_has_gradients() -> None:
    query, key, value = (one.requires_grad_() for one in _drawn(64, 2, 2, torch.float32))
    causal._by_blocks(_module(2, 2), query, key, value, None)[0].sum().backward()
    assert query.grad is not None
    assert key.grad is not None


def _drawn(length: int, heads: int, groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, count, length, 64, generator=generator).to(dtype) for count in (heads, groups, groups)]


def _module(groups: int, heads: int, is_causal: bool = True) -> Any:
    return SimpleNamespace(is_causal=is_causal, num_key_value_groups=heads // groups, training=False)
