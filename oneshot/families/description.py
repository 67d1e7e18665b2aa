"""Descriptions of model families: tensor names, sublayers, and what the stock classes can hold.

A family is one small file with a `Description`. Everything else is derived from it: which linears read a norm's output,
which rows shrink with a set of columns, which linear is corrected, and which tensors a checkpoint must have.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from oneshot.families.shapes import ModelShape, RankedKind

SublayerKind = Literal["heads", "cross-heads", "ffn"]
Feature = Literal[
    "heads",
    "hidden size",
    "ffn biases",
    "up_proj",
    "queries and keys",
    "embedding ranks",
    "self text",
    "profile",
    "latency",
    "per-layer form",
]


@dataclass(frozen=True)
class Norm:
    """A normalisation: RMSNorm or LayerNorm, before its sublayer or after the sum with the residual stream."""

    name: str
    kind: Literal["rms", "layer"] = "rms"
    place: Literal["before", "after"] = "before"

    @property
    def centres(self) -> bool:
        """Return whether it subtracts the mean and has a bias."""
        return self.kind == "layer"


@dataclass(frozen=True)
class Attention:
    """Attention over the same stack's hidden states, or over the memory: the encoder's output (cross-attention).

    Attributes:
        module: what is called; it includes the output linear if the name of `out` lies below it.
        q, k, v, out: linears. q_norm, k_norm: norms of single queries and keys; None without them.
        fixed_heads: whether the stock class has heads as wide as its hidden size, so that its layers keep all heads.
        memory: whether keys and values read the memory.
        relative_bias: a table `(buckets, heads)` that is added to the scores by the distance of two tokens. The stack's
            first layer stores it, for all layers. None without one.
    """

    module: str = "self_attn"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    out: str = "self_attn.o_proj"
    q_norm: str | None = None
    k_norm: str | None = None
    fixed_heads: bool = False
    memory: bool = False
    relative_bias: str | None = None

    @property
    def kind(self) -> SublayerKind:
        return "cross-heads" if self.memory else "heads"

    @property
    def readers(self) -> tuple[str, ...]:
        """Return the linears that read the norm's output."""
        return (self.q,) if self.memory else (self.q, self.k, self.v)

    @property
    def memory_readers(self) -> tuple[str, ...]:
        """Return the linears that read the memory."""
        return (self.k, self.v) if self.memory else ()

    @property
    def rotary_pairs(self) -> str:
        """Return the name under which kept rotary pairs are stored; only some forms have it."""
        return f"{self.module}.rotary_pairs"

    @property
    def ranked_kinds(self) -> tuple[RankedKind, ...]:
        """Return the kinds of its linears that may have low rank."""
        return ("query_key", "output")

    @property
    def queries_keys(self) -> str:
        """Return the linear of queries and keys together; only some forms have it."""
        return f"{self.module}.qk_proj"


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward network, with or without a gate. `activation`: the submodule that is applied to gate or up."""

    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    gate: str | None = "mlp.gate_proj"
    activation: str = "mlp.act_fn"

    @property
    def kind(self) -> SublayerKind:
        return "ffn"

    @property
    def ranked_kinds(self) -> tuple[RankedKind, ...]:
        """Return the kinds of its linears that may have low rank."""
        return ("gate", "up")

    @property
    def readers(self) -> tuple[str, ...]:
        """Return the linears that read the norm's output."""
        return (self.up,) if self.gate is None else (self.gate, self.up)

    @property
    def out(self) -> str:
        """Return the linear that writes to the residual stream."""
        return self.down


@dataclass(frozen=True)
class Sublayer:
    """One part of a layer: a mixer and its norm. `shortcut`: the name of a matrix between two subspaces."""

    mixer: Attention | FeedForward
    norm: Norm
    shortcut: str

    @property
    def kind(self) -> SublayerKind:
        return self.mixer.kind

    @property
    def readers(self) -> tuple[str, ...]:
        """Return the linears that read this sublayer's input."""
        return self.mixer.readers

    @property
    def writer(self) -> str:
        """Return the linear that writes to the residual stream; its columns are removed and corrected."""
        return self.mixer.out


