"""Bytes of the disk that a run takes: at the place of its result until it is complete, and in the off-load folder."""

import tempfile
from pathlib import Path

from oneshot.config import MachineOptions
from oneshot.errors import ConfigError, MemoryLimitError, cause
from oneshot.footprint import terms
from oneshot.footprint.terms import DOUBLE, FLOAT
from oneshot.footprint.work import Work
from oneshot.report.words import gibibytes


def scaffold_bytes(work: Work) -> int:
    """Return the bytes of the layers that the hidden states pass, if these are not the stored ones; 0 if they are.

    The journal keeps them for a resumed run. They are at most as large as the dense layers.
    """
    method, shape, stack = work.method, work.shape, work.grid.family.stack
    if work.plan is None:
        return 0
    folds = work.reshapes_heads or method.plans_ranks or method.leaves_out_sublayers or work.grid.folds_layer_norms
    folds = folds or (method.reduces_heads and any(sublayer.mixer.fixed_heads for sublayer in stack.sublayers))
    if not (work.quantises or folds or work.hidden is not None or terms.cast_share(work)):
        return 0
    of_layer = work.layer_bytes
    if work.hidden is not None:  # projected linears are float32
        of_layer = max(of_layer, FLOAT * shape.layer_parameters())
    return of_layer * shape.num_hidden_layers


def scratch_bytes(work: Work) -> int:
    """Return the bytes of scratch files: the residual stream's Grams and directions, output curvature, the original."""
    shape, size = work.shape, 0
    if work.schedule.measures_curvature:
        of_layers = shape.num_hidden_layers * sum(each**2 for each in work.curvature_sizes)
        size += FLOAT * (of_layers + shape.hidden_size**2)
    if work.schedule.prices_types:  # a GGUF file of it, and the parts that it is written from
        size += 2 * work.model_bytes
    if work.hidden is not None:
        size += shape.hidden_size**2 * (FLOAT * len(work.hidden.group_of) + DOUBLE * work.hidden.num_groups)
    return size


def offload_folder(options: MachineOptions) -> Path:
    """Return the folder of scratch files. Raises `ConfigError` if it does not exist, or if its name is not UTF-8."""
    folder = Path(tempfile.gettempdir() if options.offload_dir is None else options.offload_dir).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--offload-dir {folder} is not a folder; create it or name another.")
    try:
        str(folder).encode()  # safetensors accepts only UTF-8
    except UnicodeEncodeError as error:
        raise ConfigError(f"--offload-dir {folder} cannot be used ({cause(error)}); name another.") from error
    return folder


def refuse_full_disk(options: MachineOptions, free_bytes: int, needed: int) -> None:
    """Raise `MemoryLimitError` if the off-load folder has less room than needed."""
    if free_bytes < needed:
        raise MemoryLimitError(
            f"{offload_folder(options)} has {gibibytes(free_bytes)} free and the run puts {gibibytes(needed)} there; "
            "name a folder with more room as --offload-dir, give more --max-memory, or lower --num-sequences."
        )
