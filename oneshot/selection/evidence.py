"""The evidence that selectors choose by: statistics of a sublayer's columns, and the weights on both sides."""

from dataclasses import dataclass

import torch

from oneshot.linalg.pivoted_qr import GROUP_SIZE
from oneshot.linalg.products import product
from oneshot.method import Pivoting


@dataclass(frozen=True)
class Moments:
    """Moments of activations, float64 `(n,)`: `E a` and `E a²`."""

    mean: torch.Tensor
    square_mean: torch.Tensor

    @property
    def deviation(self) -> torch.Tensor:
        """Return the standard deviations `(n,)`."""
        return (self.square_mean - self.mean.square()).clamp_min(0).sqrt()


@dataclass(frozen=True)
class Evidence:
    """The evidence of a selector: a sublayer's columns `A`, the linear that reads them, the weights that make them.

    Attributes:
        consumer: `(d, n)` without its bias.
        producer_energy: `(n,)`: squared norms of the rows that make each column, summed over linears; None for
            selectors that do not need `producers`.
        gram: `AᵀA (n, n)`; None for selectors that only look at weights.
        generator: source of the selector `random`.
        moments: means and deviations of the columns; None for selectors that do not need `moments`.
        sketch: `S A (s, n)` to choose pivots from instead of the Gram; or None.
        pivoting, group_size: how `id` finds pivots of neurons, as in `linalg.pivoted_qr.weighted_pivots`.
        curvature: `(d, d)` of the consumer's output, by which `id` weighs neurons instead; or None.
    """

    consumer: torch.Tensor
    producer_energy: torch.Tensor | None
    gram: torch.Tensor | None
    generator: torch.Generator
    moments: Moments | None = None
    sketch: torch.Tensor | None = None
    pivoting: Pivoting = "cholesky"
    group_size: int = GROUP_SIZE
    curvature: torch.Tensor | None = None

    def known_gram(self) -> torch.Tensor:
        """Return the Gram, for a selector that needs it."""
        assert self.gram is not None
        return self.gram

    def known_moments(self) -> Moments:
        """Return the moments, for a selector that needs them."""
        assert self.moments is not None
        return self.moments

    def output_energies(self) -> torch.Tensor:
        """Return the squared norms `‖w_j‖²` of the consumer's columns, float64 `(n,)`."""
        return self.consumer.double().square().sum(0)

    def column_weights(self) -> torch.Tensor:
        """Return the weights of the columns in `id`, the norms of the consumer's columns (STAT A.3), float64 `(n,)`."""
        return self.consumer.double().norm(dim=0)

    def weighted_gram(self) -> torch.Tensor:
        """Return the Gram of the weighted columns, float64 `(n, n)`."""
        weights = self.column_weights()
        return self.known_gram().double() * weights * weights.unsqueeze(1)

    def neurons(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the Gram `(n, n)` of neurons and the weights `(n,)` of its columns, by which `id` takes pivots."""
        if self.curvature is None:
            return self.known_gram(), self.column_weights()
        gram = neuron_gram(self.known_gram(), self.consumer, self.curvature)
        return gram, torch.ones(len(gram), dtype=torch.float64, device=gram.device)


def neuron_gram(gram: torch.Tensor, weight: torch.Tensor, curvature: torch.Tensor) -> torch.Tensor:
    """Return `H ∘ (Wᵀ G W)` for neurons with the Gram `H (n, n)` that `W (D, n)` reads.

    The outer product of a token's column of `G^½ W` and its activation is what a neuron does to the model's output;
    this is the Gram of these, positive semi-definite by Schur. With `G = I` and its diagonal alone it would be the
    weighted Gram of `Evidence.column_weights`. Products are in the dtype of `H`, float32, as those in `H` and `G` are.
    """
    columns = weight.to(gram)
    return product(columns.T, product(curvature.to(gram), columns)).mul_(gram)


def neuron_gram_bytes(columns: int, outputs: int) -> int:
    """Return the bytes of `neuron_gram` and of what it is made of."""
    return 4 * (columns**2 + 2 * outputs * columns)
