"""A stack of equal layers, and what surrounds it: embeddings, positions, final norm."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from oneshot.architecture.axes import Axes, shapes_of
from oneshot.architecture.carried import Carried
from oneshot.architecture.experts import Experts
from oneshot.architecture.layer_shape import LayerShape
from oneshot.architecture.sublayers import Attention, FeedForward, Norm, Sublayer, SublayerKind
from oneshot.architecture.token_inputs import TokenInputs

LLAMA_NORM = Norm("model.norm")
# fields with names in the whole model
NAMES = ("layers", "embedding", "positions", "token_types", "project_in", "project_out", "embedding_norm", "final_norm")


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
        embedding_scale: what the rows of the embedding are multiplied with. residual_scale: what sublayers add is
            multiplied with. layer_scale: a tensor of every layer with one number, which the stream is multiplied with
            after the layer; None without it.
        token_inputs: what a layer adds after its last sublayer, before that; None without it.
        rotary: whether attention turns queries and keys by rotary positions.
        parallel: whether all sublayers of a layer read the same states, and add to them together.
        causal: whether a token sees only earlier ones. If not, the text is not packed but read example by example.
        fused: linears of a layer that the checkpoint stores as one, by its name: the rows of the first, and so on.
            fused_heads: the rows are head by head, for so many heads; 0: linear by linear.
        dense_ffn: of layers of a mixture that have one FFN instead of experts.
        transposed: stored linears whose weights are `(inputs, outputs)`.
        first_layer, first_position: the stack's first layer and position, counted through the whole model. A decoder
            follows its encoder.
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
    final_norm: Norm | None = LLAMA_NORM
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    layer_scale: str | None = None
    token_inputs: TokenInputs | None = None
    rotary: bool = True
    parallel: bool = False
    causal: bool = True
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fused_heads: int = 0
    dense_ffn: FeedForward = field(default_factory=FeedForward)
    transposed: tuple[str, ...] = ()
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

    def waits(self, index: int) -> bool:
        """Return whether the stream moves only with a later sublayer of the layer."""
        return self.parallel and index < len(self.sublayers) - 1

    @property
    def shares_norm(self) -> bool:
        """Return whether all sublayers of a layer read one norm."""
        return self.parallel and len({sublayer.norm.name for sublayer in self.sublayers}) == 1

    def stored_linear(self, linear: str) -> str:
        """Return the linear that the checkpoint stores a linear in."""
        return next((fused for fused, parts in self.fused.items() if linear in parts), linear)

    def tensors(self, layer: LayerShape) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a layer of these sizes and their shapes, without its prefix and a carried mixer."""
        axes: Axes = {}
        for sublayer in reversed(self.sublayers):
            axes |= sublayer.axes(layer)
        return shapes_of(axes, layer.sizes)

    @property
    def base(self) -> str:
        """Return the module that holds the layers and the embedding."""
        return self.layers.rpartition(".")[0]

    @property
    def token_tensors(self) -> tuple[str, ...]:
        """Return the names of the table, the projection and the norm of `token_inputs`; none without them."""
        return () if self.token_inputs is None else tuple(f"{self.base}.{name}" for name in self.token_inputs.outside)

    @property
    def attention(self) -> Attention:
        mixer = self.sublayers[self.index_of("heads")].mixer
        assert isinstance(mixer, Attention)
        return mixer

    @property
    def ffn_sublayer(self) -> Sublayer:
        """Return the sublayer of the FFN or experts, the last of a layer."""
        return self.sublayers[self.index_of("ffn")]

    @property
    def ffn_prefixes(self) -> tuple[str, ...]:
        """Return what the stored names of a layer's FFN or experts, and of their norms, begin with."""
        sublayer, mixer = self.ffn_sublayer, self.feed_forward
        modules = mixer.parts if isinstance(mixer, Experts) else (*sublayer.readers, sublayer.writer)
        stored = (self.stored_linear(module) for module in modules)
        return tuple(f"{name}." for name in (*stored, *(norm.name for norm in sublayer.norms)))

    @property
    def token_mixer(self) -> Attention | Carried:
        """Return what a layer has before its FFN, where tokens read each other."""
        return next(each.mixer for each in self.sublayers if isinstance(each.mixer, Attention | Carried))

    @property
    def mixer_index(self) -> int:
        """Return the index of the sublayer of `token_mixer`."""
        return next(index for index, each in enumerate(self.sublayers) if each.mixer is self.token_mixer)

    @property
    def relative_bias(self) -> str | None:
        """Return the table of relative positions that the layers share; None without one."""
        return None if isinstance(self.token_mixer, Carried) else self.token_mixer.relative_bias

    def carrying(self, mixer: Carried) -> "Stack":
        """Return the stack as a layer is that has a carried mixer in the place of attention."""
        old = self.token_mixer
        sublayers = (Sublayer(mixer) if each.mixer is old else each for each in self.sublayers)
        return replace(self, sublayers=tuple(sublayers))

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Return the attention of every sublayer that has one."""
        return tuple(sublayer.mixer for sublayer in self.sublayers if isinstance(sublayer.mixer, Attention))

    @property
    def feed_forward(self) -> FeedForward | Experts:
        """Return what follows attention: one feed-forward network, or several of which a router chooses."""
        mixer = self.ffn_sublayer.mixer
        assert isinstance(mixer, FeedForward | Experts)
        return mixer

    @property
    def ffn(self) -> FeedForward:
        """Return the one feed-forward network of a layer that is not a mixture."""
        mixer = self.feed_forward
        assert isinstance(mixer, FeedForward)
        return mixer

    @property
    def experts(self) -> Experts | None:
        """Return the mixture of experts; None in a dense stack."""
        mixer = self.feed_forward
        return mixer if isinstance(mixer, Experts) else None

    def with_experts(self, experts: Experts) -> "Stack":
        """Return the stack with this mixture of experts in place of its own, or of the one FFN."""
        return self._with(self.feed_forward, experts)

    @property
    def shared_expert(self) -> FeedForward | None:
        """Return the expert of a mixture that every token passes; None without one."""
        name = None if self.experts is None else self.experts.shared_expert
        if name is None:
            return None
        return FeedForward(f"{name}.up_proj", f"{name}.down_proj", f"{name}.gate_proj", f"{name}.act_fn")

    @property
    def dense(self) -> "Stack":
        """Return the stack as a layer of a mixture is that has one FFN instead of experts."""
        return self.with_ffn(self.dense_ffn)

    def with_ffn(self, ffn: FeedForward) -> "Stack":
        """Return the stack with this FFN in place of its own, or of the mixture of experts."""
        return self._with(self.feed_forward, ffn)

    def with_attention(self, attention: Attention) -> "Stack":
        """Return the stack with this attention in place of its own."""
        return self._with(self.attention, attention)

    def _with(self, old: Attention | FeedForward | Experts, new: Attention | FeedForward | Experts) -> "Stack":
        sublayers = (replace(each, mixer=new) if each.mixer is old else each for each in self.sublayers)
        return replace(self, sublayers=tuple(sublayers))

    @property
    def centres(self) -> bool:
        """Return whether the norms are LayerNorms."""
        return self.ffn_sublayer.norms[0].centres

    @property
    def norms_after(self) -> bool:
        """Return whether norms follow the sums with the residual stream, which they then rewrite."""
        return self.ffn_sublayer.after is not None

    @property
    def norms_inside(self) -> bool:
        """Return whether norms follow the mixers, before the sums with the residual stream."""
        return self.ffn_sublayer.inside is not None

    def within(self, prefix: str) -> "Stack":
        """Return the same stack inside a module of a larger class, such as `bert.`."""
        return self.moved("", prefix)

    def moved(self, old: str, new: str) -> "Stack":
        """Return the same stack whose names begin with another prefix."""

        def moved(known: Any) -> Any:
            if isinstance(known, Norm):
                return replace(known, name=moved(known.name))
            return new + known.removeprefix(old) if known is not None and known.startswith(old) else known

        return replace(self, **{name: moved(getattr(self, name)) for name in NAMES})
