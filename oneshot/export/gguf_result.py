"""Our own GGUF files read back: as the per-layer checkpoint of the same plan, which transformers opens."""

import json
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from oneshot.architecture import StackShape
from oneshot.architecture.stated_shapes import per_layer_shape
from oneshot.checkpoint import locate_checkpoint
from oneshot.checkpoint.gguf import write_weights
from oneshot.checkpoint.gguf_architectures import tensor_name_map
from oneshot.checkpoint.gguf_file import GgufModel
from oneshot.checkpoint.gguf_rotary import FACTORS, in_halves
from oneshot.checkpoint.gguf_stated import own_architecture
from oneshot.checkpoint.reader import WEIGHT_NAMES
from oneshot.checkpoint.safe_files import read_config
from oneshot.errors import CheckpointError, cause
from oneshot.export.companions import empty_tensors
from oneshot.export.gguf import FILE_NAME, INTERLEAVED, expected_tensors, rotated_heads, with_all_ffns
from oneshot.families import COMPRESSED_MODEL_TYPE

LEFT_BEHIND = (".gguf", ".html", ".md", ".safetensors")


def open_folder(checkpoint: str, scratch: Path, revision: str | None = None) -> Path:
    """Return a folder that transformers opens: as `locate_checkpoint`; a result of `--form gguf` is converted.

    Such a result is a folder with `model.gguf`, or a GGUF file with the folder's config.json beside it.

    Raises `CheckpointError` as `locate_checkpoint`, and if the file does not have the sizes of its config.json.
    """
    path = own_gguf(checkpoint)
    if path is None:
        return locate_checkpoint(checkpoint, scratch, revision)
    own_sizes = read_config(path.parent).get("model_type") == COMPRESSED_MODEL_TYPE
    return _converted(path, scratch) if own_sizes else locate_checkpoint(str(path), scratch)


def own_gguf(checkpoint: str) -> Path | None:
    """Return the GGUF file of a result of `--form gguf`; None for every other checkpoint."""
    given = Path(checkpoint).expanduser()
    path = given if given.suffix == ".gguf" else given / FILE_NAME
    beside = path.parent / "config.json"
    try:
        if not (path.is_file() and beside.is_file()) or any((path.parent / name).exists() for name in WEIGHT_NAMES):
            return None
        model_type = json.loads(beside.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):  # no config.json of ours; who opens the checkpoint tells the cause
        return None
    # a file in the family's own architecture is read as any other one is
    is_stock = given != path and own_architecture(str(model_type)) is not None
    return path if is_stock or model_type == COMPRESSED_MODEL_TYPE else None


class RestoredModel:
    """The tensors of a per-layer checkpoint, read from a GGUF file of the same sizes."""

    def __init__(self, path: Path) -> None:
        self._path, config = path, read_config(path.parent)
        self._stack: StackShape = per_layer_shape(config)
        try:
            self._file = GgufModel(path)
            self.architecture: str = self._file.metadata["general.architecture"]
            names = tensor_name_map(self.architecture, len(self._stack.layers))
        except Exception as error:  # damage shows itself in many types; the cause is named and chained
            raise CheckpointError(f"{path} cannot be read as GGUF ({cause(error)}); give a complete file.") from error
        self._pairs = self.architecture in INTERLEAVED
        stored = {name: tensor.shape for name, tensor in self._file.tensors.items() if name != FACTORS}
        wanted = expected_tensors(with_all_ffns(self._stack))
        for name in sorted(stored.keys() | wanted.keys()):
            if stored.get(name) != wanted.get(name):
                raise CheckpointError(
                    f"{path} has {name} as {stored.get(name)}, and the config.json beside it states "
                    f"{wanted.get(name)}; measure it with llama.cpp alone: llama-perplexity -m "
                    f"{shlex.quote(str(path))} -f YOUR_TEXT."
                )
        tied = {"lm_head.weight"} if self._stack.head == "tied" else set()
        state = empty_tensors(config)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name not in tied}
        self._stored = {name: str(names.get_name(name, try_suffixes=(".weight", ".bias"))) for name in self.shapes}

    def name_of(self, name: str) -> str:
        """Return the name in the file of a tensor of the per-layer form."""
        return self._stored[name]

    def interleaved_heads(self, name: str) -> int | None:
        """Return the heads of queries or keys whose rows the file has in another order; None for other tensors."""
        return rotated_heads(name, self._stack) if self._pairs else None

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return tensors in float32, before the changes of llama.cpp's converter."""
        found = {}
        for name in names:
            values = self._file.read(self._stored[name])
            heads = self.interleaved_heads(name)
            found[name] = torch.from_numpy(values if heads is None else in_halves(values, heads))
        return found


def _converted(path: Path, scratch: Path) -> Path:
    """Write the per-layer checkpoint into a folder of its own, with the tokenizer."""
    source = RestoredModel(path)
    folder = Path(scratch) / f"{path.parent.name}-{len(list(Path(scratch).iterdir()))}"
    folder.mkdir()
    for file in path.parent.iterdir():
        if file.is_file() and file.suffix not in LEFT_BEHIND:
            shutil.copyfile(file, folder / file.name)
    write_weights(source.shapes, source.read, folder)
    return folder
