"""What a target asks for, in its own unit: parameters, bytes, FLOPs or seconds."""

import math
from pathlib import Path

import torch

from oneshot.architecture import StackShape
from oneshot.config import Target
from oneshot.errors import PlanError
from oneshot.export import expected_bytes
from oneshot.export.quantised import quantised_bytes
from oneshot.planning import Budget, parameter_budget
from oneshot.run.run import Run

HEADER_BYTES = 256  # of a tensor, in the header of a weight file


def budget_of(run: Run, target: Target) -> Budget:
    """Return what a target asks for, in its own unit."""
    checkpoint, dense, save_dtype = run.model.checkpoint, run.dense, run.config.save_dtype
    if target.size_bytes is not None:
        return _file_budget(run, target.size_bytes)
    kept = 1 - (target.sparsity or 0.0)
    if target.budget == "bytes":
        each = expected_bytes(save_dtype, checkpoint, 10**9) / 10**9

        def stored(stack: StackShape) -> float:
            return each * stack.stored_parameters() + (torch.int64.itemsize - each) * stack.indices()

        is_gguf = Path(run.config.checkpoint).suffix == ".gguf"  # other types; its weights count as they are saved
        return Budget(kept * (stored(dense) if is_gguf else checkpoint.tensor_bytes), stored, "bytes")
    if target.budget == "flops":
        return Budget(kept * dense.flops_per_token(), StackShape.flops_per_token, "FLOPs per token")
    if target.budget == "latency":
        reason = run.model.family.reason_against("latency")
        if reason is not None:
            raise PlanError(reason)
        return Budget(kept * run.latency(dense), run.latency, "seconds")
    return parameter_budget(target, dense)


def _file_budget(run: Run, size_bytes: int) -> Budget:
    """Return a ceiling of the bytes of the weight files, with headers; mixed dtypes count as the narrowest."""
    checkpoint, dense, save_dtype = run.model.checkpoint, run.dense.stored_parameters(), run.config.save_dtype
    whole = expected_bytes(save_dtype, checkpoint, dense)
    narrowest = whole / dense if save_dtype != "keep" else math.floor(whole / dense)
    further, quantisation = expected_bytes(save_dtype, checkpoint, run.further.most_parameters), run.quantisation
    parts = 2 if quantisation is None else 4  # a linear of low rank is two tensors, and a quantised one three
    headers = HEADER_BYTES * parts * len(checkpoint.shapes) + run.form.vocabulary_bytes(run.model)

    def measure(stack: StackShape) -> float:
        if quantisation is not None:
            return headers + further + quantised_bytes(quantisation, stack)
        indices = (torch.int64.itemsize - narrowest) * stack.indices()
        return headers + further + whole + indices - narrowest * (dense - stack.stored_parameters())

    return Budget(size_bytes, measure, "bytes", is_ceiling=True)
