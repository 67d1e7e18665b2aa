"""Sublayers of a layer by their tensor names: attention, a feed-forward network or experts, and its norm."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from oneshot.architecture.axes import Axes, linear
from oneshot.architecture.carried import Carried, NotAttention
from oneshot.architecture.experts import Experts
from oneshot.architecture.layer_shape import LayerShape, RankedKind
from oneshot.architecture.shapes import ModelShape

SublayerKind = Literal["heads", "cross-heads", "carried", "ffn"]


@dataclass(frozen=True)
class Norm:
    """A normalisation: RMSNorm or LayerNorm.

    `offset`: it multiplies by its weight plus this number. `has_bias`: of a LayerNorm; an RMSNorm has none.
    """

    name: str
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    has_bias: bool = True

    @property
    def centres(self) -> bool:
        """Return whether it subtracts the mean."""
        return self.kind == "layer"

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of its tensors."""
        names = ("weight", "bias") if self.centres and self.has_bias else ("weight",)
        return tuple(f"{self.name}.{part}" for part in names)


@dataclass(frozen=True)
class Attention:
    """Attention over the same stack's hidden states, or over the memory: the encoder's output (cross-attention).

    Attributes:
        module: what is called; it includes the output linear if the name of `out` lies below it.
        q, k, v, out: linears. q_norm, k_norm: norms of queries and keys; None without them.
        norms_all_heads: whether these norm all heads of a token together, with a weight for every coordinate, instead
            of each head by itself with the weights that all share.
        fixed_heads: whether the stock class has heads as wide as its hidden size, so that its layers keep all heads.
        sinks: a number for every head that joins the scores of its tokens; None without them.
        latent: whether keys and values come from a latent (`latent`). Then `q`, `k` and `v` are what reads the
            norm's output, and the attention stays as it is.
        one_group: whether all heads share one KV head, which the config does not state as a number.
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
    norms_all_heads: bool = False
    fixed_heads: bool = False
    one_group: bool = False
    latent: bool = False
    sinks: str | None = None
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

    def axes(self, shape: ModelShape | LayerShape) -> Axes:
        """Return the axes of its tensors."""
        if shape.latent is not None:
            return shape.latent.axes(self.module, biased=shape.attention_bias)
        biased = shape.attention_bias
        axes = linear(self.q, "heads key", "stream", biased=biased)
        axes |= linear(self.out, "stream", "heads value", biased=shape.output_bias)
        axes |= linear(self.k, "groups key", "stream", biased=biased)
        axes |= linear(self.v, "groups value", "stream", biased=biased)
        if shape.query_key_norms:
            norms = ("heads key", "groups key") if self.norms_all_heads else ("key", "key")
            axes |= {f"{norm}.weight": (own,) for norm, own in zip(self.own_norms, norms, strict=True)}
        if self.sinks is not None:
            axes[self.sinks] = ("heads",)
        if self.relative_bias is not None and shape.num_buckets:
            axes[self.relative_bias] = ("buckets", "heads")
        return axes

    @property
    def own_norms(self) -> tuple[str, ...]:
        """Return the norms of queries and keys."""
        return tuple(norm for norm in (self.q_norm, self.k_norm) if norm is not None)

    @property
    def contains_writer(self) -> bool:
        """Return whether the module applies its output linear itself."""
        return self.out.startswith(f"{self.module}.")

    @property
    def modules(self) -> tuple[str | None, ...]:
        """Return the names of its parts, in an order that all families have."""
        return (self.q, self.k, self.v, self.out, self.q_norm, self.k_norm, self.module)

    @property
    def rotary_pairs(self) -> str:
        """Return the name under which kept rotary pairs are stored; only some forms have it."""
        return f"{self.module}.rotary_pairs"

    @property
    def ranked(self) -> dict[RankedKind, tuple[str, ...]]:
        """Return the linears that may have low rank, by their kind; all of a kind have one rank together."""
        return {} if self.latent else {"query_key": (self.q, self.k), "output": (self.out,)}


@dataclass(frozen=True)
class FeedForward(NotAttention):
    """A feed-forward network, with or without a gate.

    `activation`: what is applied to gate or up: a submodule by its name, or a function if the class has none.
    `gate_scale`: what the gate is multiplied with before it.
    """

    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    gate: str | None = "mlp.gate_proj"
    activation: str | Callable[[torch.Tensor], torch.Tensor] = "mlp.act_fn"
    gate_scale: float = 1.0

    @property
    def kind(self) -> SublayerKind:
        return "ffn"

    @property
    def ranked(self) -> dict[RankedKind, tuple[str, ...]]:
        """Return the linears that may have low rank, by their kind; only with a gate."""
        return {} if self.gate is None else {"gate": (self.gate,), "up": (self.up,)}

    @property
    def modules(self) -> tuple[str | None, ...]:
        """Return the names of its parts, in an order that all families have."""
        return (self.gate, self.up, self.down)

    @property
    def readers(self) -> tuple[str, ...]:
        """Return the linears that read the norm's output."""
        return (self.up,) if self.gate is None else (self.gate, self.up)

    @property
    def out(self) -> str:
        """Return the linear that writes to the residual stream."""
        return self.down

    @property
    def is_gated(self) -> bool:
        """Return whether it has a gate beside its up projection."""
        return self.gate is not None

    def axes(self, shape: ModelShape | LayerShape) -> Axes:
        """Return the axes of its tensors."""
        axes: Axes = {}
        for reader in self.readers:
            axes |= linear(reader, "neurons", "stream", biased=shape.mlp_bias)
        return axes | linear(self.down, "stream", "neurons", biased=shape.mlp_bias)

    def held(self, tensors: Mapping[str, torch.Tensor], shape: ModelShape) -> ModelShape:
        """Return the shape with the sizes that these tensors have."""
        return replace(shape, intermediate_size=tensors[f"{self.down}.weight"].shape[1])


