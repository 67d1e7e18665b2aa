"""Descriptions of model families: tensor names, sublayers, and what the stock classes can hold.

A family is one small file with a `Description`. Everything else is derived from it: which linears read a norm's output,
which rows shrink with a set of columns, which linear is corrected, and which tensors a checkpoint must have.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from oneshot.architecture.carried import Carried, carried_layers
from oneshot.architecture.further import FurtherNames
from oneshot.architecture.fused import stored_shapes
from oneshot.architecture.resizing import set_widths
from oneshot.architecture.shapes import ModelShape
from oneshot.architecture.stack import Stack
from oneshot.architecture.sublayers import Sublayer
from oneshot.architecture.unsupported import Feature, reason_against


@dataclass(frozen=True)
class Sizes:
    """Names of sizes in the family's config.json; `None` for a size that the family derives from others.

    `width_factor`: the FFN's width divided by the hidden size where a config does not state the width.
    """

    hidden_size: str = "hidden_size"
    intermediate_size: str = "intermediate_size"
    num_attention_heads: str = "num_attention_heads"
    num_key_value_heads: str | None = "num_key_value_heads"
    num_hidden_layers: str = "num_hidden_layers"
    num_decoder_layers: str | None = None
    num_buckets: str | None = None
    head_dim: str | None = "head_dim"
    norm_epsilon: str | None = "rms_norm_eps"
    vocab_size: str = "vocab_size"
    table_width: str | None = None
    num_experts: tuple[str, ...] = ()  # names of one number, of which a config states one or more
    experts_per_token: str | None = None
    dense_width: str | None = None  # of layers without experts
    shared_expert_width: str | None = None
    shared_experts: str | None = None  # how many times an expert's width the shared one has
    width_factor: int | None = None


@dataclass(frozen=True)
class Description:
    """A model family.

    Attributes:
        model_type: the `model_type` of the family's config.json.
        stack: the layers, and what surrounds them; of the encoder if there is a decoder.
        decoder: the second stack of an encoder–decoder, whose cross-attention reads the first one's output after its
            final norm; None for other models. Layers are numbered through both.
        variant: `(family, config) -> family`: the family as a config describes its layers; `described_by` asks it.
        resize: `(sizes, config, shape) -> config`, see `resized`.
        check: raises `CheckpointError` for variants of the family that are not supported.
        head: the output head; None for models that do not predict tokens, or only some of their classes do.
        masked_head: the output head of the class for masked tokens, which may be the embedding; None without one.
        classes: transformers' classes that a checkpoint of the family may name; empty for the one with an output head.
        prefix: module of these classes that holds the stack, if they have more than it; a plain model has none.
        free_head_size: whether the stock config states a size of heads that can shrink: without rotation and without a
            scale of scores that depends on it.
        head_scale: factor of the logits.
        like_llama: whether its layers compute what a form with layers of different sizes computes under Llama's names
            (or BERT's, for encoders). Without it, the per-layer form is the family's own class with other linears
            (`export/resized`), and the hidden size stays.
        windowed: whether layers attend within windows, which only the family's own class has.
        own_head: what a stock config states so that the output head is not the embedding.
        renamed: stored names of tensors that the class calls otherwise, with its names; results keep the stored ones.
        text_module: of a model of images and text, the prefix of the language model, which is of a family of its own
            (`families/wrappers`); None for others.
        dense_layers: layers of a mixture that have one FFN instead of experts. with_dense: `(flags) -> config`: what a
            config states of a model whose layers are dense where the flags say so.
        further: names of the layers that predict tokens after the next one; None for a family without such layers.
        mixers: maps each entry of `layer_types` to an unchanged mixer, or to None for the stack's attention.
            carried_layers: these mixers by the numbers of their layers.
        first_differs: whether the class makes its first layer otherwise than the others. last_differs: the same of its
            last layer.
        with_borrowed: `(flags) -> config`: what a config states of a model whose layers borrow keys and values where
            the flags say so. alone: what it states so that layers read nothing but the stream.
        narrow_layers: layers whose FFN has half the width of the others.
        stated_width: `(config) -> width` of the FFN, if that is not the number that the config states.
        unused: ends of names of layers' tensors that old checkpoints have and transformers does not read.
        unused_prefixes: beginnings of names of tensors that transformers does not read.
        unsupported: features that the family cannot have, each with a sentence that names the reason and the remedy.
    """

    model_type: str
    stack: Stack
    resize: Callable[[Sizes, dict[str, Any], ModelShape], dict[str, Any]] = set_widths
    check: Callable[[dict[str, Any]], None] = lambda config: None
    head: str | None = "lm_head.weight"
    masked_head: str | None = None
    classes: tuple[str, ...] = ()
    prefix: str | None = None
    sizes: Sizes = Sizes()
    unsupported: Mapping[Feature, str] = field(default_factory=dict)
    decoder: Stack | None = None
    variant: "Callable[[Description, dict[str, Any]], Description]" = lambda family, config: family
    free_head_size: bool = False
    head_scale: float = 1.0
    head_cap: float | None = None
    like_llama: bool = False
    windowed: bool = False
    own_head: Mapping[str, Any] = field(default_factory=lambda: {"tie_word_embeddings": False})
    unused: tuple[str, ...] = ()
    unused_prefixes: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    text_module: str | None = None
    further: FurtherNames | None = None
    dense_layers: tuple[int, ...] = ()
    with_dense: Callable[[Sequence[bool]], dict[str, Any]] = lambda flags: {}
    mixers: Mapping[str, Carried | None] = field(default_factory=dict)
    carried_layers: Mapping[int, Carried] = field(default_factory=dict)
    first_differs: bool = False
    last_differs: bool = False
    with_borrowed: Callable[[Sequence[bool]], dict[str, Any]] = lambda flags: {}
    alone: Mapping[str, Any] = field(default_factory=dict)
    narrow_layers: tuple[int, ...] = ()
    stated_width: Callable[[dict[str, Any]], int | None] = lambda config: None

    def described_by(self, config: dict[str, Any]) -> "Description":
        """Return the family as a config describes its layers; raises `CheckpointError` for one of an unknown type."""
        carried = carried_layers(config, self.mixers) if self.mixers else {}
        return self.variant(replace(self, carried_layers=carried), config)

    def resized(self, config: dict[str, Any], shape: ModelShape) -> dict[str, Any]:
        """Return the stock config of the resized model; its class may refuse the sizes."""
        return self.resize(self.sizes, config, shape)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """Return the stacks in the order of the forward pass."""
        return (self.stack,) if self.decoder is None else (self.stack, self.decoder)

    @property
    def last_stack(self) -> Stack:
        """Return the stack whose output the head reads."""
        return self.stacks[-1]

    @property
    def shares_heads(self) -> bool:
        """Return whether all layers of a stack keep the same heads, because they share a table with their columns."""
        return self.stack.relative_bias is not None

    @property
    def carried(self) -> tuple[Carried, ...]:
        """Return the mixers that its layers may have and that stay as they are."""
        mixers = (*self.mixers.values(), self.stack.token_mixer)
        return tuple(mixer for mixer in mixers if isinstance(mixer, Carried))

    def stack_of(self, layer: int) -> Stack:
        """Return the stack of a layer, as that layer is."""
        stack = self.last_stack if layer >= self.last_stack.first_layer else self.stack
        stack = stack.dense if layer in self.dense_layers else stack
        return stack.carrying(self.carried_layers[layer]) if layer in self.carried_layers else stack

    def attends(self, layer: int) -> bool:
        """Return whether a layer has attention, also in a mixer that is carried."""
        mixer = self.stack_of(layer).token_mixer
        return mixer.attends if isinstance(mixer, Carried) else True

    def borrows(self, layer: int) -> bool:
        """Return whether a layer reads keys and values of earlier ones."""
        return layer in self.carried_layers and self.carried_layers[layer].borrows

    @property
    def lenders(self) -> tuple[int, ...]:
        """Return the layers whose keys and values later ones read, ascending."""
        return tuple(sorted(layer for layer, mixer in self.carried_layers.items() if mixer.lends))

    def layer_prefix(self, layer: int) -> str:
        """Return the prefix of a layer's tensors."""
        return self.stack_of(layer).layer_prefix(layer)

    def is_in_layers(self, name: str) -> bool:
        """Return whether a tensor belongs to a layer."""
        return name.startswith(tuple(f"{stack.layers}." for stack in self.stacks))

    def numbered(self, shape: ModelShape) -> "Description":
        """Return the family whose decoder's layers and positions follow the encoder's."""
        if self.decoder is None:
            return self
        encoder_layers = shape.num_hidden_layers - shape.num_decoder_layers
        after = self.stack.position(encoder_layers) + 1  # the encoder's final norm also reads a position
        return replace(self, decoder=replace(self.decoder, first_layer=encoder_layers, first_position=after))

    def stored_as(self, names: Collection[str]) -> "Description":
        """Return the family as a class with these tensors names its parts: with the prefix, or without."""
        if self.prefix is None or f"{self.prefix}.{self.stack.embedding}" not in names:
            return self
        return replace(self, stack=self.stack.within(f"{self.prefix}."))

    def reason_against(self, feature: Feature) -> str | None:
        """Return a sentence why the family cannot have a feature, with the remedy; None if it can.

        It is the only place that refuses a feature by family.
        """
        return self.unsupported.get(feature) or reason_against(self, feature)

    def expected_tensors(self, shape: ModelShape, layer: int = 0) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a layer under our names, without its prefix, and their shapes."""
        return self.stack_of(layer).tensors(shape.layer(layer)) | shape.carried_tensors(layer)

    def stored_tensors(self, shape: ModelShape, layer: int = 0) -> dict[str, tuple[int, ...]]:
        """Return the same as the checkpoint stores them, where some linears are one."""
        return stored_shapes(self.expected_tensors(shape, layer), self.stack_of(layer))

    def may_have_ranks(self, shape: ModelShape) -> bool:
        """Return whether linears can have low rank: with rotary pairs, RMSNorms, and FFNs with a gate."""
        has_linears = any(sublayer.mixer.ranked for sublayer in self.stack.sublayers)
        return has_linears and self.stack.rotary and shape.gated and not shape.layer_norms

    def layers_to_files(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the state of the stock class with the layers' tensors as files have them."""
        experts = self.stack.experts
        if experts is None:
            return dict(state)
        stored: dict[str, torch.Tensor] = {}
        layers: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in state.items():
            if self.is_in_layers(name):
                number, _, own = name.removeprefix(f"{self.stack.layers}.").partition(".")
                layers.setdefault(f"{self.stack.layers}.{number}.", {})[own] = tensor
            else:
                stored[name] = tensor
        for prefix, layer in layers.items():
            stored |= {prefix + name: tensor for name, tensor in experts.to_files(layer).items()}
        return stored

    def rename(self, tensors: dict[str, torch.Tensor], other: "Description") -> dict[str, torch.Tensor]:
        """Return a layer's tensors under the names of another family with the same sublayers."""
        names: dict[str, str] = {}
        for ours, theirs in zip(self.stack.sublayers, other.stack.sublayers, strict=True):
            for own, new in zip(_modules(ours), _modules(theirs), strict=True):
                if own is not None and new is not None:
                    names[own] = new
        renamed = {}
        for name, tensor in tensors.items():
            module, _, part = name.rpartition(".")
            renamed[f"{names.get(module, module)}.{part}" if module else names.get(name, name)] = tensor
        return renamed


def stated_class(config: dict[str, Any]) -> str | None:
    """Return the name of the model class that a config.json states first; None if it states none."""
    architectures = config.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else None


def _modules(sublayer: Sublayer) -> tuple[str | None, ...]:
    return (*sublayer.mixer.modules, sublayer.norm.name)
