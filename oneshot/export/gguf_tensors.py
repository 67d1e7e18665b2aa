"""The tensors of a GGUF file: how each is stored, and its values read from the journal's parts.

Float16, which GGUF's types also scale by, does not hold all weights; who reads them is told.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from oneshot.checkpoint.layout import Place
from oneshot.errors import PlanError

Kind = Literal["F32", "F16", "BF16", "Q8_0"]  # names of gguf.GGMLQuantizationType

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
BLOCK, BLOCK_BYTES = 32, 34  # of Q8_0: a float16 scale and 32 integers of 8 bits
STEPS = 127  # of a scale of Q8_0
PANEL_VALUES = 2**22  # values that are quantised at once
KINDS: dict[torch.dtype, Kind] = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
NUMPY_DTYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,
}


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file: its name and kind there, and a function that reads its bytes in the order of the file."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    read: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the values in the file."""
        values = math.prod(self.shape)
        return values // BLOCK * BLOCK_BYTES if self.kind == "Q8_0" else values * ITEM_BYTES[self.kind]


def file_kind(dtype: torch.dtype, shape: tuple[int, ...], *, quantised: bool) -> Kind:
    """Return how llama.cpp's converter stores a tensor of this dtype.

    Vectors are float32, and there is no float64. Rows that are not whole blocks of Q8_0 are float16.
    """
    if len(shape) == 1:
        return "F32"
    if quantised:
        return "F16" if shape[-1] % BLOCK else "Q8_0"
    return KINDS.get(dtype, "F32")


def read_stored(place: Place, kind: Kind, change: Callable[[np.ndarray], np.ndarray] | None) -> np.ndarray:
    """Return a tensor of the journal as the file stores it: bfloat16 as its bits, Q8_0 as its bytes.

    `change`: a function that orders its rows, or computes in float32; None leaves them.
    """
    with place.path.open("rb") as file:
        file.seek(place.start)
        values = np.fromfile(file, NUMPY_DTYPES[place.dtype], math.prod(place.shape)).reshape(place.shape)
    if change is not None:
        values = change(values)
    if kind == "Q8_0":
        return quantised(place.name, values)
    if kind == KINDS.get(place.dtype):
        return values
    return as_float32(values).astype(np.float16 if kind == "F16" else np.float32, copy=False)


def as_float32(values: np.ndarray) -> np.ndarray:
    """Return the values in float32; uint16 are the bits of bfloat16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def quantised(name: str, values: np.ndarray) -> np.ndarray:
    """Quantise `(rows, columns)` to Q8_0 by gguf-py, as llama-quantize does -> `(rows, bytes)` uint8.

    Panels of rows pass through float32, so that no second copy of the tensor is in memory. `name`: of the tensor.
    """
    import gguf

    largest = 0.0
    rows, columns = values.shape
    result = np.empty((rows, columns // BLOCK * BLOCK_BYTES), np.uint8)
    panel = max(1, PANEL_VALUES // columns)
    for start in range(0, rows, panel):
        part = as_float32(values[start : start + panel])
        largest = max(largest, float(np.abs(part).max()))
        result[start : start + panel] = gguf.quants.quantize(part, gguf.GGMLQuantizationType.Q8_0)
    tell_of_little(name, largest, "q8_0", STEPS)
    return result


LITTLE = 2.0**-18  # below its normal numbers float16 loses a bit by each halving; here six are left
logger = logging.getLogger(__name__)


def beyond_float16(module: str, largest: float) -> PlanError:
    """Return the error of a weight that no type has numbers for."""
    return PlanError(
        f"The weights of {module} are up to {largest:.1e}, and float16, which the types of GGUF scale by, does not "
        "hold that; leave --bits and --max-file-size out."
    )


def below_float16(module: str, largest: float) -> PlanError:
    """Return the error of a weight of which no type keeps half."""
    return PlanError(
        f"No type of GGUF keeps half of what the weights of {module} do: they are at most {largest:.1e}, and float16, "
        "which these types scale by, ends at 6e-08, or columns beside each other differ far too much; leave --bits and "
        "--max-file-size out."
    )


def tell_of_little(name: str, largest: float, save_dtype: str, steps: int = 1) -> None:
    """Warn of a matrix whose largest value, as so many steps of a scale, is where float16 ends."""
    if 0 < largest < LITTLE * steps:
        logger.warning("%s is at most %.1e, so %s keeps little of it; bfloat16 keeps more.", name, largest, save_dtype)
