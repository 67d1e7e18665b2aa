"""HOPE's choice of experts that go (Tseng et al. 2026, 2609.18916): experts that serve the same tokens count together.

With the contribution `a_e = g_e ‖o_e‖` of an expert to a token, `F_ij` is the mean of `a_i a_j` over the tokens that
have both experts. The set p of a given size with the least `pᵀ F p` goes.
"""

import numpy as np
import torch
from scipy.optimize import minimize

from oneshot.compression.expert_scores import Routed
from oneshot.linalg.sums import add_product_


class PairSums:
    """Sums over the tokens of a layer with E experts: of products of contributions, and of tokens that have both."""

    def __init__(self, num_experts: int) -> None:
        self.products, self.tokens = (torch.zeros(num_experts, num_experts, dtype=torch.float64) for _ in range(2))

    def add_(self, routed: Routed, outputs: torch.Tensor) -> None:
        """Add a batch, as `ExpertSums.add_`."""
        top_k = routed.gates.shape[1]
        contributions = routed.gates * outputs[:, :top_k].norm(dim=-1)
        for total, values in ((self.products, contributions), (self.tokens, torch.ones_like(contributions))):
            of_experts = torch.zeros(len(values), len(total)).scatter_(1, routed.experts[:, :top_k], values)
            add_product_(total, of_experts, of_experts)

    def interactions(self) -> torch.Tensor:
        """Return F, float64 `(E, E)`; 0 for a pair that no token has."""
        return self.products / self.tokens.clamp_min(1)


def removed_by_pairs(interactions: torch.Tensor, num_removed: int) -> list[int]:
    """Return the experts that go, ascending, as the authors' code finds them.

    The form is minimised over `[0, 1]` with the given sum, by sequential quadratic programming from equal entries. The
    largest entries of that solution are the set.
    """
    form = interactions.numpy()
    found = minimize(
        lambda p: float(p @ form @ p),
        np.full(len(form), num_removed / len(form)),
        jac=lambda p: 2 * form @ p,
        method="SLSQP",
        bounds=[(0.0, 1.0)] * len(form),
        constraints={"type": "eq", "fun": lambda p: p.sum() - num_removed, "jac": np.ones_like},
        options={"maxiter": 1000, "ftol": 1e-12},
    )
    return sorted(np.argsort(-found.x, kind="stable")[:num_removed].tolist())
