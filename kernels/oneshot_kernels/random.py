r"""Counter-based random integers: a pure function of (seed, stream, index), so there is no state to carry.

    word(seed, stream, index) = mix(key(seed, stream) + (index + 1) g  mod 2^64),   g = 0x9E3779B97F4A7C15
    key(seed, stream)         = mix(mix(seed + g) + (stream + 1) g)

`mix` is the finaliser of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195), for a fixed key this *is*
the SplitMix64 sequence with a random start, which passes BigCrush. NumPy (`uint64`) and torch (`int64` that wraps, any
device) give the same bits. Not for cryptography.
"""

from __future__ import annotations

import numpy as np
import torch

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB


def as_signed(word: int) -> int:
    """Return the int64 with the same 64 bits as the unsigned `word`."""
    word &= MASK
    return word - (1 << 64) if word >> 63 else word


def mix(word: int) -> int:
    """Apply SplitMix64's finaliser, a bijection of 64-bit words, on Python integers."""
    word &= MASK
    word = ((word ^ (word >> 30)) * MULTIPLIER_1) & MASK
    word = ((word ^ (word >> 27)) * MULTIPLIER_2) & MASK
    return word ^ (word >> 31)


def stream_key(seed: int, stream: int) -> int:
    """Return key(seed, stream) of the module's formula, an unsigned 64-bit Python integer."""
    return mix(mix(seed + GOLDEN) + (stream + 1) * GOLDEN)


def words_numpy(seed: int, stream: int, start: int, count: int) -> np.ndarray:
    """Return `uint64[count]`: the words of indices start … start + count - 1."""
    with np.errstate(over="ignore"):
        index = np.arange(start + 1, start + 1 + count, dtype=np.uint64)
        word = np.uint64(stream_key(seed, stream)) + index * np.uint64(GOLDEN)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
        return word ^ (word >> np.uint64(31))


def _shift_right(word: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 to the right, logically (not arithmetically)."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def words_torch(seed: int, stream: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Return `int64[count]` with the same bits as `words_numpy`, computed on `device`."""
    index = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device)
    word = index * as_signed(GOLDEN) + as_signed(stream_key(seed, stream))
    word = (word ^ _shift_right(word, 30)) * as_signed(MULTIPLIER_1)
    word = (word ^ _shift_right(word, 27)) * as_signed(MULTIPLIER_2)
    return word ^ _shift_right(word, 31)


def below_torch(words: torch.Tensor, bound: int) -> torch.Tensor:
    """Return `floor(high32(word) * bound / 2^32)`, int64 in [0, bound), for bound < 2^31 (bias below bound / 2^32)."""
    return _shift_right(_shift_right(words, 32) * bound, 32)


def signs_torch(words: torch.Tensor) -> torch.Tensor:
    """Return +1 where the lowest bit is 0, else -1: int64."""
    return 1 - 2 * (words & 1)
