"""Measured error curves and sensitivities: a profile."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from oneshot.architecture import Table


@dataclass(frozen=True)
class ProfileOrigin:
    """The origin of a profile: the model, the text, and the settings that shape its curves.

    `config_hash`: the SHA-256 of config.json, whose numbers decide activations as weights do.
    `curvature`: as in `Method`. With it the errors of FFNs and of ranks are in its metric instead of squared.
    `weights`: a hash of every tensor that was read, by its stored name.
    """

    model_hash: str
    config_hash: str
    token_hash: str
    head_unit: str
    damping: float
    probe_tokens: int
    versions: dict[str, str]
    curvature: str = "none"
    weights: dict[str, str] = field(default_factory=dict, repr=False)


def _unknown() -> torch.Tensor:
    return torch.empty(0, 0, dtype=torch.float64)


@dataclass(frozen=True)
class Profile:
    """Error curves and sensitivities of the dense model's sublayers; float64 tensors with a row for every layer.

    Attributes:
        ffn_errors: `(layers, n + 1)`: relative squared error of the FFN's output with the k best neurons and the best
            correction, for every k.
        head_errors: `(layers, units + 1)`: the same of attention, for every number of kept head units; zeros if heads
            were not profiled.
        ffn_tails: `(layers, n + 1)`: `‖R22‖_F` of the pivoted QR of the neurons' activations, weighted by the norms of
            the columns that read them, for every number k of kept neurons (STAT section 3.3, A.3).
        head_tails: `(layers, units + 1)`: the same of the columns of all heads, kept heads first (STAT
            section 3.2, step 2); zeros if heads were not profiled.
        query_key_errors: `(layers, h + 1)`: what every size of queries and keys loses of the scores
            (`inner_heads.query_key_errors`); zeros if they were not profiled.
        value_errors: `(layers, h + 1)`: what every size of values loses of attention's output
            (`inner_heads.value_errors`); zeros if they were not profiled.
        query_key_sensitivity: `(layers,)`: as `ffn_sensitivity`, per unit of `query_key_errors`.
        value_sensitivity: `(layers,)`: as `ffn_sensitivity`, per unit of `value_errors`.
        ffn_sensitivity: `(layers,)`: mean KL divergence (nats per token) of the model's output from the dense one's if
            only this FFN is reduced, per unit of its relative squared error.
        head_sensitivity: `(layers,)`: the same of attention.
        rank_errors: `(layers, kinds, D + 1)`: mean squared error of the sublayer's output for every rank of a linear of
            each of `RANKED_KINDS`; zeros if they were not profiled.
        expert_errors: `(layers, E + 1)`: squared error of the mixture's output with its best k of E experts,
            uncorrected, as a share of the error with the fewest that a layer may keep, and one below these; zeros if
            they were not profiled.
        expert_sensitivity: `(layers,)`: as `ffn_sensitivity`, per unit of `expert_errors`.
        stream_sensitivity: `(layers,)`: the same divergence per unit of mean squared error that the reduced FFN adds to
            the stream.
        layer_divergence: `(layers,)`: the same divergence if only this layer is left out.
        head_divergence: `(layers,)`: the same divergence if only the layer's attention is left out.
        ffn_divergence: `(layers,)`: the same divergence if only the layer's FFN is left out.
        block_influence: `(layers,)`: one minus the mean cosine of the layer's input and output (ShortGPT equation 1).
        ffn_fluctuation: `(layers, n)`: variance of every neuron's activation, times its squared norm in the output
            linear.
        token_probabilities: `(N,)`: how often each token is predicted; empty if no table was measured.
        embedding_gram: `(D, D)`: what a change of a row costs as a row of a tied output head, the mean `h hᵀ` of what
            it reads, and with output curvature also as the input of the first layer (`profiling.embedding`).
            `embedding_*` are empty if its sensitivity was not measured.
        embedding_order: `(N,)` int64: the tokens in the order in which they are cut into ranges of the vocabulary.
        embedding_errors: `(ranges, D + 1)`: what rank r of a range of the vocabulary loses of the logits, for every r
            (`embedding.range_errors`); the sum over ranges is one at rank 0; infinite for a forbidden rank.
        embedding_probes: `(probes, 2)`: these errors of a reduced embedding, and the divergence if only it is reduced.
        output_head_gram: the same of an output head of its own; `output_head_*` are empty for a tied one.
        output_head_order: as `embedding_order`.
        output_head_errors: as `embedding_errors`.
        output_head_probes: as `embedding_probes`, of a smaller head.
        origin: the model, the text and the settings that it was measured with.
        expert_order: `(layers, E)`: experts from the most to the least needed; empty in profiles of older versions.
        expert_order_errors: `(layers, E)`: what is lost, in the unit of `expert_errors`, if only the experts before
            each stay; zeros as there, and empty as `expert_order`.
        expert_tokens: `(layers, E)`: tokens of the profile's text that every expert got; empty as `expert_order`.
    """

    ffn_errors: torch.Tensor
    head_errors: torch.Tensor
    ffn_tails: torch.Tensor
    head_tails: torch.Tensor
    query_key_errors: torch.Tensor
    value_errors: torch.Tensor
    ffn_sensitivity: torch.Tensor
    head_sensitivity: torch.Tensor
    query_key_sensitivity: torch.Tensor
    value_sensitivity: torch.Tensor
    rank_errors: torch.Tensor
    expert_errors: torch.Tensor
    expert_sensitivity: torch.Tensor
    stream_sensitivity: torch.Tensor
    layer_divergence: torch.Tensor
    head_divergence: torch.Tensor
    ffn_divergence: torch.Tensor
    block_influence: torch.Tensor
    ffn_fluctuation: torch.Tensor
    token_probabilities: torch.Tensor
    embedding_gram: torch.Tensor
    embedding_order: torch.Tensor
    embedding_errors: torch.Tensor
    embedding_probes: torch.Tensor
    output_head_gram: torch.Tensor
    output_head_order: torch.Tensor
    output_head_errors: torch.Tensor
    output_head_probes: torch.Tensor
    origin: ProfileOrigin
    expert_order: torch.Tensor = field(default_factory=_unknown)
    expert_order_errors: torch.Tensor = field(default_factory=_unknown)
    expert_tokens: torch.Tensor = field(default_factory=_unknown)

    def of_table(self, table: Table, name: Literal["gram", "order", "errors", "probes"]) -> torch.Tensor:
        """Return the tensor of this name of a table of the vocabulary."""
        found: torch.Tensor = getattr(self, f"{table}_{name}")
        return found

    def __repr__(self) -> str:
        return f"Profile({len(self.ffn_errors)} layers, {self.origin})"
