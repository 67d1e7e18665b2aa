"""Report on a finished layer: the errors of its sublayers, and what subspaces leave out of their inputs."""

import torch

from oneshot.checkpoint import Model
from oneshot.compression.correction import Factors
from oneshot.compression.expert_correction import ExpertFactors
from oneshot.compression.sublayer import SublayerTask
from oneshot.compression.subspaces import StreamSubspaces, weighted_rows
from oneshot.method import TokenWeighting
from oneshot.report.records import SublayerReport
from oneshot.stream import Layer

INPUT_KINDS = {"heads": "attention input", "cross-heads": "cross-attention input", "ffn": "ffn input"}


def input_reports(
    model: Model,
    subspaces: StreamSubspaces,
    layer: int,
    weighting: TokenWeighting,
    dense: Layer | None,
    x: torch.Tensor | None,
) -> list[SublayerReport]:
    """Report what the subspaces leave out of the dense stream before every norm.

    `dense`, `x`: the dense layer and a batch of its stream `(batch, tokens, hidden)`, on which it is measured; None if
    it is only predicted.
    """
    reports, stack = [], model.family.stack_of(layer)
    for index, sublayer in enumerate(stack.sublayers):
        position = stack.position(layer, index)
        size, predicted = subspaces.size(position), subspaces.relative_error(position)
        measured = None
        if dense is not None and x is not None:
            rows = weighted_rows(x, centred=model.shape.layer_norms, weighting=weighting)
            measured = relative_error(rows, subspaces.inside(rows, position))
            x = dense.run(index, x)
        kind = INPUT_KINDS[sublayer.kind]
        reports.append(SublayerReport(kind, model.shape.hidden_size, size, predicted, measured))
    return reports


def left_out_reports(tasks: list[SublayerTask]) -> list[SublayerReport]:
    """Report the sublayers that are left out."""
    return [SublayerReport(task.sublayer.kind, task.dense_units, 0) for task in tasks if task.is_left_out]


def sublayer_report(task: SublayerTask, factors: Factors | ExpertFactors, measured: float | None) -> SublayerReport:
    """Report a sublayer that was solved, with its error on the judged batch."""
    return SublayerReport(
        kind=task.sublayer.kind,
        dense_size=task.dense_units,
        kept_size=task.kept_units,
        predicted_error=factors.predicted_error,
        measured_error=measured,
        condition_number=factors.condition_number,
        max_interpolation=factors.max_interpolation,
        eigenvalue_fallback=factors.eigenvalue_fallback,
        damping=factors.damping,
    )


def relative_error(target: torch.Tensor, reached: torch.Tensor) -> float:
    """Return `‖target − reached‖ / ‖target‖`."""
    energy = target.double().norm().clamp_min(torch.finfo(torch.float64).tiny)  # a sublayer may output zeros
    return float((target - reached).double().norm() / energy)
