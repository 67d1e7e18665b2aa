"""The CHECKPOINT argument -> an opened model: a folder of safetensors, a GGUF file, or a name on the hub."""

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from oneshot.arch import Architecture, get_architecture
from oneshot.checkpoint import Checkpoint
from oneshot.errors import CheckpointError, OutputError, PlanError, cause
from oneshot.records import ModelShape

WEIGHT_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class SourceModel:
    """A checkpoint whose family is known and whose layers have the shapes that its config states."""

    checkpoint: Checkpoint
    architecture: Architecture
    shape: ModelShape

    def read_layer(self, layer: int) -> dict[str, torch.Tensor]:
        """The tensors of a decoder layer under Llama's names."""
        with torch.inference_mode():  # the mode is per thread, and the prefetching one reads, too
            prefix = self.architecture.layer_prefix(layer)
            tensors = self.architecture.to_llama_names(self.checkpoint.read_prefix(prefix))
            if self.shape.mlp_bias:  # zeros where none is stored, see `with_ffn_biases`
                for linear in self.architecture.ffn_linears:
                    weight = tensors[f"{linear}.weight"]
                    tensors.setdefault(f"{linear}.bias", weight.new_zeros(len(weight)))
            return tensors

    def with_ffn_biases(self) -> "SourceModel":
        """The same model with biases in its FFN, zeros where it has none.

        Raises `PlanError` where the family's config knows no such biases.
        """
        if not (self.shape.mlp_bias or self.architecture.optional_ffn_biases):
            raise PlanError(
                f"--correction bias needs biases in the FFN, which a {self.architecture.model_type} config cannot "
                "state; choose another --correction."
            )
        return replace(self, shape=replace(self.shape, mlp_bias=True))

    def read_positions(self) -> torch.Tensor | None:
        """The rows of a learned position embedding that tokens use, `(positions, D)`; None without one."""
        if self.architecture.positions is None:
            return None
        return self.checkpoint.read_one(self.architecture.positions)[self.architecture.position_offset :]


def open_model(checkpoint: str, scratch: Path) -> SourceModel:
    """Find or fetch a checkpoint and open it; reads headers, no weights.

    Raises `CheckpointError` for whatever is missing, damaged, or of a family that is not supported.
    """
    return identify(Checkpoint(resolve_checkpoint(checkpoint, scratch)))


def identify(checkpoint: Checkpoint) -> SourceModel:
    """The family and the sizes of an opened checkpoint. Raises `CheckpointError` as `open_model`."""
    architecture = get_architecture(checkpoint.config)
    _check_dtypes(checkpoint)
    shape = architecture.shape(checkpoint.config, checkpoint.shapes)
    architecture.check_layers(shape, checkpoint.shapes)
    _check_outside(checkpoint, architecture, shape)
    return SourceModel(checkpoint, architecture, shape)


def _check_dtypes(checkpoint: Checkpoint) -> None:
    """Weights are floating numbers of 16 bits or more; whatever else holds them is quantised."""
    for name, dtype in checkpoint.dtypes.items():
        if dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{name} is stored as {dtype}, so the weights are quantised; give the unquantised checkpoint and "
                "quantise the result."
            )


def _check_outside(checkpoint: Checkpoint, architecture: Architecture, shape: ModelShape) -> None:
    """Check what lies outside the layers against the stock class that the config describes, made with one layer.

    Raises `CheckpointError` where transformers cannot make that class, and for the first tensor that does not fit.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    whole = checkpoint.config | {"attn_implementation": "sdpa"}
    one_layer = {name: value for name, value in whole.items() if name != "layer_types"} | {"num_hidden_layers": 1}
    config_class = CONFIG_MAPPING[architecture.model_type]
    try:
        config_class.from_dict(whole)
        hf_config = config_class.from_dict(one_layer)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    except Exception as error:  # transformers raises many unrelated types; the cause is named and chained
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'} does not describe a {architecture.model_type} model "
            f"({cause(error)}); give a complete, unmodified checkpoint."
        ) from error
    outside = f"{architecture.layers}."
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted(name for name in expected.keys() | checkpoint.shapes.keys() if not name.startswith(outside)):
        stored = checkpoint.shapes.get(name)
        if name.endswith("rotary_emb.inv_freq") or (
            name == architecture.output_head and shape.tied and hf_config.tie_word_embeddings
        ):
            continue
        if stored != expected.get(name):
            raise CheckpointError(
                f"{name} has shape {stored} where config.json of a {architecture.model_type} model asks for "
                f"{expected.get(name)}; give a complete, unmodified checkpoint."
            )


def resolve_checkpoint(checkpoint: str, scratch: Path) -> Path:
    """Find or fetch the checkpoint; a GGUF file is dequantised into `scratch` by transformers' own reader.

    Raises `CheckpointError` when there is no such path, the folder is empty, or the hub cannot be reached.
    """
    try:
        path = Path(checkpoint).expanduser()
        str(path).encode()  # safetensors takes UTF-8 only
        is_folder = path.is_dir()
        is_empty = is_folder and not any(path.iterdir())
    except (OSError, RuntimeError, UnicodeEncodeError) as error:
        raise CheckpointError(f"{checkpoint} cannot be read ({cause(error)}); check the path.") from error
    if is_folder:
        if is_empty:
            raise CheckpointError(f"{path} is an empty folder; give the folder of a Hugging Face checkpoint.")
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist; check the path.")
        return _convert_gguf(path, scratch)
    if path.exists():
        raise CheckpointError(f"{path} is a file; give a folder with config.json and safetensors, or a .gguf file.")
    if checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") != 1:
        raise CheckpointError(f"{checkpoint} does not exist; check the path, or give a hub name such as org/model.")
    return _download(checkpoint)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=WEIGHT_PATTERNS))
    except Exception as error:  # its types change with the hub's HTTP library; the cause is named and chained
        raise CheckpointError(
            f"{name} is no local path and cannot be fetched from the hub ({cause(error)}); "
            "check the name, the network and your access rights."
        ) from error


def _convert_gguf(path: Path, scratch: Path) -> Path:
    """Dequantise into a folder of its own in `scratch`, as float32 safetensors.

    The only place where a whole model is in memory.
    """
    try:
        import gguf  # noqa: F401  (transformers needs it and only says so after reading the file)
    except ImportError as error:
        raise CheckpointError(f"Reading {path} needs the package gguf; run pip install 'oneshot[demo]'.") from error
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # two files of one name may meet in one scratch folder
    folder = scratch / f"{path.stem}-{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:8]}"
    if (folder / "config.json").exists():
        return folder
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # readers of GGUF raise many unrelated types; the cause is named and chained
        raise CheckpointError(
            f"{path} cannot be read as GGUF ({cause(error)}); give a complete file of a Llama-like model."
        ) from error
    # The weights are plain now: without these transformers would refuse to save a model it calls quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"{path} cannot be converted in {scratch} ({cause(error)}); free some space there, or name another "
            "folder (--offload-dir, or TMPDIR)."
        ) from error
    config = json.loads((folder / "config.json").read_text())
    if "quantization_config" in config:
        raise CheckpointError(f"{os.fspath(path)} could not be dequantised; give a safetensors checkpoint instead.")
    return folder
