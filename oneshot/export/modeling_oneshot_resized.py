"""The per-layer form of a family whose layers are not Llama's: the family's own class, whose layers differ in size.

This file is shipped with such checkpoints, beside `modeling_oneshot.py`. `AutoModelForCausalLM.from_pretrained(…,
trust_remote_code=True)` runs both. All but the sizes is the stock class's: norms, positions, windows, factors, caps.
`OneshotGemma3ForCausalLM` is made from transformers' `Gemma3ForCausalLM` when it is asked for by its name, and
`OneshotGemma3TextModel`, the stack without its output head, from `Gemma3TextModel`.
"""

import copy
from typing import Any

import torch
import transformers
from torch import nn

from .modeling_oneshot import (
    OneshotCoordinates,
    OneshotEmbedding,
    OneshotHead,
    OneshotResult,
    OneshotTiedHead,
    refuse_pages,
)

PREFIX = "Oneshot"  # of the names of classes


class OneshotLowRankLinear(nn.Module):
    """A linear of low rank, which reads through coordinates that other linears may share.

    It reads the whole width, and its weight has the rank's columns only. So it is not a linear itself: adapters and
    quantisers find the plain `linear` inside, whose sizes are those that they expect.
    """

    def __init__(self, read: OneshotCoordinates, outputs: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(read.sizes[0], outputs, bias)
        self._read = (read,)  # in a tuple: it is a submodule of the layer already

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self._read[0](x))


class OneshotScaledEmbedding(OneshotEmbedding):
    """Ranges of the vocabulary whose rows are multiplied by a number, but not in the tied output head."""

    def __init__(self, ranges: list[dict[str, int]], width: int, scale: float) -> None:
        super().__init__(ranges, width)
        self.scale = scale

    def forward(self, x: torch.Tensor, *, to_logits: bool = False) -> torch.Tensor:
        found = OneshotEmbedding.forward(self, x, to_logits=to_logits)  # not super(): see OneshotTable
        return found if to_logits or self.scale == 1 else found * found.new_tensor(self.scale)


def resize_layer_(layer: nn.Module, sizes: dict[str, Any], config: Any) -> None:
    """Give a layer the linears and the experts that `sizes` lists, with no values yet.

    `reads`: what linears of low rank read through, `name -> [width, rank]`. `linears`: `name -> [outputs, inputs]`, or
    `[outputs, name of what it reads through]`. `attention`: the module whose KV heads have `heads_per_group` heads, or
    None for a layer with another mixer in its place. `mixture`: the modules of a mixture of experts, which are made
    anew from the model's config with other values; None without one.
    """
    if sizes.get("mixture") is not None:
        own = copy.deepcopy(config)
        for key, value in sizes["mixture"]["config"].items():
            setattr(own, key, value)
        for name in sizes["mixture"]["modules"]:
            made: Any = type(layer.get_submodule(name))
            layer.set_submodule(name, made(own))
    for name, (width, rank) in sizes["reads"].items():
        layer.set_submodule(name, OneshotCoordinates(width, rank))
    for name, (outputs, source) in sizes["linears"].items():
        old: Any = layer.get_submodule(name)
        has_bias = old.bias is not None
        new: nn.Module
        if isinstance(source, str):
            read = layer.get_submodule(source)
            assert isinstance(read, OneshotCoordinates)
            new = OneshotLowRankLinear(read, outputs, has_bias)
        elif isinstance(old, nn.Linear):
            new = nn.Linear(source, outputs, has_bias)
        else:  # GPT-2's, whose weight is (inputs, outputs)
            new = type(old)(outputs, source)
        layer.set_submodule(name, new)
    attention: Any = None if sizes["attention"] is None else layer.get_submodule(sizes["attention"])
    if hasattr(attention, "num_key_value_groups"):
        attention.num_key_value_groups = sizes["heads_per_group"]


def refuse_engine(config: Any) -> None:
    """Raise `ValueError` in an engine that would make something else of the layers.

    vLLM's Transformers backend keeps keys and values alone. So it opens some hybrids, whose answers are then wrong.
    It has experts of its own, which all have the one width of the config, but for the plugin `oneshot-vllm`.
    """
    others = [number for number, sizes in enumerate(config.resized) if sizes["attention"] is None]
    if others and config._attn_implementation == "vllm":
        raise ValueError(
            f"Layer {others[0]} has another mixer than attention, whose states vLLM's Transformers backend does not "
            "keep; open this folder with transformers, or compress with --form stock, which vLLM has classes for."
        )
    has_own_widths = getattr(config, "engine_has_own_widths", False)
    mixtures = any(sizes.get("mixture") is not None for sizes in config.resized)
    if mixtures and config._attn_implementation == "vllm" and not has_own_widths:
        raise ValueError(
            "vLLM's Transformers backend has experts of one width in all layers; install the plugin oneshot-vllm of "
            "oneshot's repository, which has some families of mixtures, open this folder with transformers, or "
            "compress with --form stock."
        )