@dataclass(frozen=True)
class Stack:
    """A stack of equal layers between an embedding and a final norm.

    Attributes:
        layers: prefix of the layers. sublayers: in the order of the forward pass.
        embedding, positions: tensors; `positions` is None without a learned position embedding. Its first
            `position_offset` rows are not used by any token.
        token_types: the embedding of the first and the second text of a pair; None without one.
        project_in, project_out: linears from the width of the token embedding to the hidden size, and from the last
            states back to the width of the output head; None if all are as wide as the hidden size.
        embedding_norm: module after the sum of the embeddings; None without one.
        final_norm: module after the last layer; None if the last layer's own norm is the end.
        rotary: whether attention turns queries and keys by rotary positions.
        causal: whether a token sees only earlier ones. If not, the text is not packed but read example by example.
        first_layer, first_position: of the stack among all layers and all positions of the model. Those of a decoder
            follow its encoder's.
    """

    sublayers: tuple[Sublayer, ...]
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens.weight"
    positions: str | None = None
    position_offset: int = 0
    token_types: str | None = None
    project_in: str | None = None
    project_out: str | None = None
    embedding_norm: Norm | None = None
    final_norm: Norm | None = Norm("model.norm")
    rotary: bool = True
    causal: bool = True
    first_layer: int = 0
    first_position: int = 0

    def layer_prefix(self, layer: int) -> str:
        """Return `model.layers.3.` for layer 3; a decoder's layers are numbered after its encoder's."""
        return f"{self.layers}.{layer - self.first_layer}."

    def position(self, layer: int, sublayer: int = 0) -> int:
        """Return the number of the residual stream's position where a sublayer reads it."""
        return self.first_position + (layer - self.first_layer) * len(self.sublayers) + sublayer

    def index_of(self, kind: SublayerKind) -> int:
        """Return the index of the sublayer of a kind."""
        return next(index for index, sublayer in enumerate(self.sublayers) if sublayer.kind == kind)

    @property
    def attention(self) -> Attention:
        mixer = self.sublayers[self.index_of("heads")].mixer
        assert isinstance(mixer, Attention)
        return mixer

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Return the attention of every sublayer that has one."""
        return tuple(sublayer.mixer for sublayer in self.sublayers if isinstance(sublayer.mixer, Attention))

    @property
    def ffn(self) -> FeedForward:
        mixer = self.sublayers[self.index_of("ffn")].mixer
        assert isinstance(mixer, FeedForward)
        return mixer

    @property
    def centres(self) -> bool:
        """Return whether the norms are LayerNorms."""
        return self.sublayers[0].norm.centres

    @property
    def norms_after(self) -> bool:
        """Return whether norms follow the sums with the residual stream, which they then rewrite."""
        return self.sublayers[0].norm.place == "after"

    def within(self, prefix: str) -> "Stack":
        """Return the same stack inside a module of a larger class, such as `bert.`."""

        def inside(name: str | None) -> str | None:
            return None if name is None else prefix + name

        norm = self.embedding_norm
        return replace(
            self,
            layers=prefix + self.layers,
            embedding=prefix + self.embedding,
            positions=inside(self.positions),
            token_types=inside(self.token_types),
            embedding_norm=None if norm is None else replace(norm, name=prefix + norm.name),
        )


@dataclass(frozen=True)
class Sizes:
    """Names of sizes in the family's config.json; `None` for a size that the family derives from others."""

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


