"""The per-layer form of families whose layers are not Llama's, by vLLM's Transformers backend.

The backend builds transformers' own class from the modelling file of the result, and gives it vLLM's attention, linears
and norms. It has no linears that read through coordinates, and no embedding of several ranks: these stay as they are.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.fused_moe import FusedMoEFactory, MoERunner
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.transformers import TransformersForCausalLM, TransformersMoEForCausalLM, moe
from vllm.model_executor.models.transformers.utils import replace_linear_class
from vllm.model_executor.models.utils import extract_layer_index

from oneshot_vllm.low_rank import Embedding
from oneshot_vllm.refusals import ResizedRefusals, style_of


def logit_factor(config: Any) -> float:
    """Return what the family multiplies its logits by: Cohere states a factor, Granite a divisor."""
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return (getattr(config, "logit_scale", None) or 1.0) / divisor


class UnsharedLinear(nn.Module):
    """A linear of low rank of older results. It is no `nn.Linear`, so that the backend leaves it in its place."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self._read = linear._read  # a tuple with the coordinates, which are a submodule of the layer
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """States `(…, inputs)` -> `(…, outputs)`."""
        return nn.functional.linear(self._read[0](x), self.weight, self.bias)


def read_by_all(read: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what reads the whole width where every GPU has a share of it."""
    return lambda x: read(tensor_model_parallel_all_gather(x))


def reads_ranges(config: Any) -> bool:
    """Return whether the output head is the embedding's ranges of the vocabulary."""
    return config.embedding_ranges is not None and config.sizes["head"] != "own"


class Resized:
    """What every class of this form has beside one of the backend: a family's own class, with its output head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        ResizedRefusals.verify_and_update_config(vllm_config)  # also if vLLM's table of configs was not asked
        config: Any = vllm_config.model_config.hf_config
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        ranges = getattr(config, "output_head_ranges", None)  # which older results do not state
        if reads_ranges(config):
            self.lm_head = None
        elif ranges is not None and self.pp_group.is_last_rank:
            self.lm_head = Embedding(ranges, self.text_config.hidden_size)
        self.logits_processor = LogitsProcessor(
            config.vocab_size,
            logits_as_input=self.lm_head is None or isinstance(self.lm_head, Embedding),
            scale=logit_factor(config),
            soft_cap=getattr(config, "final_logit_softcapping", None),
        )

    def recursive_replace(self) -> None:
        """Give the model vLLM's layers where they can have its sizes."""
        low_rank = [name for name, module in self.model.named_modules() if hasattr(module, "_read")]
        for name in low_rank:
            module = self.model.get_submodule(name)
            style = style_of(name, self.model.tp_plan or {})
            if isinstance(module, nn.Linear):
                if self.tp_group.world_size > 1:
                    raise ValueError(
                        "The result is of an older version, whose low ranks GPUs cannot share; give "
                        "--tensor-parallel-size 1, or compress again."
                    )
                self.model.set_submodule(name, UnsharedLinear(module))
            elif style == "rowwise":  # no `nn.Linear`, so the backend leaves it
                module.linear = replace_linear_class(
                    module.linear, "rowwise_split_input", prefix=f"model.{name}.linear"
                )
                module._read = (read_by_all(module._read[0]),)
            else:
                module.linear = replace_linear_class(module.linear, style or "replicate", prefix=f"model.{name}.linear")
        super().recursive_replace()

    def _get_tie_word_embeddings(self) -> bool:
        """Return whether the last stage of a pipeline also needs the embedding."""
        return reads_ranges(self.text_config) or super()._get_tie_word_embeddings()

    def _vocab_embeddings(self) -> set[nn.Embedding]:
        return set() if self.text_config.embedding_ranges is not None else super()._vocab_embeddings()

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Last states `(n, width)` -> logits `(n, vocab_size)`."""
        if isinstance(self.lm_head, Embedding):
            return self.logits_processor(None, self.lm_head.logits(hidden_states))
        if self.lm_head is not None:
            return super().compute_logits(hidden_states)
        embedding: Any = self.model.get_input_embeddings()
        return self.logits_processor(None, embedding(hidden_states, to_logits=True))


class OneshotResizedForCausalLM(Resized, TransformersForCausalLM):
    """A family's own class, whose layers have their own sizes, with its output head."""


class OneshotResizedMoEForCausalLM(Resized, TransformersMoEForCausalLM):
    """A mixture, whose layers have their own number and width of experts; vLLM's fused experts compute them."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config: Any = vllm_config.model_config.hf_config
        config.engine_has_own_widths = True  # which the modelling file asks for
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def recursive_replace(self) -> None:
        """Give the model vLLM's layers, with the number and the width of each layer's experts."""
        # the backend asks for one number of experts and passes it on for every layer
        with patch.object(moe, "FusedMoEFactory", self._fused_experts):
            super().recursive_replace()

    def _fused_experts(self, *, prefix: str, **of_all_layers: Any) -> MoERunner:
        sizes = self.config.sizes["layers"][extract_layer_index(prefix)]
        own = {"num_experts": sizes["experts"]["count"], "intermediate_size": sizes["intermediate_size"]}
        return FusedMoEFactory(prefix=prefix, **of_all_layers | own)
