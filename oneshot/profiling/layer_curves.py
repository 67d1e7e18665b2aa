"""The curves of one layer, and the errors that they are made of."""

import torch

from oneshot.architecture import RANKED_KINDS, ModelShape
from oneshot.compression.correction import Factors
from oneshot.linalg.interpolative import ordered_factor, trailing_norms
from oneshot.selection import Evidence
from oneshot.tensors import Tensors


def unmeasured(shape: ModelShape, head_units: int) -> Tensors:
    """Return one layer's rows of the curves of a `Profile` before it is measured: zeros, float64 on the CPU.

    `head_units`: the most removable heads or KV groups of a layer.
    """
    num_experts = 0 if shape.experts is None else shape.experts.count
    sizes = {
        "ffn_errors": (shape.intermediate_size + 1,),
        "ffn_tails": (shape.intermediate_size + 1,),
        "ffn_fluctuation": (shape.intermediate_size,),
        "head_errors": (head_units + 1,),
        "head_tails": (head_units + 1,),
        "query_key_errors": (shape.head_dim + 1,),
        "value_errors": (shape.head_dim + 1,),
        "rank_errors": (len(RANKED_KINDS), shape.hidden_size + 1),
        "expert_errors": (num_experts + 1 if num_experts else 0,),
        "expert_order": (num_experts,),
        "expert_order_errors": (num_experts,),
        "expert_tokens": (num_experts,),
    }
    return {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}


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
