"""The model class that vLLM builds for the architecture `OneshotForCausalLM`."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import SupportsLoRA, SupportsPP
from vllm.model_executor.models.utils import (
    PPMissingLayer,
    extract_layer_index,
    is_pp_missing_parameter,
    make_empty_intermediate_tensors_factory,
    make_layers,
)
from vllm.sequence import IntermediateTensors

from oneshot_vllm.config import OneshotConfig, reads_ranges
from oneshot_vllm.layers import Made, OneshotDecoderLayer, norm_of, normed, total
from oneshot_vllm.low_rank import Embedding
from oneshot_vllm.refusals import LlamaRefusals

MERGED_FROM = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "qk_proj": ["q_proj", "k_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}

STREAM = "stream"  # what a stage of a pipeline passes on
STORED_BUFFERS = (".columns", ".places", ".rotary_pairs")  # others are vLLM's


@support_torch_compile
class OneshotModel(nn.Module):
    """The stack without its output head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: OneshotConfig = vllm_config.model_config.hf_config
        assert config.layers is not None
        sizes = config.layers
        first, last = sizes[0]["hidden_size"], sizes[-1]["output_size"]
        self.is_first, self.is_last = get_pp_group().is_first_rank, get_pp_group().is_last_rank
        self.centred = config.centred_embedding
        reads_tables = self.is_first or (self.is_last and (reads_ranges(config) or config.tie_word_embeddings))
        self.embed_tokens: Any = PPMissingLayer()
        if reads_tables and config.embedding is None:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, first)
        elif reads_tables:
            self.embed_tokens = Embedding(config.embedding, first)
        self.embed_positions: nn.Module | None = None
        if config.num_positions:
            self.embed_positions = nn.Embedding(config.num_positions, first) if self.is_first else PPMissingLayer()
        made = Made(vllm_config.cache_config, vllm_config.quant_config)
        self.start, self.end, self.layers = make_layers(
            len(sizes),
            lambda prefix: OneshotDecoderLayer(config, sizes[extract_layer_index(prefix)], made, prefix),
            prefix=f"{prefix}.layers",
        )
        self.norm = norm_of(config, last) if self.is_last else PPMissingLayer()
        self.head_map: nn.Module | None = None
        if config.head_map:
            head_map = ReplicatedLinear(last, first, bias=False, **made.linear(f"{prefix}.head_map"))
            self.head_map = head_map if self.is_last else PPMissingLayer()
        width = sizes[self.start]["hidden_size"]
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory([STREAM], width)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Tokens and positions `(n,)` -> last states `(n, width)`, which the output head reads.

        A stage of a pipeline that is not the last one returns the residual stream, and the next one begins with it.
        """
        if self.is_first:
            stream = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            if self.embed_positions is not None:
                stream = stream + self.embed_positions(positions)
            if self.centred:
                stream = stream - stream.float().mean(-1, keepdim=True).to(stream.dtype)
        else:
            assert intermediate_tensors is not None
            stream = intermediate_tensors[STREAM]
        branch = None
        for layer in islice(self.layers, self.start, self.end):
            branch, stream = layer(positions, branch, stream)
        if not self.is_last:
            return IntermediateTensors({STREAM: total(branch, stream)})
        states, _ = normed(self.norm, branch, stream)
        return states if self.head_map is None else self.head_map(states)


class OneshotForCausalLM(nn.Module, SupportsLoRA, SupportsPP):
    """The model with its output head."""

    packed_modules_mapping = MERGED_FROM  # by which vLLM finds how a merged linear is quantised

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        LlamaRefusals.verify_and_update_config(vllm_config)  # also if vLLM's table of configs was not asked
        config: OneshotConfig = vllm_config.model_config.hf_config
        assert config.layers is not None
        self.model = OneshotModel(vllm_config=vllm_config, prefix=f"{prefix}.model" if prefix else "model")
        self.config = config  # which vLLM's adapters ask for
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
        self.lm_head: Any = None
        if not reads_ranges(config) and not self.model.is_last:
            self.lm_head = PPMissingLayer()
        elif config.output_head is not None:
            self.lm_head = Embedding(config.output_head, config.layers[-1]["output_size"])
        elif not reads_ranges(config):
            width = config.layers[0]["hidden_size"] if config.head_map else config.layers[-1]["output_size"]
            self.lm_head = ParallelLMHead(config.vocab_size, width, bias=config.head_bias)
            if config.tie_word_embeddings:
                self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
            self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Tokens `(n,)` -> their embeddings `(n, width)`."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Tokens and positions `(n,)` -> last states `(n, width)`, or what the next stage of a pipeline begins with."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Last states `(n, width)` -> logits `(n, vocab_size)`; None on a GPU that does not sample."""
        ranges = self.model.embed_tokens if self.lm_head is None else self.lm_head
        if isinstance(ranges, Embedding):
            return ranges.logits(hidden_states)
        return self.logits_processor(self.lm_head, hidden_states, self.lm_head.bias)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load every stored tensor that this stage of a pipeline has, and return the names of what was filled.

        Raises `ValueError` if a tensor has no place, or a place no tensor.
        """
        places: dict[str, torch.Tensor] = dict(self.named_parameters(remove_duplicate=False))
        places |= {name: buffer for name, buffer in self.named_buffers() if name.endswith(STORED_BUFFERS)}
        loaded = set()
        for name, tensor in weights:
            if is_pp_missing_parameter(name, self):
                continue
            place, part = place_of(name, places)
            into = places[place]
            load = getattr(into, "weight_loader", default_weight_loader)
            load(into, tensor, *part)
            loaded.add(place)
        filled = {id(places[name]) for name in loaded}
        if missing := [name for name, tensor in places.items() if id(tensor) not in filled]:
            raise ValueError(f"The checkpoint has no tensor for {missing[0]}; download or compress it again.")
        return loaded


def place_of(name: str, places: dict[str, torch.Tensor]) -> tuple[str, tuple[int, ...]]:
    """Return where a stored tensor belongs: a parameter or buffer, and its part of a merged one.

    Raises `ValueError` if it belongs nowhere.
    """
    if name in places:
        return name, ()
    *module, linear, kind = name.split(".")
    for merged, parts in MERGED_FROM.items():
        if linear in parts and (place := ".".join((*module, merged, kind))) in places:
            return place, (parts.index(linear),)
    raise ValueError(f"{name} has no place in the model; the checkpoint needs another version of oneshot-vllm.")
