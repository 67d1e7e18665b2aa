"""Sizes of models, dense and compressed."""

from dataclasses import dataclass, fields, replace

from oneshot.architecture.carried import CarriedSizes
from oneshot.architecture.expert_sizes import ExpertSizes
from oneshot.architecture.latent import LatentSizes
from oneshot.architecture.layer_shape import RANKED_KINDS, LayerShape, TableShape


@dataclass(frozen=True)
class StackShape:
    """State the sizes of a whole model, layer by layer.

    `head` says where the output head comes from: `own` weights, the `tied` embedding, the tied embedding after a
    matrix from the last subspace to the embedding's (`mapped`), or `none`. `num_positions`, `num_token_types`: rows of
    learned embeddings of these. `embedding`, `output_head`: ranges of the vocabulary with their own ranks, of the
    embedding and of a head of its own; empty for a whole table. `final_norm`: a norm follows the last layer.
    `output_size`: a linear follows it that leads back to so many coordinates; 0 for none. `table_width`: columns of the
    token embedding and of the head if linears lead from there to the hidden size and back; 0 without such linears.
    `further_parameters`: of what is kept as it is, such as a pooler or a classifier. `causal`: the model keeps the keys
    and values of earlier tokens.
    """

    layers: tuple[LayerShape, ...]
    vocab_size: int
    head: str
    head_bias: bool = False
    num_positions: int = 0
    embedding: tuple[TableShape, ...] = ()
    output_head: tuple[TableShape, ...] = ()
    num_token_types: int = 0
    final_norm: bool = True
    output_size: int = 0
    table_width: int = 0
    further_parameters: int = 0
    causal: bool = True

    @property
    def embedding_size(self) -> int:
        """Return the width of the embedding."""
        return self.layers[0].hidden_size

    @property
    def has_linear_ranks(self) -> bool:
        """Return whether a linear of any layer has low rank."""
        return any(getattr(layer, f"{kind}_rank") for layer in self.layers for kind in RANKED_KINDS)

    @property
    def has_table_ranks(self) -> bool:
        """Return whether the embedding or the output head has ranges of the vocabulary."""
        return bool(self.embedding or self.output_head)

    @property
    def is_encoder_decoder(self) -> bool:
        """Return whether an encoder's layers come first; it has a final norm of its own."""
        return self.layers[-1].cross_attention

    @property
    def final_size(self) -> int:
        """Return the width of the last norm."""
        return self.layers[-1].output_size

    def all_layer_parameters(self) -> int:
        """Return the stored parameters of the layers."""
        return sum(layer.parameters() for layer in self.layers)

    def indices(self) -> int:
        """Return how many of the stored parameters are indices, int64."""
        tables = sum(table.indices(self.embedding_size) for table in (*self.embedding, *self.output_head))
        return tables + sum(layer.indices() for layer in self.layers)

    def stored_parameters(self) -> int:
        """Return the stored parameters of everything."""
        embeddings = self._table_parameters() + (self.num_positions + self.num_token_types) * self.embedding_size
        norm = self.final_norm * self.final_size * (1 + self.layers[-1].norm_bias) * (1 + self.is_encoder_decoder)
        output = self.output_size * (self.final_size + 1)
        width = self.table_width or self.output_size or self.final_size
        head = {"own": self.vocab_size, "tied": 0, "mapped": self.embedding_size, "none": 0}[self.head] * width
        if self.output_head:
            head = sum(table.parameters(width) for table in self.output_head)
        head += self.head_bias * self.vocab_size
        projections = self.table_width * (self.embedding_size + self.final_size)
        layers = self.all_layer_parameters()
        return embeddings + projections + layers + norm + output + head + self.further_parameters

    def flops_per_token(self) -> int:
        """Return the operations of all linears for one token, with the output head and without attention scores.

        In an encoder–decoder that is one token of the source and one of the target.
        """
        linears = sum(layer.active_parameters() for layer in self.layers) + self.output_size * self.final_size
        linears += self.table_width * (self.embedding_size + self.final_size)
        mapped = self.head == "mapped"
        head = sum(table.map_parameters(self.embedding_size) for table in self.embedding)  # of the input
        if ranges := self.output_head or (self.embedding if self.head != "own" else ()):
            head += sum(table.products(self.embedding_size) for table in ranges)
        elif self.head == "own":
            head += self.vocab_size * (self.table_width or self.final_size)
        elif self.head != "none":
            head += self._table_parameters()
        return 2 * (linears + head + mapped * self.embedding_size * (self.output_size or self.final_size))

    def layer_flops_per_token(self, context: float) -> float:
        """Return the operations of the layers for one token that attends to `context` tokens, products QKᵀ and AV too.

        It is the count of STAT section 4 and of Kwon et al. (2022): embedding and output head are left out.
        """
        linears = sum(layer.active_parameters() for layer in self.layers)
        sizes = sum(layer.num_attention_heads * (layer.query_key_size + layer.value_size) for layer in self.layers)
        return 2 * (linears + sizes * context)

    def _table_parameters(self) -> int:
        """Return the stored parameters of the token embedding."""
        if not self.embedding:
            return self.vocab_size * (self.table_width or self.embedding_size)
        return sum(table.parameters(self.embedding_size) for table in self.embedding)

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Return the bytes that one token takes in the KV cache (by default of 16-bit values); 0 without a cache.

        In an encoder–decoder that is one token of the source and one of the target.
        """
        cached = [layer for layer in self.layers if layer.cross_attention or not self.is_encoder_decoder]
        keeps = self.causal or self.is_encoder_decoder
        return keeps * sum(layer.key_value_size() for layer in cached) * bytes_per_value


@dataclass(frozen=True)
class OwnSizes:
    """State the sizes of one layer of a model whose layers differ, under the names of `ModelShape`."""

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int


@dataclass(frozen=True)
class ModelShape:
    """State the sizes of a model with equal layers, as its stock config has them; flags as in `LayerShape`.

    `layer_norms`: the norms are LayerNorms, which subtract the mean. `norm_bias`: they have a bias. `num_positions`:
    rows of a learned position embedding that tokens use, `unused_positions`: rows stored before them. `has_head`: the
    model predicts tokens; without `tied` by a head of its own. `norms_after`: norms follow the sums with the residual
    stream. `final_norm`, `num_token_types`, `table_width`, `further_parameters`, `causal`: as in `StackShape`.
    `num_decoder_layers`: the last layers, which have cross-attention; 0 without an encoder. `num_buckets`: of relative
    positions, in the first layer of each stack. `experts`: the mixture's sizes; `intermediate_size` is then the
    width of one expert. `latent`, `sinks`: as in `LayerShape`; with a latent, `head_dim` is the size of values.
    `carried`: mixers that stay as they are, in the place of attention. `narrow_layers`: those whose FFN has half of
    `intermediate_size`. `own_sizes`: of every layer of a model whose layers differ, empty for equal ones. The other
    sizes are then the largest, and whoever computes with a layer asks its own shape (`of`).
    """

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norms: bool = False
    norms_all_heads: bool = False
    norms_per_sublayer: int = 1
    shared_norm: bool = False
    head_bias: bool = False
    vocab_size: int = 0
    layer_norms: bool = False
    norm_bias: bool = False
    gated: bool = True
    tied: bool = False
    num_positions: int = 0
    unused_positions: int = 0
    has_head: bool = True
    final_norm: bool = True
    norms_after: bool = False
    num_token_types: int = 0
    table_width: int = 0
    further_parameters: int = 0
    causal: bool = True
    num_decoder_layers: int = 0
    num_buckets: int = 0
    experts: ExpertSizes | None = None
    latent: LatentSizes | None = None
    sinks: bool = False
    carried: tuple[CarriedSizes, ...] = ()
    narrow_layers: tuple[int, ...] = ()
    own_sizes: tuple[OwnSizes, ...] = ()

    def of(self, number: int) -> "ModelShape":
        """Return the shape of a model whose layers are all as large as this one."""
        return replace(self, own_sizes=(), **vars(self.own_sizes[number])) if self.own_sizes else self

    @property
    def distinct(self) -> tuple["ModelShape", ...]:
        """Return the shapes that layers have, each once."""
        return tuple(dict.fromkeys(map(self.of, range(len(self.own_sizes) or 1))))

    def with_layers(self, layers: tuple[LayerShape, ...]) -> "ModelShape":
        """Return the shape whose layers have these FFN widths and heads, with the largest of them for the model."""
        sizes = tuple(self._own(number, layer) for number, layer in enumerate(layers))
        largest = {field.name: max(getattr(one, field.name) for one in sizes) for field in fields(OwnSizes)}
        return replace(self, **largest, own_sizes=sizes if len(set(sizes)) > 1 else ())

    def _own(self, number: int, layer: LayerShape) -> OwnSizes:
        """Return the sizes of a layer under the names of this shape; a carried mixer has its own heads."""
        heads, groups = layer.num_attention_heads, layer.num_key_value_heads
        if self.carried_in(number) is not None:
            heads, groups = self.num_attention_heads, self.num_key_value_heads
        return OwnSizes(layer.intermediate_size * self.width_share(number), heads, groups)

    def width_share(self, number: int) -> int:
        """Return what `intermediate_size` is divided by in the FFN of a layer."""
        return 2 if number in self.narrow_layers else 1

    def carried_in(self, number: int) -> CarriedSizes | None:
        """Return the carried mixer of a layer; None for attention."""
        return next((sizes for sizes in self.carried if number in sizes.layers), None)

    def carried_tensors(self, number: int) -> dict[str, tuple[int, ...]]:
        """Return the tensors of the carried mixer of a layer, without the layer's prefix; none for attention."""
        sizes = self.carried_in(number)
        return {} if sizes is None else dict(sizes.tensors)

    @property
    def lent(self) -> int:
        """Return the numbers of a token in keys and values that later layers read."""
        return sum(2 * sizes.groups * sizes.head_dim for sizes in self.carried if sizes.lends)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the states that carried mixers keep of a text, in float32."""
        return 4 * sum(len(sizes.layers) * sizes.state for sizes in self.carried)

    @property
    def query_key_size(self) -> int:
        """Return the size of a head's queries and keys; `head_dim` is its values' size."""
        return self.head_dim if self.latent is None else self.latent.key_size

    @property
    def heads_per_group(self) -> int:
        """Return the number of query heads that share one KV head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def ffns_per_layer(self) -> int:
        """Return the FFNs of the width `intermediate_size` in a layer."""
        return 1 if self.experts is None else self.experts.count

    @property
    def tokens_per_arrival(self) -> float:
        """Return E ÷ k: tokens of text per token that reaches one expert, with balanced routing; 1 in a dense model."""
        return 1.0 if self.experts is None else self.experts.count / self.experts.per_token

    @property
    def width_step(self) -> int:
        """Return what FFN widths must be multiples of: grouped products of experts need rows of whole 16 bytes."""
        return (2 if self.narrow_layers else 1) if self.experts is None else 8

    @property
    def query_key_width(self) -> int:
        """Return the numbers in a token's queries and keys together."""
        return (self.num_attention_heads + self.num_key_value_heads) * self.query_key_size

    def layer(self, number: int = 0) -> LayerShape:
        """Return the shape of a layer; a decoder's layers differ, and so do a mixture's layers without experts."""
        if self.own_sizes:
            return self.of(number).layer(number)
        experts, width = self.experts, self.intermediate_size // self.width_share(number)
        if experts is not None and number in experts.dense_layers:
            width, experts = experts.dense_width, None
        carried = self.carried_in(number)
        attends, head_dim, groups = carried is None or carried.attends, 0, self.num_key_value_heads
        if carried is not None:
            head_dim, groups = carried.head_dim, 0 if carried.borrows else carried.groups or groups
        first_of_decoder = self.num_hidden_layers - self.num_decoder_layers
        return LayerShape(
            hidden_size=self.hidden_size,
            middle_size=self.hidden_size,
            output_size=self.hidden_size,
            intermediate_size=width,
            num_attention_heads=self.num_attention_heads * attends,
            num_key_value_heads=groups * attends,
            query_key_size=head_dim or self.query_key_size,
            value_size=head_dim or self.head_dim,
            attention_bias=self.attention_bias,
            output_bias=self.output_bias,
            mlp_bias=self.mlp_bias,
            norm_bias=self.norm_bias,
            query_key_norms=self.query_key_norms and carried is None,
            norms_all_heads=self.norms_all_heads,
            norms_per_sublayer=self.norms_per_sublayer,
            shared_norm=self.shared_norm,
            gated=self.gated,
            cross_attention=number >= first_of_decoder and self.num_decoder_layers > 0,
            num_buckets=self.num_buckets if number in (0, first_of_decoder) else 0,
            experts=experts,
            latent=self.latent,
            sinks=self.sinks,
            carried=0 if carried is None else carried.parameters,
        )

    def layer_parameters(self) -> int:
        """Return the stored parameters of the largest layer, norms included."""
        return max(layer.parameters() for layer in self.stack().layers)

    def active_parameters(self) -> int:
        """Return the parameters of the layers' linears that a token passes, of the largest layer."""
        return max(layer.active_parameters() for layer in self.stack().layers)

    def stack(self) -> StackShape:
        """Return the same sizes, layer by layer."""
        head = "tied" if self.tied else "own" if self.has_head else "none"
        return StackShape(
            tuple(self.layer(number) for number in range(self.num_hidden_layers)),
            self.vocab_size,
            head,
            self.head_bias,
            num_positions=self.num_positions + self.unused_positions,
            num_token_types=self.num_token_types,
            final_norm=self.final_norm,
            table_width=self.table_width,
            further_parameters=self.further_parameters,
            causal=self.causal,
        )