@dataclass(frozen=True)
class Description:
    """A model family.

    Attributes:
        model_type: the `model_type` of the family's config.json.
        stack: the layers, and what surrounds them; of the encoder if there is a decoder.
        decoder: the second stack of an encoder–decoder, whose cross-attention reads the first one's output after its
            final norm; None for other models. Layers are numbered through both.
        variant: `(family, config) -> family`: the family as a config describes its layers.
        resize: `(config, shape) -> config`: the stock config of the resized model; raises `PlanError` if no stock
            config can state it.
        check: raises `CheckpointError` for variants of the family that are not supported.
        head: the output head; None for models that do not predict tokens, or only some of their classes do.
        masked_head: the output head of the class for masked tokens, which may be the embedding; None without one.
        classes: transformers' classes that a checkpoint of the family may name; empty for the one with an output head.
        prefix: module of these classes that holds the stack, if they have more than it; a plain model has none.
        free_head_size: whether the stock config states a size of heads that can shrink: without rotation and without a
            scale of scores that depends on it.
        own_head: what a stock config states so that the output head is not the embedding.
        unused: ends of names of layers' tensors that old checkpoints have and transformers does not read.
        unsupported: features that the family cannot have, each with a sentence that names the reason and the remedy.
    """

    model_type: str
    stack: Stack
    resize: Callable[[dict[str, Any], ModelShape], dict[str, Any]]
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
    own_head: Mapping[str, Any] = field(default_factory=lambda: {"tie_word_embeddings": False})
    unused: tuple[str, ...] = ()

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
        return self.stack.attention.relative_bias is not None

    def stack_of(self, layer: int) -> Stack:
        """Return the stack of a layer."""
        return self.last_stack if layer >= self.last_stack.first_layer else self.stack

    def layer_prefix(self, layer: int) -> str:
        """Return the prefix of a layer's tensors."""
        return self.stack_of(layer).layer_prefix(layer)

    def is_in_layers(self, name: str) -> bool:
        """Return whether a tensor belongs to a layer."""
        return name.startswith(tuple(f"{stack.layers}." for stack in self.stacks))

    def numbered(self, shape: ModelShape) -> "Description":
        """Return the family whose decoder's layers and positions follow those of the encoder."""
        if self.decoder is None:
            return self
        encoder_layers = shape.num_hidden_layers - shape.num_decoder_layers
        after = self.stack.position(encoder_layers) + 1  # the encoder's final norm also reads a position
        return replace(self, decoder=replace(self.decoder, first_layer=encoder_layers, first_position=after))

    def stored_as(self, names: Iterable[str]) -> "Description":
        """Return the family as a checkpoint with these tensors names its parts: with the prefix, or without."""
        if self.prefix is None or not any(name.startswith(f"{self.prefix}.") for name in names):
            return self
        return replace(self, stack=self.stack.within(f"{self.prefix}."))

    def reason_against(self, feature: Feature) -> str | None:
        """Return a sentence why the family cannot have a feature, with the remedy; None if it can.

        It is the only place that refuses a feature by family.
        """
        if feature in self.unsupported:
            return self.unsupported[feature]
        stack = self.stack
        if feature == "up_proj" and stack.ffn.gate is None:
            return f"--up-steps needs FFNs with a gate, which {self.model_type} does not have; leave it out."
        if feature == "queries and keys" and stack.attention.q_norm is not None:
            return f"--set query_key_size= is not possible in {self.model_type}, which norms both; leave it out."
        if feature == "self text" and self.head is None:
            return f"--calibration self needs a model that writes text, which {self.model_type} does not; give a file."
        if feature == "embedding ranks" and stack.centres:
            return "--set embedding=low-rank needs an output head that is the embedding; leave it out."
        return None

    def expected_tensors(self, shape: ModelShape, layer: int = 0) -> dict[str, tuple[int, ...]]:
        """Return the stored tensors of a layer, without its prefix, and their shapes."""
        stack = self.stack_of(layer)
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        hidden, width, ffn = shape.hidden_size, shape.intermediate_size, stack.ffn
        weights = dict.fromkeys(ffn.readers, (width, hidden)) | {ffn.down: (hidden, width)}
        biased = dict.fromkeys(weights, shape.mlp_bias)
        for attention in stack.attentions:
            weights |= {attention.q: (queries, hidden), attention.out: (hidden, queries)}
            weights |= dict.fromkeys((attention.k, attention.v), (keys, hidden))
            biased |= dict.fromkeys((attention.q, attention.k, attention.v), shape.attention_bias)
            biased |= {attention.out: shape.output_bias}
        expected: dict[str, tuple[int, ...]] = {f"{name}.weight": size for name, size in weights.items()}
        expected |= {f"{name}.bias": weights[name][:1] for name, has_bias in biased.items() if has_bias}
        for sublayer in stack.sublayers:
            expected[f"{sublayer.norm.name}.weight"] = (hidden,)
            if sublayer.norm.centres:
                expected[f"{sublayer.norm.name}.bias"] = (hidden,)
        if shape.query_key_norms:
            norms = stack.attention.q_norm, stack.attention.k_norm
            expected |= {f"{norm}.weight": (shape.head_dim,) for norm in norms}
        if stack.attention.relative_bias is not None and layer == stack.first_layer:
            expected[stack.attention.relative_bias] = (shape.num_buckets, shape.num_attention_heads)
        return expected

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


def _modules(sublayer: Sublayer) -> tuple[str | None, ...]:
    mixer = sublayer.mixer
    inside: tuple[str | None, ...]
    if isinstance(mixer, Attention):
        inside = (mixer.q, mixer.k, mixer.v, mixer.out, mixer.q_norm, mixer.k_norm, mixer.module)
    else:
        inside = (mixer.gate, mixer.up, mixer.down)
    return (*inside, sublayer.norm.name, sublayer.shortcut)
