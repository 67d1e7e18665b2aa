"""Frozen records that cross the stages. Plain data with JSON round trips; no behaviour beyond arithmetic."""

import hashlib
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True)
class LayerShape:
    """The sizes of one decoder layer; in a per-layer checkpoint every layer has its own.

    The residual stream has `hidden_size` coordinates where attention reads it, `middle_size` where the FFN does and
    `output_size` behind it. Where two neighbours lie in different subspaces, a *shortcut* matrix takes the stream
    from one to the other. `query_key_size` and `value_size` are per head; `rotary_selected`: the layer stores which
    rotary pairs each KV group keeps.

    `attention_bias`, `output_bias` and `mlp_bias` say which linears store a bias: q/k/v, o, and the FFN's. `norm_bias`:
    LayerNorm instead of RMSNorm. `query_key_norms`: queries and keys are normed, each by one weight for all heads.
    `gated`: the FFN has a gate beside its up projection.
    """

    hidden_size: int
    middle_size: int
    output_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    query_key_size: int
    value_size: int
    attention_shortcut: bool = False
    ffn_shortcut: bool = False
    rotary_selected: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    query_key_norms: bool = False
    gated: bool = True

    def linear_parameters(self) -> int:
        """Stored parameters of the layer's linears, shortcuts included."""
        heads, groups, width = self.num_attention_heads, self.num_key_value_heads, self.intermediate_size
        projected = (heads + groups) * self.query_key_size + groups * self.value_size
        attention = projected * (self.hidden_size + self.attention_bias)
        attention += self.middle_size * (heads * self.value_size + self.output_bias)
        inputs = 1 + self.gated
        mlp = inputs * width * (self.middle_size + self.mlp_bias) + self.output_size * (width + self.mlp_bias)
        shortcuts = self.attention_shortcut * self.hidden_size * self.middle_size
        shortcuts += self.ffn_shortcut * self.middle_size * self.output_size
        return attention + mlp + shortcuts

    def parameters(self) -> int:
        """Stored parameters, norms included."""
        norms = (self.hidden_size + self.middle_size) * (1 + self.norm_bias)
        pairs = self.rotary_selected * self.num_key_value_heads * self.query_key_size // 2
        return self.linear_parameters() + norms + pairs + 2 * self.query_key_size * self.query_key_norms

    def key_value_size(self) -> int:
        """Values that one token takes in the layer's KV cache."""
        return self.num_key_value_heads * (self.query_key_size + self.value_size)


