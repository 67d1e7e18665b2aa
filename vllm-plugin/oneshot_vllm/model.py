"""The model class that vLLM builds for the architecture `OneshotForCausalLM`."""

from collections.abc import Iterable

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.sequence import IntermediateTensors

from oneshot_vllm.config import OneshotConfig
from oneshot_vllm.layers import Made, OneshotDecoderLayer, norm_of, normed
from oneshot_vllm.low_rank import Embedding
from oneshot_vllm.refusals import LlamaRefusals

MERGED_FROM = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "qk_proj": ["q_proj", "k_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}

STORED_BUFFERS = (".columns", ".rotary_pairs")  # others are vLLM's


@support_torch_compile
class OneshotModel(nn.Module):
    """The stack without its output head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: OneshotConfig = vllm_config.model_config.hf_config
        assert config.layers is not None
        first, last = config.layers[0]["hidden_size"], config.layers[-1]["output_size"]
        self.centred = config.centred_embedding
        self.embed_tokens = (
            VocabParallelEmbedding(config.vocab_size, first)
            if config.embedding is None
            else Embedding(config.embedding, first)
        )
        self.embed_positions = nn.Embedding(config.num_positions, first) if config.num_positions else None
        made = Made(vllm_config.cache_config, vllm_config.quant_config)
        self.layers = nn.ModuleList(
            [
                OneshotDecoderLayer(config, sizes, made, f"{prefix}.layers.{number}")
                for number, sizes in enumerate(config.layers)
            ]
        )
        self.norm = norm_of(config, last)
        self.head_map = None
        if config.head_map:
            self.head_map = ReplicatedLinear(last, first, bias=False, **made.linear(f"{prefix}.head_map"))

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens and positions `(n,)` -> last states `(n, width)`, which the output head reads."""
        stream = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.embed_positions is not None:
            stream = stream + self.embed_positions(positions)
        if self.centred:
            stream = stream - stream.float().mean(-1, keepdim=True).to(stream.dtype)
        branch = None
        for layer in self.layers:
            branch, stream = layer(positions, branch, stream)
        states, _ = normed(self.norm, branch, stream)
        return states if self.head_map is None else self.head_map(states)


class OneshotForCausalLM(nn.Module):
    """The model with its output head."""

    packed_modules_mapping = MERGED_FROM  # by which vLLM finds how a merged linear is quantised

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        LlamaRefusals.verify_and_update_config(vllm_config)  # also if vLLM's table of configs was not asked
        config: OneshotConfig = vllm_config.model_config.hf_config
        assert config.layers is not None
        self.model = OneshotModel(vllm_config=vllm_config, prefix=f"{prefix}.model" if prefix else "model")
        self.lm_head = None
        if config.embedding is None:
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
    ) -> torch.Tensor:
        """Tokens and positions `(n,)` -> last states `(n, width)`."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Last states `(n, width)` -> logits `(n, vocab_size)`; None on a GPU that does not sample."""
        if self.lm_head is None:
            return self.model.embed_tokens.logits(hidden_states)
        return self.logits_processor(self.lm_head, hidden_states, self.lm_head.bias)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load every stored tensor, and return the names of what was filled.

        Raises `ValueError` if a tensor has no place, or a place no tensor.
        """
        places: dict[str, torch.Tensor] = dict(self.named_parameters(remove_duplicate=False))
        places |= {name: buffer for name, buffer in self.named_buffers() if name.endswith(STORED_BUFFERS)}
        loaded = set()
        for name, tensor in weights:
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
