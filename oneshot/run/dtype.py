"""The dtype of a run: measured once, kept by a run that continues another one, and narrower if memory asks for it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from oneshot.footprint import Bounds, Work, fits
from oneshot.machine import DtypeChoice, Machine, choose_dtype
from oneshot.machine.dtype import COMPUTE_DTYPES
from oneshot.run.earlier import earlier_dtype


def settled_dtype(name: str, machine: Machine, sizes: tuple[int, int], continued: Sequence[Path]) -> DtypeChoice:
    """Return the dtype of a name, which the main process chooses for all.

    Args:
        sizes: inputs and outputs of the model's linears.
        continued: the outputs of a run that may have been interrupted, which keeps its dtype.
    """

    def choose() -> DtypeChoice:
        earlier = earlier_dtype(continued) if name == "auto" else None
        if earlier is None:
            return choose_dtype(name, machine.device, sizes=sizes)
        return DtypeChoice(COMPUTE_DTYPES[earlier], f"{earlier}, as in the run that this one continues")

    return machine.workers.share(0, choose)


def fitting_dtype(
    choice: DtypeChoice, machine: Machine, work_on: Callable[[Machine], Work], bounds: Bounds
) -> DtypeChoice:
    """Return bfloat16 instead of a measured float32 if any process has memory for the run in bfloat16 alone."""
    if not choice.measured or choice.dtype != torch.float32:
        return choice
    narrow = replace(machine, dtype=torch.bfloat16)
    helps = not fits(work_on(machine), bounds) and fits(work_on(narrow), bounds)
    if not any(machine.workers.gather((helps,))):
        return choice
    return DtypeChoice(
        torch.bfloat16, "bfloat16, because memory does not hold the run in float32, which is faster here"
    )
