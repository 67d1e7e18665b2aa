"""From the calibration text to the factors of a block."""

import hashlib
from dataclasses import dataclass

import torch


def token_hash(token_ids: torch.Tensor) -> str:
    """The SHA-256 of int64 tokens."""
    return hashlib.sha256(token_ids.numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class CalibrationSet:
    """Packed token sequences `(num_sequences, sequence_length)`, int64, and where they came from."""

    token_ids: torch.Tensor
    source: str

    @property
    def token_hash(self) -> str:
        """The SHA-256 of the tokens' bytes."""
        return token_hash(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()


@dataclass(frozen=True)
class Moments:
    """First moments of activations, float64 `(n,)`: `E a`, `E|a|` and `E a²`."""

    mean: torch.Tensor
    absolute_mean: torch.Tensor
    square_mean: torch.Tensor

    @property
    def deviation(self) -> torch.Tensor:
        """Standard deviations `(n,)`."""
        return (self.square_mean - self.mean.square()).clamp_min(0).sqrt()


@dataclass(frozen=True)
class BlockStatistics:
    """What the calibration text says about the activations `A` that a linear `W` consumes.

    Attributes:
        gram: `AᵀA (n, n)` float32.
        residual: `Aᵀ(Y − A Wᵀ) (n, d)` float32: what the dense stream wants beyond the layer's own output; or None.
        residual_energy: `‖Y − A Wᵀ‖²`, a float64 scalar; zero without a residual.
        num_rows: tokens seen.
        sketch: `S A (s, n)` float32 for pivots alone, where the recipe asks for one; or None.
        moments: of the activations, where the recipe asks for them; or None.
        held_out: the part of these sums that comes from a held-out slice of the text, where one is kept apart; or None.
    """

    gram: torch.Tensor
    residual: torch.Tensor | None
    residual_energy: torch.Tensor
    num_rows: int
    sketch: torch.Tensor | None = None
    moments: Moments | None = None
    held_out: "BlockStatistics | None" = None


@dataclass(frozen=True)
class Factors:
    """A compressed block: the columns it keeps and the linear that consumes them.

    Attributes:
        kept: int64, ascending, the kept columns of the consuming linear.
        weight: `(d, k)` float64, its corrected weight over those columns.
        predicted_error: relative Frobenius error of the block's output from the statistics; None without them.
        condition_number, max_interpolation: of the ridged skeleton Gram, of T; None where nothing was solved.
        damping: that of the ridge; None where nothing was solved.
    """

    kept: torch.Tensor
    weight: torch.Tensor
    predicted_error: float | None = None
    condition_number: float | None = None
    max_interpolation: float | None = None
    eigenvalue_fallback: bool = False
    damping: float | None = None
