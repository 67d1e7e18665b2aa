"""Storage of hidden states between layers."""

import tempfile

import numpy as np
import torch

from oneshot.errors import OutputError
from oneshot.machine import Machine
from oneshot.text import Batch


class ActivationStore:
    """Hold the hidden states of all tokens, `(tokens, D)`, where `machine.store` says.

    On disk they are in a file without a name in the scratch folder, which disappears with the process. Batches are
    read to the compute device and written from it. Host memory beside CUDA is pinned.
    """

    def __init__(self, num_tokens: int, width: int, machine: Machine) -> None:
        self._width, self._dtype, self._device = width, machine.dtype, machine.device
        self._row_bytes = width * machine.dtype.itemsize
        self._tensor: torch.Tensor | None = None
        self._folder = machine.scratch
        if machine.store == "disk":
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (closed in close)
        else:
            place = self._device if machine.store == "device" else torch.device("cpu")
            pinned = place.type == "cpu" and self._device.type == "cuda"
            self._tensor = torch.empty((num_tokens, width), dtype=self._dtype, device=place, pin_memory=pinned)

    def read(self, rows: slice) -> torch.Tensor:
        """Return some tokens' states, `(tokens, D)`, on the compute device; never a view of the store."""
        if self._tensor is not None:
            return self._tensor[rows].to(self._device, non_blocking=True, copy=True)
        count = rows.stop - rows.start
        self._file.seek(rows.start * self._row_bytes)
        raw = np.frombuffer(bytearray(self._file.read(count * self._row_bytes)), dtype=np.uint8)
        return torch.from_numpy(raw).view(self._dtype).view(count, self._width).to(self._device)

    def read_batch(self, batch: Batch) -> torch.Tensor:
        """Return a batch's states `(sequences, length, D)`, as `read`."""
        return self.read(batch.rows).unflatten(0, batch.token_ids.shape)

    def write(self, rows: slice, values: torch.Tensor) -> None:
        """Store some tokens' states, of any shape with the width last."""
        if self._tensor is not None:
            self._tensor[rows].copy_(values.flatten(0, -2), non_blocking=True)
            return
        try:
            self._file.seek(rows.start * self._row_bytes)
            self._file.write(values.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
        except OSError as error:
            raise OutputError(
                f"Activations cannot be written to {self._folder} ({error.strerror}); free some space there, choose "
                "another --offload-dir, or give more --max-memory."
            ) from error

    def close(self) -> None:
        """Release the memory or the file."""
        if self._tensor is None:
            self._file.close()
        self._tensor = None