@dataclass(frozen=True)
class StackShape:
    """The sizes of a whole model, layer by layer.

    `head` says where the output head comes from: `own` weights, the `tied` embedding, or the tied embedding behind a
    matrix from the last subspace to the embedding's (`mapped`). `num_positions`: rows of a learned position embedding.
    """

    layers: tuple[LayerShape, ...]
    vocab_size: int
    head: str
    head_bias: bool = False
    num_positions: int = 0

    @property
    def embedding_size(self) -> int:
        """Width of the embedding."""
        return self.layers[0].hidden_size

    @property
    def final_size(self) -> int:
        """Width of the last norm."""
        return self.layers[-1].output_size

    def block_parameters(self) -> int:
        """Stored parameters of the decoder layers."""
        return sum(layer.parameters() for layer in self.layers)

    def stored_parameters(self) -> int:
        """Stored parameters of everything."""
        embeddings = (self.vocab_size + self.num_positions) * self.embedding_size
        norm = self.final_size * (1 + self.layers[-1].norm_bias)
        head = {"own": self.vocab_size, "tied": 0, "mapped": self.embedding_size}[self.head] * self.final_size
        return embeddings + self.block_parameters() + norm + head + self.head_bias * self.vocab_size

    def flops_per_token(self) -> int:
        """Floating-point operations of all linears for one token, the output head included, attention scores not."""
        linears = sum(layer.linear_parameters() for layer in self.layers)
        mapped = self.head == "mapped"
        head = self.vocab_size * (self.embedding_size if mapped else self.final_size)
        return 2 * (linears + head + mapped * self.embedding_size * self.final_size)

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Bytes that one token takes in the KV cache (16-bit values unless told otherwise)."""
        return sum(layer.key_value_size() for layer in self.layers) * bytes_per_value


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model whose layers are alike, as its stock config states them; flags as in `LayerShape`.

    `num_positions`: rows of a learned position embedding that tokens use, `unused_positions`: stored before them.
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
    vocab_size: int = 0
    norm_bias: bool = False
    gated: bool = True
    tied: bool = False
    num_positions: int = 0
    unused_positions: int = 0

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_attention_heads // self.num_key_value_heads

    def layer(self) -> LayerShape:
        """The shape of each layer."""
        return LayerShape(
            hidden_size=self.hidden_size,
            middle_size=self.hidden_size,
            output_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            query_key_size=self.head_dim,
            value_size=self.head_dim,
            attention_bias=self.attention_bias,
            output_bias=self.output_bias,
            mlp_bias=self.mlp_bias,
            norm_bias=self.norm_bias,
            query_key_norms=self.query_key_norms,
            gated=self.gated,
        )

    def layer_parameters(self) -> int:
        """Stored parameters of one decoder layer, its norms included."""
        return self.layer().parameters()

    def stack(self) -> StackShape:
        """The same sizes, layer by layer."""
        head = "tied" if self.tied else "own"
        layers = (self.layer(),) * self.num_hidden_layers
        return StackShape(layers, self.vocab_size, head, num_positions=self.num_positions + self.unused_positions)


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
    width. `tier` is the form of the result: `stock` or `per-layer`.
    """

    layers: tuple[LayerPlan, ...]
    head_unit: str
    query_key_size: int | None = None
    value_size: int | None = None
    hidden: HiddenPlan | None = None
    tier: str = "stock"

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Plan":
        """The inverse of `dataclasses.asdict`, also through JSON."""
        hidden = values["hidden"]
        if hidden is not None:
            hidden = HiddenPlan(**{name: tuple(value) for name, value in hidden.items()})
        layers = tuple(LayerPlan(**layer) for layer in values["layers"])
        return Plan(**{**values, "layers": layers, "hidden": hidden})

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
        return replace(stack, layers=tuple(layers))


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
    """

    ffn_errors: torch.Tensor
    head_errors: torch.Tensor
    ffn_sensitivity: torch.Tensor
    head_sensitivity: torch.Tensor
    layer_divergence: torch.Tensor
    block_influence: torch.Tensor
    origin: ProfileOrigin


def token_hash(token_ids: torch.Tensor) -> str:
    """The SHA-256 of int64 tokens."""
    return hashlib.sha256(token_ids.numpy().tobytes()).hexdigest()


@dataclass(frozen=True)
class CalibrationSet:
    """Packed token sequences `(num_sequences, sequence_length)`, int64, and where they came from."""

    token_ids: torch.Tensor
    source: str

    @property
    def token_hash(self) -> str:
        """The SHA-256 of the tokens' bytes."""
        return token_hash(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()


@dataclass(frozen=True)
class Moments:
    """First moments of activations, float64 `(n,)`: `E a`, `E|a|` and `E a²`."""

    mean: torch.Tensor
    absolute_mean: torch.Tensor
    square_mean: torch.Tensor

    @property
    def deviation(self) -> torch.Tensor:
        """Standard deviations `(n,)`."""
        return (self.square_mean - self.mean.square()).clamp_min(0).sqrt()


@dataclass(frozen=True)
class BlockStatistics:
    """What the calibration text says about the activations `A` that a linear `W` consumes.

    Attributes:
        gram: `AᵀA (n, n)` float32.
        residual: `Aᵀ(Y − A Wᵀ) (n, d)` float32: what the dense stream wants beyond the layer's own output; or None.
        residual_energy: `‖Y − A Wᵀ‖²`, a float64 scalar; zero without a residual.
        num_rows: tokens seen.
        sketch: `S A (s, n)` float32 for pivots alone, where the recipe asks for one; or None.
        moments: of the activations, where the recipe asks for them; or None.
    """

    gram: torch.Tensor
    residual: torch.Tensor | None
    residual_energy: torch.Tensor
    num_rows: int
    sketch: torch.Tensor | None = None
    moments: Moments | None = None


@dataclass(frozen=True)
class Factors:
    """A compressed block: the columns it keeps and the linear that consumes them.

    Attributes:
        kept: int64, ascending, the kept columns of the consuming linear.
        weight: `(d, k)` float64, its corrected weight over those columns.
        predicted_error: relative Frobenius error of the block's output from the statistics; None without them.
        condition_number, max_interpolation: of the ridged skeleton Gram, of T; None where nothing was solved.
    """

    kept: torch.Tensor
    weight: torch.Tensor
    predicted_error: float | None = None
    condition_number: float | None = None
    max_interpolation: float | None = None
    eigenvalue_fallback: bool = False


@dataclass(frozen=True)
class BlockReport:
    """What happened to one block (`ffn` or `heads`) of one layer.

    Errors are relative Frobenius norms of the block's output on the calibration text: `predicted_error` from the
    statistics, `measured_error` on the activations themselves (None where no text was read).
    """

    kind: str
    dense_size: int
    kept_size: int
    predicted_error: float | None
    measured_error: float | None
    condition_number: float | None
    max_interpolation: float | None
    eigenvalue_fallback: bool = False


@dataclass(frozen=True)
class LayerReport:
    """One decoder layer: its blocks, the time it took, the process's peak memory when it was done, and warnings."""

    layer: int
    blocks: tuple[BlockReport, ...]
    seconds: float
    peak_bytes: int
    peak_device_bytes: int
    warnings: tuple[str, ...] = ()

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "LayerReport":
        """The inverse of `dataclasses.asdict`, also through JSON."""
        blocks = tuple(BlockReport(**block) for block in values["blocks"])
        return LayerReport(**{**values, "blocks": blocks, "warnings": tuple(values["warnings"])})


@dataclass(frozen=True)
class Footprint:
    """What a run was predicted to take. Memory is an upper bound; seconds may be off by a factor of two.

    Attributes:
        host_bytes: peak resident memory of the process; host_stage: the stage that has it.
        device_bytes: peak of what torch takes on a CUDA device, 0 without one; device_stage as above.
        tier: where activations live: `device`, `host` or `disk`.
        result_bytes: of the result's weights. scratch_bytes: of files in the off-load folder, activations included.
        stored_parameters: of the model before (`dense`) and after (`compressed`).
        seconds: by stage, and `total`.
        exact: whether sizes of layers are known; a profile still says them otherwise.
    """

    host_bytes: int
    host_stage: str
    device_bytes: int
    device_stage: str
    tier: str
    result_bytes: int
    scratch_bytes: int
    stored_parameters: dict[str, int]
    seconds: dict[str, float]
    exact: bool = True


@dataclass(frozen=True)
class Report:
    """Everything worth knowing about a run; written as `oneshot_report.json` beside the weights.

    `dense_shape` and `plan` are a `ModelShape` and a `Plan`. `hidden_error` is the relative Frobenius norm of what a
    smaller hidden size leaves out of the residual stream. `predicted_divergence`: see `plan.predicted_divergences`;
    None without a profile. `footprint` is what was predicted, beside the `peak_bytes` and `seconds` that were measured.
    `fingerprint`: what decides whether an interrupted run may go on. `warnings`: those that belong to no layer.
    """

    config: dict[str, Any]
    recipe: dict[str, Any]
    versions: dict[str, str]
    dense_shape: dict[str, Any]
    plan: dict[str, Any]
    stored_parameters: dict[str, int]
    block_parameters: dict[str, int]
    flops_per_token: dict[str, int]
    kv_bytes_per_token: dict[str, int]
    sparsity: dict[str, float | None]
    calibration: dict[str, Any] | None
    layers: tuple[LayerReport, ...]
    seconds: dict[str, float]
    peak_bytes: int
    peak_device_bytes: int
    hidden_error: float | None = None
    predicted_divergence: dict[str, float] | None = None
    footprint: Footprint | None = None
    fingerprint: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Report":
        """The inverse of `to_dict`, also through JSON."""
        layers = tuple(LayerReport.from_dict(layer) for layer in values["layers"])
        footprint = None if values["footprint"] is None else Footprint(**values["footprint"])
        warnings = tuple(values["warnings"])
        return Report(**{**values, "layers": layers, "footprint": footprint, "warnings": warnings})
