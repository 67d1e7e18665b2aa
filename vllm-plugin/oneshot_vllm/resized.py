"""The per-layer form of families whose layers are not Llama's, by vLLM's Transformers backend.

The backend builds transformers' own class from the modelling file of the result, and gives it vLLM's attention, linears
and norms. It has no linears that read through coordinates, and no embedding of several ranks: these stay as they are.
"""

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.transformers import TransformersForCausalLM, TransformersMoEForCausalLM


def refuse_own_heads(config: Any) -> None:
    """Raise `ValueError` if a layer has other heads than the config, whose heads the backend takes everywhere."""
    for number, layer in enumerate(config.sizes["layers"]):
        if layer["num_attention_heads"] != config.num_attention_heads:
            raise ValueError(
                f"Layer {number} has {layer['num_attention_heads']} heads where the config has "
                f"{config.num_attention_heads}, which vLLM's Transformers backend cannot hold for this family; "
                "compress with --set heads=none."
            )


class WithExpertWidths:
    """A config that states the width of the experts of every layer, 0 where there are none; configs check types."""

    def __init__(self, config: Any) -> None:
        self._config = config
        layers = config.sizes["layers"]
        self.moe_intermediate_size = [layer["intermediate_size"] if layer["experts"] else 0 for layer in layers]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def refuse_own_numbers(config: Any, count: int) -> None:
    """Raise `ValueError` if a layer has another number of experts than the config, whose `count` the backend takes."""
    for number, layer in enumerate(config.sizes["layers"]):
        if layer["experts"] and layer["experts"]["count"] != count:
            raise ValueError(
                f"Layer {number} has {layer['experts']['count']} experts where the config has {count}, which vLLM's "
                "Transformers backend cannot hold; open this folder with transformers, or compress with --set "
                "expert_counts=equal."
            )


def logit_factor(config: Any) -> float:
    """Return what the family multiplies its logits by: Cohere states a factor, Granite a divisor."""
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return (getattr(config, "logit_scale", None) or 1.0) / divisor


class LowRankLinear(nn.Module):
    """A linear that reads through coordinates. It is no `nn.Linear`, so that the backend leaves it in its place."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self._read = linear._read  # a tuple with the coordinates, which are a submodule of the layer
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """States `(…, inputs)` -> `(…, outputs)`."""
        return nn.functional.linear(self._read[0](x), self.weight, self.bias)


class Resized:
    """What every class of this form has beside one of the backend: a family's own class, with its output head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config: Any = vllm_config.model_config.hf_config
        refuse_own_heads(config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if config.embedding_ranges is not None:
            self.lm_head = None
        self.logits_processor = LogitsProcessor(
            config.vocab_size,
            logits_as_input=self.lm_head is None,
            scale=logit_factor(config),
            soft_cap=getattr(config, "final_logit_softcapping", None),
        )

    def recursive_replace(self) -> None:
        """Give the model vLLM's layers where they can have its sizes. Raises `ValueError` for ranks on several GPUs."""
        low_rank = [name for name, module in self.model.named_modules() if hasattr(module, "_read")]
        if low_rank and get_tensor_model_parallel_world_size() > 1:
            raise ValueError(
                f"{low_rank[0]} has a low rank, which several GPUs cannot share for this family; give "
                "--tensor-parallel-size 1, or compress with --set ranks=none."
            )
        for name in low_rank:
            self.model.set_submodule(name, LowRankLinear(self.model.get_submodule(name)))
        super().recursive_replace()

    def _vocab_embeddings(self) -> set[nn.Embedding]:
        return set() if self.text_config.embedding_ranges is not None else super()._vocab_embeddings()

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Last states `(n, width)` -> logits `(n, vocab_size)`."""
        if self.lm_head is not None:
            return super().compute_logits(hidden_states)
        embedding: Any = self.model.get_input_embeddings()
        return self.logits_processor(None, embedding(hidden_states, to_logits=True))


class OneshotResizedForCausalLM(Resized, TransformersForCausalLM):
    """A family's own class, whose layers have their own sizes, with its output head."""


class OneshotResizedMoEForCausalLM(Resized, TransformersMoEForCausalLM):
    """A mixture of experts, whose layers have their own width of experts; vLLM's fused experts compute them."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config: Any = vllm_config.model_config.hf_config
        refuse_own_numbers(config, vllm_config.model_config.get_num_experts())
        config.engine_has_own_widths = True  # which the modelling file asks for
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def recursive_replace(self) -> None:
        """Give the model vLLM's layers, with the width of each layer's experts."""
        config = self.text_config
        self.text_config = WithExpertWidths(config)
        super().recursive_replace()
        self.text_config = config
