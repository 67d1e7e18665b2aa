"""The counter-based generator: the same bits everywhere, and bits that look random."""

import os

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from oneshot_kernels import random

DEVICE = torch.device(os.environ.get("ONESHOT_TEST_DEVICE", "cpu"))
seeds = st.integers(0, 2**64 - 1)


@given(seeds, st.integers(0, 40), st.integers(0, 2**50), st.integers(1, 50))
def test_torch_and_numpy_give_the_same_bits(seed: int, stream: int, start: int, count: int) -> None:
    words = random.words_numpy(seed, stream, start, count)
    assert np.array_equal(words.view(np.int64), random.words_torch(seed, stream, start, count, DEVICE).cpu().numpy())
    key = random.stream_key(seed, stream)
    assert int(words[-1]) == random.mix(key + (start + count) * random.GOLDEN)


def test_splitmix64_published_values() -> None:
    """First outputs of SplitMix64 started at 1234567 (Vigna's C code), which the same key has to give here."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [random.mix(1234567 + i * random.GOLDEN) for i in (1, 2, 3)] == published


@given(seeds, st.integers(1, 2**31 - 1))
def test_bounded_numbers_and_signs(seed: int, bound: int) -> None:
    words = random.words_torch(seed, 0, 0, 64, DEVICE)
    unsigned = [int(word) % 2**64 for word in words]
    assert random.below_torch(words, bound).tolist() == [(word >> 32) * bound >> 32 for word in unsigned]
    assert random.signs_torch(words).tolist() == [-1 if word & 1 else 1 for word in unsigned]


def test_uniform_and_streams_independent() -> None:
    words = [random.words_torch(7, stream, 0, 40_000, DEVICE) for stream in (0, 1)]
    counts = torch.bincount(random.below_torch(words[0], 10), minlength=10)
    assert float(((counts - 4000.0) ** 2 / 4000.0).sum()) < 27.9  # χ², 9 degrees of freedom, p = 0.001
    signs = [random.signs_torch(word).double() for word in words]
    assert abs(float(signs[0].mean())) < 0.017  # 3.3 σ
    assert abs(float((signs[0] * signs[1]).mean())) < 0.017
