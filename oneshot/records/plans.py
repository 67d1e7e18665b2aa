"""What shall stay of a model, and the profile that says what that costs."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from oneshot.records.shapes import ModelShape, StackShape, TableShape


@dataclass(frozen=True)
class HiddenPlan:
    """The widths of the residual stream where a norm reads it, `2 · layers + 1` of them, and who shares a subspace.

    `group_of[p]` is the group of position `p`: positions 2 l and 2 l + 1 are the inputs of attention and FFN of layer
    l, the last one is the input of the last norm. A position's width is its group's.
    """

    group_of: tuple[int, ...]
    sizes: tuple[int, ...]

    def changes_at(self, position: int) -> bool:
        """Whether the stream enters another subspace at this position."""
        return position > 0 and self.group_of[position] != self.group_of[position - 1]

    @property
    def num_groups(self) -> int:
        return self.group_of[-1] + 1


@dataclass(frozen=True)
class LayerPlan:
    """The kept FFN width and heads of one layer; all zero where the whole layer is left out."""

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int

    @property
    def is_left_out(self) -> bool:
        return self == LEFT_OUT


LEFT_OUT = LayerPlan(0, 0, 0)


@dataclass(frozen=True)
class Plan:
    """The kept sizes.

    FFN width and heads are those of `layers`, one for each of the dense model; those that stay are all alike in the
    stock tier. `head_unit` says what a removed head is: a
    whole `kv-group` (KV head and its query heads), or the same number of `query-head`s out of every group of a layer.
    `query_key_size`, `value_size`: kept per head, None for all. `hidden`: None where the residual stream keeps its
    width. `tier` is the form of the result: `stock` or `per-layer`. `embedding`: the ranges of the vocabulary and their
    ranks, none where the embedding stays whole.
    """

    layers: tuple[LayerPlan, ...]
    head_unit: str
    query_key_size: int | None = None
    value_size: int | None = None
    hidden: HiddenPlan | None = None
    tier: str = "stock"
    embedding: tuple[TableShape, ...] = ()

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Plan":
        """The inverse of `dataclasses.asdict`, also through JSON."""
        hidden = values["hidden"]
        if hidden is not None:
            hidden = HiddenPlan(**{name: tuple(value) for name, value in hidden.items()})
        layers = tuple(LayerPlan(**layer) for layer in values["layers"])
        embedding = tuple(TableShape(**table) for table in values["embedding"])
        return Plan(**{**values, "layers": layers, "hidden": hidden, "embedding": embedding})

    @property
    def kept_layers(self) -> list[int]:
        """The layers that stay, in order: the compressed model's layer i is the dense one's `kept_layers[i]`."""
        return [layer for layer, kept in enumerate(self.layers) if not kept.is_left_out]

    def is_uniform(self) -> bool:
        """Whether all layers have the same sizes, as a stock config demands."""
        return len({self.layers[layer] for layer in self.kept_layers}) == 1

    def shape_of_layer(self, shape: ModelShape, layer: int) -> ModelShape:
        """The shape with a layer's kept FFN width and heads: what a stock layer in the original coordinates has."""
        return replace(shape, **asdict(self.layers[layer]))

    def shrinks_layers(self, shape: ModelShape) -> bool:
        """Whether any layer that stays loses neurons or heads."""
        return any(self.shape_of_layer(shape, layer) != shape for layer in self.kept_layers)

    def reduces_blocks(self, shape: ModelShape) -> bool:
        """Whether any layer loses neurons or heads, or is left out."""
        return len(self.kept_layers) < shape.num_hidden_layers or self.shrinks_layers(shape)

    def stack(self, shape: ModelShape) -> StackShape:
        """The shape of the compressed model, layer by layer.

        A LayerNorm model in the per-layer form becomes an RMSNorm model: the norms' biases go into the linears'.
        """
        stack = shape.stack()
        if shape.norm_bias and self.tier == "per-layer":
            stack = replace(stack, head="own", head_bias=True, num_positions=shape.num_positions)
        layers = [
            replace(
                self.shape_of_layer(shape, layer).layer(),
                query_key_size=self.query_key_size or shape.head_dim,
                value_size=self.value_size or shape.head_dim,
                rotary_selected=self.query_key_size is not None and shape.num_positions == 0,
                norm_bias=shape.norm_bias and self.tier != "per-layer",
            )
            for layer in self.kept_layers
        ]
        if self.hidden is not None:
            hidden = self.hidden
            layers = [
                replace(
                    layer,
                    hidden_size=hidden.sizes[2 * index],
                    middle_size=hidden.sizes[2 * index + 1],
                    output_size=hidden.sizes[2 * index + 2],
                    attention_shortcut=hidden.changes_at(2 * index + 1),
                    ffn_shortcut=hidden.changes_at(2 * index + 2),
                )
                for index, layer in enumerate(layers)
            ]
            if stack.head == "tied":
                stack = replace(stack, head="mapped" if self.tier == "per-layer" else "own")
        return replace(stack, layers=tuple(layers), embedding=self.embedding)


@dataclass(frozen=True)
class ProfileOrigin:
    """What a profile was made of: the model, the text, and the settings that shape its curves."""

    model_hash: str
    token_hash: str
    head_unit: str
    damping: float
    probe_tokens: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Profile:
    """What smaller blocks cost, layer by layer, in the dense model; float64 tensors with a row for every layer.

    Attributes:
        ffn_errors: `(layers, n + 1)`: relative squared error of the FFN's output with the k best neurons and the best
            correction, for every k.
        head_errors: `(layers, units + 1)`: the same of attention, for every number of kept head units.
        ffn_sensitivity, head_sensitivity: `(layers,)`: mean KL divergence (nats per token) of the model's output from
            the dense one's, when this block alone is reduced, per unit of its relative squared error.
        layer_divergence: `(layers,)`: the same divergence when this layer alone is left out.
        block_influence: `(layers,)`: one less the mean cosine of the layer's input and output (ShortGPT equation 1).
        ffn_fluctuation: `(layers, n)`: variance of every neuron's activation, times its squared norm in `down_proj`.
        embedding_gram: `(D, D)`: mean `h hᵀ` of the states that the output head reads. `embedding_*` are empty where
            the output head is not the embedding, or its sensitivity was not measured.
        embedding_probabilities: `(N,)`: how often each token is predicted.
        embedding_errors: `(ranges, D + 1)`: what rank r of a range of the vocabulary loses of the logits, for every r
            (`embedding.range_errors`); one in all at rank 0, infinite where a rank is forbidden.
        embedding_sensitivity: `(1,)`: the divergence when the embedding alone is reduced, per unit of these errors.
    """

    ffn_errors: torch.Tensor
    head_errors: torch.Tensor
    ffn_sensitivity: torch.Tensor
    head_sensitivity: torch.Tensor
    layer_divergence: torch.Tensor
    block_influence: torch.Tensor
    ffn_fluctuation: torch.Tensor
    embedding_gram: torch.Tensor
    embedding_probabilities: torch.Tensor
    embedding_errors: torch.Tensor
    embedding_sensitivity: torch.Tensor
    origin: ProfileOrigin
