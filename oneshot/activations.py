"""Where hidden states wait between layers."""

import tempfile
from pathlib import Path

import numpy as np
import torch

from oneshot.errors import OutputError


class ActivationStore:
    """Hidden states of all sequences, `(num_sequences, length, D)`, on the `device`, in `host` memory or on `disk`.

    On disk they lie in a file without a name in `folder`, which goes with the process however that ends. Batches are
    read to and written from the compute device. Host memory is pinned beside CUDA, so copies overlap with compute and
    keep their order on the current CUDA stream.
    """

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, *, tier: str, device: torch.device, folder: Path
    ) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._row_bytes = shape[1] * shape[2] * dtype.itemsize
        self._tensor: torch.Tensor | None = None
        if tier == "disk":
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed in close)
            self._folder = folder
        else:
            place = device if tier == "device" else torch.device("cpu")
            pinned = place.type == "cpu" and device.type == "cuda"
            self._tensor = torch.empty(shape, dtype=dtype, device=place, pin_memory=pinned)

    def read(self, batch: slice) -> torch.Tensor:
        """The sequences of a batch on the compute device; never a view of the store."""
        if self._tensor is not None:
            return self._tensor[batch].to(self._device, non_blocking=True, copy=True)
        count = batch.stop - batch.start
        self._file.seek(batch.start * self._row_bytes)
        raw = np.frombuffer(bytearray(self._file.read(count * self._row_bytes)), dtype=np.uint8)
        return torch.from_numpy(raw).view(self._dtype).view(count, *self._shape[1:]).to(self._device)

    def write(self, batch: slice, values: torch.Tensor) -> None:
        """Store the sequences of a batch."""
        if self._tensor is not None:
            self._tensor[batch].copy_(values, non_blocking=True)
            return
        try:
            self._file.seek(batch.start * self._row_bytes)
            self._file.write(values.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
        except OSError as error:
            raise OutputError(
                f"Activations cannot be written to {self._folder} ({error.strerror}); free some space there, choose "
                "another --offload-dir, or give more --max-memory."
            ) from error

    def close(self) -> None:
        """Give the memory or the file handle back."""
        if self._tensor is None:
            self._file.close()
        self._tensor = None
