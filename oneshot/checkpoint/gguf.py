"""GGUF input: the checkpoint in it, tensor by tensor, and its conversion to safetensors."""

import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import split_torch_state_dict_into_shards

from oneshot.checkpoint.card import write_gguf_card
from oneshot.checkpoint.gguf_architectures import tensor_name_map
from oneshot.checkpoint.gguf_config import POOLING, architecture_of, config_of
from oneshot.checkpoint.gguf_file import GgufModel
from oneshot.checkpoint.gguf_rotary import FACTORS, LONG_FACTORS, SHORT_FACTORS, in_halves
from oneshot.checkpoint.gguf_tokenizer import read_tokenizer
from oneshot.checkpoint.pooling import KINDS, write_pooling
from oneshot.checkpoint.reader import INDEX_NAME, Checkpoint, is_damaged
from oneshot.checkpoint.stock import attention_of, make_buffers, stock_classes, stock_config, tied_names
from oneshot.config import SaveDtype
from oneshot.errors import CheckpointError, OutputError, cause
from oneshot.families import FAMILIES
from oneshot.tensors import Tensors

FLOAT_BYTES = 4
FLOAT_KINDS: dict[str, SaveDtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SHARD_BYTES = 2**30  # of the converted files; one of them is in memory


class GgufCheckpoint(Checkpoint):
    """A GGUF file read as the float32 checkpoint that it will become, a tensor at a time.

    Attributes:
        file_bytes: bytes of the GGUF file, or of all parts of a split one, whose first part is given. header_bytes:
            those before its first tensor, with the vocabulary.
        architecture: llama.cpp's name. kind: the type of most of its bytes, such as `Q4_K`.

    Raises `CheckpointError` if the file is damaged, of another kind, or says something that oneshot does not know.
    """

    def __init__(self, path: Path) -> None:
        if not os.path.isfile(path):
            raise CheckpointError(f"{path} does not exist; check the path.")
        if importlib.util.find_spec("gguf") is None:
            raise CheckpointError(f"Reading {path} needs the package gguf; run pip install 'oneshot-llm[gguf]'.")
        self.folder, self._path = path.parent, path
        try:
            self._file = GgufModel(path)
        except Exception as error:  # damage shows itself in many types; the cause is named and chained
            raise _unreadable(path, error) from error
        self.architecture: str = self._file.metadata.get("general.architecture", "")
        metadata, tensors = self._file.metadata, self._file.tensors
        self._architecture = architecture_of(metadata, path)
        self.config = config_of(self._architecture, metadata, tensors, self._file.read)
        family = FAMILIES[self._architecture.model_type]
        self._transposed = tuple(f"{linear}.weight" for linear in family.stack.transposed)
        self._num_layers = self.config[family.sizes.num_hidden_layers]
        self.file_bytes, self.header_bytes = self._file.num_bytes, self._file.header_bytes
        self.kind = self._file.main_kind
        self._file_names, self._stored_names = self._names(), {}
        shapes = {name: self._file.tensors[stored].shape for name, stored in self._file_names.items()}
        self.shapes = {name: self._turned(name, shape) for name, shape in shapes.items()}
        self.dtypes = dict.fromkeys(self.shapes, "F32")

    def _names(self) -> dict[str, str]:
        """Return the stored name of every tensor of the stock class; refuse those that only one side has."""
        _, model_class = stock_classes(self.config)
        try:
            places = tensor_name_map(self.architecture, self._num_layers)
            with torch.device("meta"):
                model: Any = model_class(stock_config(self.config))
        except Exception as error:  # of senseless sizes; the cause is named and chained
            raise _unreadable(self._path, error) from error
        found = {
            name: str(places.get_name(name, try_suffixes=(".weight", ".bias")))
            for name in model.state_dict()
            if name not in tied_names(model)
        }
        for name, stored in found.items():
            if stored not in self._file.tensors:
                raise CheckpointError(f"{self._path} lacks the tensor {stored} ({name}); give a complete file.")
        rotary = self.config.get("rope_parameters", {})
        tables = {LONG_FACTORS, SHORT_FACTORS} if rotary.get("rope_type") == "longrope" else {FACTORS}
        further = sorted(self._file.tensors.keys() - set(found.values()) - tables)
        if further:
            raise CheckpointError(
                f"{self._path} has the tensor {further[0]}, which a {self.config['model_type']} model does not have; "
                "give the model it came from as safetensors."
            )
        return found

    @property
    def pooling(self) -> str | None:
        """Return how an embedding model pools its last states, by sentence-transformers' name; None for others."""
        return KINDS.get(self._file.metadata.get(f"{self.architecture}.{POOLING}", 0))

    @property
    def stored_names(self) -> frozenset[str]:
        """Return the names of all tensors, of which none is left out."""
        return frozenset(self._file_names)

    def name_of(self, name: str) -> str:
        """Return the name in the file of a tensor of the stock class."""
        return self._file_names[name]

    def interleaved_heads(self, name: str) -> int | None:
        """Return the heads of queries or keys whose rows the file has in another order; None for other tensors."""
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads is None or not self._architecture.pairs:
            return None
        return int(self.config.get(heads) or self.config["num_attention_heads"])

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weights in float32."""
        return FLOAT_BYTES * self.num_parameters

    @property
    def float_dtype(self) -> SaveDtype:
        """Return the dtype of the stored weights; bfloat16 for quantised ones."""
        return FLOAT_KINDS.get(self.kind, "bfloat16")

    def read(self, names: Iterable[str], into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Return the named tensors, dequantised to float32; `into` as in `Checkpoint.read`.

        Raises `CheckpointError` for NaN, Inf and unknown types.
        """
        tensors = {}
        for name in names:
            try:
                values = self._file.read(self._file_names[self.stored(name)])
            except Exception as error:  # of types that gguf cannot read; the cause is named and chained
                raise _unreadable(self._path, error) from error
            tensor = torch.from_numpy(self._as_transformers(name, values))
            if is_damaged(name, tensor):
                raise CheckpointError(f"{name} in {self._path} holds NaN or Inf; give an undamaged file.")
            place = None if into is None else into.get(name)
            tensors[name] = tensor if place is None else place.copy_(tensor)
        return tensors

    def read_panels(self, name: str, panels: Iterable[slice]) -> Iterator[torch.Tensor]:
        """Yield panels of rows of a tensor that is no projection of queries or keys."""
        yield from (torch.from_numpy(self._file.read(self._file_names[self.stored(name)], rows)) for rows in panels)

    def load(self, *, device: torch.device, dtype: torch.dtype) -> Any:
        """Return the whole model of transformers for inference; one tensor at a time is in float32."""
        _, model_class = stock_classes(self.config)
        options = {"dtype": dtype, "attn_implementation": attention_of(model_class, self.config)}
        with torch.device("meta"):
            model: Any = model_class._from_config(stock_config(self.config), **options)
        make_buffers(model, device)  # while weights are on the meta device, because some classes reset them here
        for name in self.shapes:
            module, _, part = name.rpartition(".")
            weight = self.read([name])[name].to(device, dtype)
            setattr(model.get_submodule(module), part, torch.nn.Parameter(weight, requires_grad=False))
        model.tie_weights()
        return model.eval()

    def _turned(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that transformers has; some of its linears are the other way round."""
        return shape[::-1] if name.endswith(self._transposed) else shape

    def _as_transformers(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return a tensor before the changes of llama.cpp's converter."""
        if name.endswith(self._transposed):
            return np.ascontiguousarray(values.T)
        if name.endswith("norm.weight"):
            return values - np.float32(self._architecture.norm_offset)
        heads = self.interleaved_heads(name)
        return values if heads is None else in_halves(values, heads)


def open_gguf(checkpoint: str) -> GgufCheckpoint | None:
    """Open a GGUF file; None for every other checkpoint."""
    path = Path(os.path.expanduser(checkpoint))  # unlike Path.expanduser it accepts unknown users
    return None if path.suffix != ".gguf" or os.path.isdir(path) else GgufCheckpoint(path)


def convert_gguf(path: Path, scratch: Path) -> Path:
    """Dequantise a GGUF file into its own folder in `scratch`, as float32 safetensors; return the folder.

    One weight file of at most `SHARD_BYTES` is in memory, or one tensor if it is larger. What lies beside the GGUF file
    is not read.

    Raises `CheckpointError` if the file cannot be read, `OutputError` if the folder cannot be written.
    """
    # two files of one name may be converted in one scratch folder
    folder = scratch / f"{path.stem}-{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:8]}"
    if (folder / "config.json").exists():
        return folder
    source = GgufCheckpoint(path)
    try:
        tokenizer = read_tokenizer(path)
    except Exception as error:  # readers of tokenizers raise many unrelated types; the cause is named and chained
        raise _unreadable(path, error) from error
    num_tokens, num_rows = len(tokenizer), source.config["vocab_size"]
    if num_tokens > num_rows:
        raise CheckpointError(
            f"{path} has {num_tokens} tokens and {num_rows} rows of its embedding; give the model it came from."
        )
    from safetensors import SafetensorError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_weights(source.shapes, source.read, folder)
        _save_tokenizer(tokenizer, folder)
        _write_config(source.config, folder)
        if (kind := source.pooling) is not None:
            write_pooling(folder, kind, source.shapes[FAMILIES[source.config["model_type"]].stack.embedding][1])
        write_gguf_card(source._file.metadata, folder)
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"{path} cannot be converted in {scratch} ({cause(error)}); free some space there, or name another "
            "folder (--offload-dir, or TMPDIR)."
        ) from error
    return folder


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer under the name of its class that transformers 4 also knows."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")


def _write_config(config: dict[str, Any], folder: Path) -> None:
    """Write config.json, and the generation config that follows from it."""
    from transformers import GenerationConfig

    complete = stock_config(config)
    GenerationConfig.from_model_config(complete).save_pretrained(folder)
    complete.save_pretrained(folder)


def write_weights(
    shapes: Mapping[str, tuple[int, ...]], read: Callable[[Iterable[str]], Tensors], folder: Path
) -> None:
    """Write float32 tensors, which are read by their names, as one file, or as several with an index."""
    from safetensors.torch import save_file

    empty = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()}
    split = split_torch_state_dict_into_shards(empty, max_shard_size=SHARD_BYTES)
    for file, names in split.filename_to_tensors.items():
        save_file(read(names), folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        content = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_NAME).write_text(json.dumps(content, indent=2) + "\n")


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read as GGUF ({cause(error)}); give a complete file.")
