"""What a run took, and what came out."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class BlockReport:
    """What happened to one block (`ffn` or `heads`) of one layer.

    Errors are relative Frobenius norms of the block's output on the calibration text: `predicted_error` from the
    statistics (None where `up_proj` was corrected, too), `measured_error` on the activations themselves (None where no
    text was read).
    """

    kind: str
    dense_size: int
    kept_size: int
    predicted_error: float | None
    measured_error: float | None
    condition_number: float | None
    max_interpolation: float | None
    eigenvalue_fallback: bool = False
    damping: float | None = None


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
