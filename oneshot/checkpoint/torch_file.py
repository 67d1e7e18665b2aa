"""Weight files of torch (`pytorch_model.bin`), with the interface of safetensors' files.

They are pickles. torch reads them here with `weights_only`, which makes tensors and containers and runs no code. The
tensors are mapped into memory.
"""

import zipfile
from pathlib import Path
from typing import Any

import torch

from oneshot.checkpoint.dtypes import DTYPE_NAMES
from oneshot.errors import CheckpointError, cause


class TorchFile:
    """Read tensors of one file.

    Raises `CheckpointError` for a file that is damaged, in torch's format before 1.6, or holds anything but tensors.
    """

    def __init__(self, path: Path) -> None:
        remedy = "save the model again with save_pretrained of a recent transformers"
        if not zipfile.is_zipfile(path):
            raise CheckpointError(
                f"{path} is damaged, or in the format of torch before 1.6, which cannot be mapped; download it again, "
                f"or {remedy}."
            )
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, MemoryError, RuntimeError):  # of the file and its mapping, which the reader explains
            raise
        except Exception as error:  # readers of pickles raise many unrelated types; the cause is named and chained
            raise CheckpointError(
                f"{path} is damaged, or a pickle that may run code, which is not read ({cause(error)}); {remedy}."
            ) from error
        if not isinstance(content, dict) or not all(_is_whole(value) for value in content.values()):
            raise CheckpointError(f"{path} holds something else than tensors by their names; {remedy}.")
        self._tensors: dict[str, torch.Tensor] = {str(name): tensor.detach() for name, tensor in content.items()}

    def __enter__(self) -> "TorchFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._tensors = {}

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in mapped memory."""
        return self._tensors[name]

    def get_slice(self, name: str) -> "_Slice":
        """Return a view that states shape and dtype and gives rows."""
        return _Slice(self._tensors[name])


class _Slice:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return DTYPE_NAMES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self._tensor[rows]


def _is_whole(value: Any) -> bool:
    """Return whether a value is an ordinary tensor whose file has a number for every element."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()
