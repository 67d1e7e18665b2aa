"""The form nemotron-nas for transformers: a Llama that states the FFN width and the KV heads of every layer.

This file is shipped with every checkpoint of the form. It needs torch and transformers and nothing else;
`AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True)` runs it. The config and the tensors have the names of
NVIDIA's Nemotron-NAS models, so engines that have this architecture read them with code of their own.
"""

import copy
from typing import Any

from transformers.utils.versions import require_version

require_version("transformers>=5.5", "Update it: pip install -U transformers")  # older ones fail below without a reason

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

WIDTH_STEP = 256


class Sizes(dict):
    """A part of a block config: keys are also attributes, as engines read them, and absent keys raise."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def with_attributes(value: Any) -> Any:
    """Return dictionaries at every level as `Sizes`."""
    return Sizes({name: with_attributes(inner) for name, inner in value.items()}) if isinstance(value, dict) else value


def width_of(ffn: dict[str, Any], hidden_size: int) -> int:
    """Return the FFN width of a block: stated, or from `ffn_mult` rounded up to a multiple of 256."""
    if ffn.get("ffn_mult") is None:
        return ffn["intermediate_size"]
    return -(-int(2 * ffn["ffn_mult"] * hidden_size / 3) // WIDTH_STEP) * WIDTH_STEP


@strict
class DeciLMConfig(LlamaConfig):
    """A Llama config, and `block_configs` with the sizes of every layer.

    `attention_bias`: the linear after attention has a bias. `qkv_bias`: queries, keys and values have one; None: as
    `attention_bias` says. `residual_dropout`: what a training step drops of the output of every sublayer.
    """

    model_type = "nemotron-nas"

    block_configs: list[dict] | None = None
    qkv_bias: bool | None = None
    residual_dropout: float | int = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        self.block_configs = [with_attributes(block) for block in self.block_configs or ()]
        if self.qkv_bias is None:  # engines take the value of an attribute that is there
            self.qkv_bias = self.attention_bias
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Heads need not divide the hidden size here."""


stated_layers: Any = getattr(getattr(LlamaConfig, "per_layer_config", None), "fget", None)


def cache_slot(config: DeciLMConfig, layer_idx: int) -> int:
    """Return the place of a layer in caches: its number. The first place has their length.

    So the first layer with attention has it, where the layers before have none.
    """
    assert config.block_configs is not None
    attends = [not block["attention"]["no_op"] for block in config.block_configs]
    return 0 if layer_idx == attends.index(True) else layer_idx


def cached_layers(config: DeciLMConfig) -> Any:
    """Return the config of every layer, which static caches ask for the heads of their places."""
    stated = stated_layers(config)
    groups = kv_heads(config)
    if set(groups.values()) == {config.num_key_value_heads}:
        return stated
    layers = [copy.copy(stated[number]) for number in range(config.num_hidden_layers)]
    for number, own in groups.items():
        layers[cache_slot(config, number)].num_key_value_heads = own
    return layers


def kv_heads(config: Any) -> dict[int, int]:
    """Return the KV heads of every layer that has attention, by its number."""
    return {
        number: config.num_attention_heads // block["attention"]["n_heads_in_group"]
        for number, block in enumerate(config.block_configs or ())
        if not block["attention"]["no_op"]
    }


if stated_layers is not None:  # transformers 5.14 and later
    DeciLMConfig.per_layer_config = property(cached_layers, LlamaConfig.per_layer_config.fset)  # type: ignore


class DeciLMDecoderLayer(GradientCheckpointingLayer):
    """`x + attn(norm(x))`, then `h + ffn(norm(h))`; a block may be without one of them."""

    def __init__(self, config: DeciLMConfig, layer_idx: int) -> None:
        super().__init__()
        assert config.block_configs is not None
        block = config.block_configs[layer_idx]
        own = copy.copy(config)
        self.has_attention, self.has_ffn = not block["attention"]["no_op"], not block["ffn"]["no_op"]
        if any(part.get("replace_with_linear") for part in (block["attention"], block["ffn"])):
            raise ValueError("A block with a linear in place of attention or FFN is not supported.")
        if self.has_attention:
            own.num_key_value_heads = config.num_attention_heads // block["attention"]["n_heads_in_group"]
            self.self_attn = LlamaAttention(own, cache_slot(config, layer_idx))
            self.self_attn.config = config  # a copy would keep the attention kernel of this moment
            if config.qkv_bias != config.attention_bias:
                for name in ("q_proj", "k_proj", "v_proj"):
                    linear = getattr(self.self_attn, name)
                    setattr(
                        self.self_attn,
                        name,
                        nn.Linear(linear.in_features, linear.out_features, bias=bool(config.qkv_bias)),
                    )
            self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if self.has_ffn:
            own.intermediate_size = width_of(block["ffn"], config.hidden_size)
            own.hidden_act = block["ffn"].get("hidden_act", config.hidden_act)
            self.mlp = LlamaMLP(own)
            self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.has_attention:
            attended = self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
            hidden_states = hidden_states + self.dropout(attended)
        if self.has_ffn:
            hidden_states = hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))
        return hidden_states


class DeciLMModel(LlamaModel):
    """The stack without its output head."""

    config_class = DeciLMConfig
    _no_split_modules = ["DeciLMDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": DeciLMDecoderLayer, "attentions": LlamaAttention}  # noqa: RUF012

    def __init__(self, config: DeciLMConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([DeciLMDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()


class DeciLMForCausalLM(LlamaForCausalLM):
    """The model with its output head."""

    config_class = DeciLMConfig
    _no_split_modules = ["DeciLMDecoderLayer"]  # noqa: RUF012

    def __init__(self, config: DeciLMConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)
        self.model = DeciLMModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Return transformers' manager of continuous batching. Raises `ValueError` if layers differ in their caches."""
        if set(kv_heads(self.config).values()) != {self.config.num_key_value_heads}:
            raise ValueError(
                "Continuous batching of transformers has the same KV heads in all layers, but layers of this model "
                "have others; use generate(), or vLLM."
            )
        return super().init_continuous_batching(*args, **kwargs)
