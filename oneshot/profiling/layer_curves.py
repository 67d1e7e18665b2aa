"""The curves of one layer, and the errors that they are made of."""

from dataclasses import dataclass

import torch

from oneshot.architecture import RANKED_KINDS, ModelShape
from oneshot.compression.correction import Factors
from oneshot.linalg.interpolative import ordered_factor, trailing_norms
from oneshot.selection import Evidence


@dataclass
class LayerCurves:
    """One layer's rows of the curves of a `Profile`, float64 on the CPU; zeros where nothing was measured here."""

    ffn_errors: torch.Tensor
    ffn_tails: torch.Tensor
    ffn_fluctuation: torch.Tensor
    head_errors: torch.Tensor
    head_tails: torch.Tensor
    query_key_errors: torch.Tensor
    value_errors: torch.Tensor
    rank_errors: torch.Tensor
    expert_errors: torch.Tensor
    expert_order: torch.Tensor
    expert_order_errors: torch.Tensor
    expert_tokens: torch.Tensor

    @classmethod
    def zeros(cls, shape: ModelShape, head_units: int) -> "LayerCurves":
        """Return the curves of a layer with so many removable heads or KV groups, before it is measured."""

        def zeros(*sizes: int) -> torch.Tensor:
            return torch.zeros(sizes, dtype=torch.float64)

        num_experts = 0 if shape.experts is None else shape.experts.count
        return cls(
            ffn_errors=zeros(shape.intermediate_size + 1),
            ffn_tails=zeros(shape.intermediate_size + 1),
            ffn_fluctuation=zeros(shape.intermediate_size),
            head_errors=zeros(head_units + 1),
            head_tails=zeros(head_units + 1),
            query_key_errors=zeros(shape.head_dim + 1),
            value_errors=zeros(shape.head_dim + 1),
            rank_errors=zeros(len(RANKED_KINDS), shape.hidden_size + 1),
            expert_errors=zeros(num_experts + 1 if num_experts else 0),
            expert_order=zeros(num_experts),
            expert_order_errors=zeros(num_experts),
            expert_tokens=zeros(num_experts),
        )


def weighted_norm(evidence: Evidence) -> float:
    """Return `‖R‖_F`, the norm of the weighted columns."""
    energies = evidence.known_gram().diagonal().double() * evidence.output_energies()
    return float(energies.cpu().sum().sqrt())


def head_tail(evidence: Evidence, columns: torch.Tensor) -> float:
    """Return `‖R22‖_F` of the unpivoted QR of all heads' weighted columns, the kept `columns` first (STAT 3.2)."""
    gram = evidence.known_gram()
    goes = torch.ones(len(gram), dtype=torch.uint8, device=columns.device)
    goes.index_fill_(0, columns, 0)
    order = goes.argsort(stable=True)
    norms = evidence.consumer.double().norm(dim=0)
    return float(trailing_norms(ordered_factor(gram, order), norms[order])[len(columns)])


def squared_error(factors: Factors) -> float:
    """Return the relative squared error that the statistics predict."""
    assert factors.predicted_error is not None
    return factors.predicted_error**2