Mixer = Attention | Carried | FeedForward | Experts

READERS: dict[RankedKind, str] = {"query_key": "qk_read", "output": "o_read", "gate": "gate_read", "up": "up_read"}
"""Names of the modules through which linears of low rank read, in the per-layer form."""


def read_by(mixer: Mixer, kind: RankedKind) -> str:
    """Return the name of the module through which a mixer's linears of low rank read, which is beside them."""
    linear, *_ = mixer.ranked[kind]
    return f"{linear.rpartition('.')[0]}.{READERS[kind]}"


@dataclass(frozen=True)
class Sublayer:
    """One part of a layer, a mixer with its norms: `x = after(x + inside(mixer(before(x))))`, each of them optional."""

    mixer: Mixer
    before: Norm | None = None
    inside: Norm | None = None
    after: Norm | None = None

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Return the norms that it has."""
        return tuple(norm for norm in (self.before, self.inside, self.after) if norm is not None)

    @property
    def norm(self) -> Norm:
        """Return the norm of the stream itself, for sublayers whose only norm is before or after them."""
        norm = self.before or self.after
        assert norm is not None
        return norm

    @property
    def kind(self) -> SublayerKind:
        return self.mixer.kind

    @property
    def shortcut(self) -> str:
        """Return the name of the matrix that carries the stream past it between two subspaces."""
        return {"ffn": "ffn_shortcut", "cross-heads": "cross_attention_shortcut"}.get(self.kind, "attention_shortcut")

    def axes(self, layer: LayerShape) -> Axes:
        """Return the axes of its tensors in a layer of these sizes; none if the layer is without it."""
        is_there = layer.intermediate_size if self.kind == "ffn" else layer.num_attention_heads
        norms: Axes = {part: ("stream",) for norm in self.norms for part in norm.parts}
        return self.mixer.axes(layer) | norms if is_there else {}

    @property
    def readers(self) -> tuple[str, ...]:
        """Return the linears that read this sublayer's input."""
        return self.mixer.readers

    @property
    def writer(self) -> str:
        """Return the linear that writes to the residual stream; its columns are removed and corrected.

        Of experts: their module.
        """
        return self.mixer.out