def _resized(stock: Any) -> type:
    """Return the class of a family whose layers have the sizes of the config; with its output head or without."""

    class Resized(OneshotResult, stock):
        config_class = _config_of(stock.config_class)
        ranges = "embedding_ranges", "output_head_ranges"
        _no_split_modules = [*(stock._no_split_modules or ()), "OneshotScaledEmbedding", "OneshotHead"]  # noqa: RUF012

        def __init__(self, config: Any) -> None:
            self.lm_head: nn.Module
            refuse_engine(config)
            if config.embedding_ranges is not None:  # as in OneshotForCausalLM
                config.tie_word_embeddings = False
            super().__init__(config)
            stack: Any = self.base_model
            layers = config.layers_name.removeprefix(f"{self.base_model_prefix}.")
            for layer, sizes in zip(stack.get_submodule(layers), config.resized, strict=True):
                resize_layer_(layer, sizes, config)
            if config.embedding_ranges is not None:
                old = self.get_input_embeddings()
                scale = float(getattr(old, "scalar_embed_scale", 1.0))
                width = old.embedding_dim
                stack.embed_tokens = OneshotScaledEmbedding(config.embedding_ranges, width, scale)
                if stack is not self and config.sizes["head"] != "own":
                    self.lm_head = OneshotTiedHead(stack)
            if stack is not self and config.output_head_ranges is not None:
                head: Any = self.get_output_embeddings()
                self.lm_head = OneshotHead(config.output_head_ranges, head.in_features)
            self.init_weights()  # of what is new

        @torch.no_grad()
        def initialize_weights(self) -> None:
            """Make what no file holds, such as the factors that Falcon-H1 makes for its layers.

            For classes that are not its own, transformers leaves that out where a module holds no tensors itself. The
            stock class's stack does not know `OneshotCoordinates` and ranges of the vocabulary.
            """
            for module in self.modules():
                is_own = isinstance(module, (OneshotCoordinates, OneshotEmbedding))
                if is_own and not getattr(module, "_is_hf_initialized", False):
                    self._init_weights(module)
            super().initialize_weights()
            self._init_weights(self.base_model)

        @classmethod
        def _can_set_experts_implementation(cls) -> bool:
            """Return what holds of the stock class: transformers looks it up in the file of a class, which is this one.

            Otherwise experts are computed one after the other.
            """
            can_set: bool = stock._can_set_experts_implementation()
            return can_set

        def set_experts_implementation(self, experts_implementation: Any) -> None:
            """Also tell the experts: every layer has a config of its own for them (`resize_layer_`)."""
            super().set_experts_implementation(experts_implementation)
            for module in self.modules():
                own: Any = getattr(module, "config", None)
                if isinstance(own, type(self.config)):
                    own._experts_implementation_internal = self.config._experts_implementation

        def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
            """Return transformers' manager. Raises `ValueError` if layers have other heads than the config."""
            refuse_pages(not own_heads(self.config))
            return super().init_continuous_batching(*args, **kwargs)

    return _named(Resized, stock)


def own_heads(config: Any) -> dict[int, int]:
    """Return the KV heads of every layer that has other heads than the config, by its number.

    A family whose own config states other heads for some layers keeps them.
    """
    if config.resized is None or config.sizes is None or getattr(config, "is_heterogeneous", False):
        return {}
    heads = config.num_attention_heads
    stated = heads, getattr(config, "num_key_value_heads", None) or heads
    return {
        number: own["num_key_value_heads"]
        for number, own in enumerate(config.sizes["layers"])
        if config.resized[number]["attention"] is not None
        and (own["num_attention_heads"], own["num_key_value_heads"]) != stated
    }


class OneshotLayers(list[Any]):
    """The configs of all layers, and what the stock class has for a type of layers, which rotary positions ask for."""

    def __init__(self, layers: list[Any], stated: Any) -> None:
        super().__init__(layers)
        self._stated = stated

    def __getitem__(self, place: Any) -> Any:
        return self._stated[place] if isinstance(place, str) else super().__getitem__(place)


def _cached_layers(stock: Any) -> property:
    """Return the property in which static caches look for the heads of every layer, with the layers' own."""
    stated_layers = stock.per_layer_config.fget

    def cached_layers(config: Any) -> Any:
        stated, own = stated_layers(config), own_heads(config)
        if not own:
            return stated
        layers = [copy.copy(stated[number]) for number in range(len(config.resized))]
        for number, groups in own.items():
            layers[number].num_key_value_heads = groups
        return OneshotLayers(layers, stated)

    return property(cached_layers, stock.per_layer_config.fset)


def _config_of(stock: Any) -> type:
    """Return the config class of a family with the sizes of every layer: `resized`, see `resize_layer_`.

    `layers_name`: the module of the layers. `embedding_ranges`, `output_head_ranges`: rows and rank of every range of
    the vocabulary, or None for a whole table. `sizes`: those by which oneshot counts parameters.
    """
    name = PREFIX + stock.__name__
    if name not in globals():

        class Config(stock):
            model_type = "oneshot-resized"
            resized: list | None = None
            sizes: dict | None = None
            layers_name: str = "model.layers"
            embedding_ranges: list | None = None
            output_head_ranges: list | None = None

            if hasattr(stock, "per_layer_config"):  # transformers 5.14 and later
                per_layer_config = _cached_layers(stock)

        globals()[name] = _named(Config, stock)
    found: type = globals()[name]
    return found


def _named(own: type, stock: type) -> type:
    own.__name__ = own.__qualname__ = PREFIX + stock.__name__
    own.__module__ = __name__
    return own


def __getattr__(name: str) -> type:
    """Return the class `OneshotX` of transformers' `X`; a config's class if that is one."""
    stock = getattr(transformers, name.removeprefix(PREFIX), None) if name.startswith(PREFIX) else None
    if stock is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = _config_of(stock) if issubclass(stock, transformers.PreTrainedConfig) else _resized(stock)
    globals()[name] = made
    return made
