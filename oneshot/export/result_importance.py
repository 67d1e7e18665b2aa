"""`imatrix.gguf` beside a result of `--form gguf`, of its own layers."""

from pathlib import Path

from oneshot.checkpoint import IMPORTANCE_NAME
from oneshot.export.imatrix import TensorNames, write_imatrix
from oneshot.export.result_model import Advance, result_importance
from oneshot.export.result_of_stock import open_result
from oneshot.machine import Machine
from oneshot.stream import InputSquares
from oneshot.text import Text


def write_result_importance(path: Path, text: Text, machine: Machine, *, advance: Advance) -> InputSquares:
    """Write `imatrix.gguf` beside a GGUF result, of this text, and return its sums by names of the per-layer form.

    Args:
        path: of the result, with its config.json beside it. advance: receives the tokens that passed a layer.

    Raises `CheckpointError` if activations are not finite; it names the layer.
    """
    model = open_result(path, text, machine)
    names = TensorNames(model.source.architecture, model.num_layers, has_experts=False)
    squares = result_importance(model, advance)
    write_imatrix(path.with_name(IMPORTANCE_NAME), squares, names, text, model.config)
    return squares
