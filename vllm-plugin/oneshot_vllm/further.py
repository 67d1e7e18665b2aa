"""Layers for further tokens of a per-layer result, as drafts. The result has them whole, so they are vLLM's own."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.models.glm4_moe_mtp import Glm4MoeMTP
from vllm.model_executor.models.utils import get_spec_layer_idx_from_weight_name

OUTSIDE = ("model.embed_tokens.weight", "lm_head.weight")
EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class OneshotGlm4MoeMTP(Glm4MoeMTP):
    """Layers whose tensors have the names of transformers' class."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the stored tensors that belong here, and return the names of what was filled."""
        return super().load_weights(published(self.config, weights))


def published(config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of such layers, and those outside the layers, under the names of published checkpoints."""
    for name, tensor in weights:
        if name not in OUTSIDE and get_spec_layer_idx_from_weight_name(config, name) is None:
            continue
        module, _, linear = name.rpartition(".")
        if linear not in EXPERTS:
            yield name, tensor
            continue
        for number, expert in enumerate(tensor):  # of all experts
            for part, weight in zip(EXPERTS[linear], expert.chunk(len(EXPERTS[linear])), strict=True):
                yield f"{module}.{number}.{part}.weight", weight
