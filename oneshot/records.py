"""Frozen records that cross the stages. Plain data with JSON round trips; no behaviour beyond arithmetic."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama-like model, as its stock config states them.

    `attention_bias`, `output_bias` and `mlp_bias` say which linears store a bias: q/k/v, o, and gate/up/down.
    `query_key_norms`: whether queries and keys are normed, each by one weight of `head_dim` for all heads.
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

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_attention_heads // self.num_key_value_heads

    def norm_parameters(self) -> int:
        """Stored parameters of one decoder layer's norms."""
        return 2 * self.hidden_size + 2 * self.head_dim * self.query_key_norms

    def layer_parameters(self) -> int:
        """Stored parameters of one decoder layer, its norms included."""
        query = self.num_attention_heads * self.head_dim
        key_value = 2 * self.num_key_value_heads * self.head_dim
        attention = (query + key_value) * (self.hidden_size + self.attention_bias)
        attention += self.hidden_size * (query + self.output_bias)
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        return attention + mlp + self.norm_parameters()

    def flops_per_token(self) -> int:
        """Floating-point operations of all linears for one token, the output head included, attention scores not."""
        linears = self.layer_parameters() - self.norm_parameters()
        return 2 * (self.num_hidden_layers * linears + self.vocab_size * self.hidden_size)

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Bytes that one token takes in the KV cache (16-bit values unless told otherwise)."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * bytes_per_value


@dataclass(frozen=True)
class Plan:
    """The kept sizes, one of each kind for the whole model (the `stock` tier).

    `head_unit` says what a removed head is: a whole `kv-group` (KV head and its query heads), or the same number of
    `query-head`s out of every group.
    """

    kept_intermediate_size: int
    kept_num_attention_heads: int
    kept_num_key_value_heads: int
    head_unit: str

    def apply(self, shape: ModelShape) -> ModelShape:
        """The shape of the compressed model."""
        return replace(
            shape,
            intermediate_size=self.kept_intermediate_size,
            num_attention_heads=self.kept_num_attention_heads,
            num_key_value_heads=self.kept_num_key_value_heads,
        )


@dataclass(frozen=True)
class CalibrationSet:
    """Packed token sequences and where they came from.

    `token_ids` is an int64 tensor `(num_sequences, sequence_length)`; `token_hash` is the SHA-256 of its bytes.
    """

    token_ids: torch.Tensor
    source: str
    token_hash: str

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()


@dataclass(frozen=True)
class BlockStatistics:
    """What the calibration text says about the activations `A` that a linear `W` consumes.

    Attributes:
        gram: `AᵀA (n, n)` float32.
        residual: `Aᵀ(Y − A Wᵀ) (n, d)` float32: what the dense stream wants beyond the layer's own output; or None.
        residual_energy: `‖Y − A Wᵀ‖²`, a float64 scalar; zero without a residual.
        num_rows: tokens seen.
        sketch: `S A (s, n)` float32 for pivots alone, where the recipe asks for one; or None.
    """

    gram: torch.Tensor
    residual: torch.Tensor | None
    residual_energy: torch.Tensor
    num_rows: int
    sketch: torch.Tensor | None = None


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
    """One decoder layer: its blocks, the time it took and the process's peak memory when it was done."""

    layer: int
    blocks: tuple[BlockReport, ...]
    seconds: float
    peak_bytes: int
    peak_device_bytes: int


@dataclass(frozen=True)
class Report:
    """Everything worth knowing about a run; written as `oneshot_report.json` beside the weights.

    `hidden_error` is the relative Frobenius norm of what a smaller hidden size leaves out of the residual stream.
    """

    config: dict[str, Any]
    recipe: dict[str, Any]
    versions: dict[str, str]
    dense_shape: dict[str, Any]
    compressed_shape: dict[str, Any]
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

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return asdict(self)
