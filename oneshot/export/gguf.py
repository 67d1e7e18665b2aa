"""Form `gguf`: one file for llama.cpp, written tensor by tensor from the journal's parts.

Equal layers take the family's own architecture, if it has their sizes and their positions. Others take `deci`, which
has arrays of FFN widths and of heads. Both are laid out as llama.cpp's own converter lays them out.
"""

import importlib.util
import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from oneshot.architecture import StackShape, scaled_epsilon
from oneshot.checkpoint import GgufCheckpoint, Journal, Model, card_metadata, complete_config
from oneshot.checkpoint.gguf_architectures import ARCHITECTURES as KNOWN
from oneshot.checkpoint.gguf_architectures import KV_HEADS, tensor_name_map
from oneshot.checkpoint.gguf_config import HEAD_SIZES, OWN_SIZES, ROTARY_SIZE
from oneshot.checkpoint.gguf_rotary import FACTORS, interleave, reason_against_rotary, rotary_factors, rotary_metadata
from oneshot.checkpoint.layout import Place
from oneshot.checkpoint.pooling import KINDS, NEUTRAL, further_modules, pooling_of
from oneshot.checkpoint.safe_files import MODULES
from oneshot.config import SaveDtype
from oneshot.errors import CheckpointError, OutputError, PlanError
from oneshot.export.form import Form
from oneshot.export.gguf_tensors import FileTensor, Kind, file_kind, read_stored
from oneshot.export.gguf_vocabulary import Vocabulary
from oneshot.export.llama_layers import NAMES, LlamaLayers, reason_against_llama
from oneshot.export.per_layer import per_layer_config
from oneshot.families import FAMILIES
from oneshot.machine.durable import UNFINISHED, make_durable
from oneshot.planning import Grid, Plan

NAME, FILE_NAME = "gguf", "model.gguf"
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
HEADS_FILL_HIDDEN_SIZE = ("qwen2",)  # architectures whose heads have as many values as the hidden state
WITH_FACTORS = ("llama", OWN_SIZES)  # architectures that read `FACTORS` (src/models of llama-cpp-python 0.3.36)
# architectures that turn neighbouring values of queries and keys together
INTERLEAVED = (OWN_SIZES, *(name for name, known in KNOWN.items() if known.pairs))


class GgufFolder(Form):
    """A folder with one `model.gguf`, beside the tokenizer and the report."""

    name = NAME
    title = "A GGUF file"
    opened_by = "llama.cpp"
    is_safetensors = False

    def loading(self, config: dict[str, Any]) -> str:
        return (
            f"llama.cpp and what builds on it open `{FILE_NAME}`: `llama-server -m FOLDER/{FILE_NAME}`. The "
            "config.json only states its sizes."
        )

    def usage(self, task: str) -> str:
        return f"```\nllama-server -m FOLDER/{FILE_NAME}\n```"

    def vocabulary_bytes(self, model: Model) -> int:
        """Return the bytes of a file that has the tokenizer alone; of a GGUF input those before its first tensor."""
        if isinstance(model.checkpoint, GgufCheckpoint):
            return model.checkpoint.header_bytes
        import gguf

        with tempfile.TemporaryDirectory(prefix="oneshot-") as scratch:
            path = Path(scratch, FILE_NAME)
            writer = gguf.GGUFWriter(path, OWN_SIZES)
            vocabulary_of(model).write(writer)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.close()
            return path.stat().st_size


class GgufForm(GgufFolder, LlamaLayers):
    """Layers of Llama, which may have sizes of their own."""

    def grid(self, model: Model) -> Grid:
        """Return the sizes that llama.cpp's architectures can state."""
        refusal = reason_against_llama(model, NAME)
        rotary = complete_config(model.checkpoint.config).get("rope_parameters") or {"rope_type": "default"}
        if refusal is None and model.family.model_type not in ARCHITECTURES:
            refusal = f"--form gguf does not have the family {model.family.model_type}; use --form per-layer."
        unstated = reason_against_rotary(rotary) if refusal is None else None
        own, has_norms = ARCHITECTURES.get(model.family.model_type), model.shape.query_key_norms
        if refusal is None and has_norms and own not in WITH_FACTORS and _factors(model) is not None:
            unstated = f"the type {rotary['rope_type']}, which llama.cpp's {own} does not have"
        if unstated is not None:
            refusal = f"--form gguf cannot state the model's rotary positions ({unstated}); use --form per-layer."
        if refusal is None and has_norms and model.shape.attention_bias:
            refusal = (
                f"--form gguf has no biases beside norms of queries and keys, because llama.cpp's {own} has none; use "
                "--form per-layer."
            )
        refusal = reason_against_files(model) or refusal
        differ = not has_norms  # the architecture for different layers has no norms of queries
        return Grid(
            model.family,
            model.shape,
            remedy="--form per-layer",
            refusal=refusal,
            layers_differ=differ,
            heads_differ=differ,
            sublayers_optional=differ,
            first_layer_attends=True,  # llama.cpp takes the size of heads from it
            writes_vocabulary=True,
        )

    def config(self, model: Model, plan: Plan) -> dict[str, Any]:
        """Return a config.json that states the sizes. Raises `PlanError` if llama.cpp lacks the tokenizer."""
        if not isinstance(model.checkpoint, GgufCheckpoint):  # of which a prediction reads no tokenizer
            vocabulary_of(model)
        stack = self.grid(model).stack(plan)
        if model.shape.query_key_norms and not _is_uniform(stack):
            raise PlanError(
                f"--form gguf has equal layers for {model.family.model_type}, because llama.cpp has no norms of "
                "queries and keys beside layers of different sizes; use a uniform allocation."
            )
        config = per_layer_config(model.checkpoint.config, model.shape, stack)
        return {name: value for name, value in config.items() if name != "auto_map"}

    def write(
        self, model: Model, plan: Plan, journal: Journal, advance: Callable[[int], None], save_dtype: SaveDtype
    ) -> int:
        """Write the file from the journal's parts, and return the parameters that it holds.

        A run that is interrupted here continues from the parts, which stay until the end.
        """
        stack = self.grid(model).stack(plan)
        complete, path = with_all_ffns(stack), journal.partial / FILE_NAME
        tensors = _tensors(model, stack, journal.stored(), quantised=save_dtype == "q8_0")
        write_file(path, model, complete, _architecture(model, complete), _keys(model, complete), tensors, advance)
        return verify_gguf(path, complete)


def reason_against_files(model: Model) -> str | None:
    """Return a sentence why no GGUF file of a model can be written here; None if one can."""
    if importlib.util.find_spec("gguf") is None:
        return "--form gguf needs the package gguf; run pip install 'oneshot-llm[gguf]'."
    try:
        _pooling(model)
    except CheckpointError as error:
        return f"{error} Use --form stock."
    return None


def vocabulary_of(model: Model) -> Vocabulary:
    """Return a model's tokenizer. Raises `PlanError` if llama.cpp lacks it."""
    return Vocabulary(model.checkpoint.folder, model.shape.vocab_size)


def _pooling(model: Model) -> str | None:
    """Return how an embedding model pools its last states; None for other models.

    Raises `CheckpointError` as `pooling_of`, and for modules that llama.cpp does not have.
    """
    source = model.checkpoint
    if isinstance(source, GgufCheckpoint):
        return source.pooling
    if further := further_modules(source.folder):
        raise CheckpointError(
            f"{source.folder / MODULES} has the module {further[0][:100]}; only {', '.join(NEUTRAL)} are known here."
        )
    return pooling_of(source.folder)


def with_all_ffns(stack: StackShape) -> StackShape:
    """Return the sizes of the file, where an FFN of one neuron stands for one that is left out.

    llama.cpp drops the attention of a layer without an FFN (src/models/deci.cpp). A neuron of zeros adds nothing.
    """
    layers = (replace(layer, intermediate_size=layer.intermediate_size or 1) for layer in stack.layers)
    return replace(stack, layers=tuple(layers))


def _is_uniform(stack: StackShape) -> bool:
    return len(set(stack.layers)) == 1


def _architecture(model: Model, stack: StackShape) -> str:
    own, layer = ARCHITECTURES[model.family.model_type], stack.layers[0]
    fills = layer.num_attention_heads * layer.query_key_size == stack.embedding_size
    has_heads = fills or own not in HEADS_FILL_HIDDEN_SIZE
    has_positions = own in WITH_FACTORS or _factors(model) is None
    return own if _is_uniform(stack) and has_heads and has_positions else OWN_SIZES


def _factors(model: Model) -> np.ndarray | None:
    """Return the table of factors of the model's rotary positions; None if the file needs none."""
    return rotary_factors(complete_config(model.checkpoint.config)["rope_parameters"], model.shape.head_dim)


def _tensors(model: Model, stack: StackShape, stored: list[Place], *, quantised: bool) -> list[FileTensor]:
    """Return the tensors of the file in order: rotary factors, the journal's, zeros for absent FFNs."""
    complete, tensors = with_all_ffns(stack), list[FileTensor]()
    architecture = _architecture(model, complete)
    names = tensor_name_map(architecture, len(stack.layers))
    factors = _factors(model)
    if factors is not None:
        tensors.append(FileTensor(FACTORS, factors.shape, "F32", partial(np.asarray, factors)))
    for place in stored:
        heads = rotated_heads(place.name, stack) if architecture in INTERLEAVED else None
        order = None if heads is None else partial(interleave, heads=heads)
        tensors.append(stored_tensor(names, place, order, quantised=quantised))
    without_them = expected_tensors(stack)
    for name, shape in expected_tensors(complete).items():
        if name not in without_them:
            tensors.append(FileTensor(name, shape, "F32", partial(np.zeros, shape, np.float32)))
    return tensors


def stored_tensor(
    names: Any, place: Place, change: Callable[[np.ndarray], np.ndarray] | None, *, quantised: bool
) -> FileTensor:
    """Return a tensor of the journal as one of the file.

    Args:
        names: map of `tensor_name_map`. change: function of its values, as `read_stored` takes it.

    Raises `OutputError` for a tensor that llama.cpp's architecture does not have.
    """
    name = names.get_name(place.name, try_suffixes=(".weight", ".bias"))
    if name is None:
        raise OutputError(f"llama.cpp has no place for {place.name}; please report this with the config.json.")
    kind = file_kind(place.dtype, place.shape, quantised=quantised)
    return FileTensor(name, place.shape, kind, partial(read_stored, place, kind, change))


def write_file(
    path: Path,
    model: Model,
    stack: StackShape,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: list[FileTensor],
    advance: Callable[[int], None],
) -> None:
    """Write a GGUF file; one tensor at a time is in memory, and nothing is at `path` before it is complete.

    Args:
        stack: the sizes in it. keys: what it states below its architecture. advance: receives the bytes written.
    """
    import gguf

    kinds, unfinished, pooling = gguf.GGMLQuantizationType, path.with_name(path.name + UNFINISHED), _pooling(model)
    writer = gguf.GGUFWriter(unfinished, architecture)
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, kinds[tensor.kind])
    _add_general(writer, model, stack, max(tensors, key=lambda tensor: tensor.num_bytes).kind)
    add: dict[type, Any] = {
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in keys.items():
        add[type(value)](f"{architecture}.{key}", value)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(next(number for number, name in KINDS.items() if name == pooling)))
    vocabulary_of(model).write(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.read())
        advance(tensor.num_bytes)
    writer.close()
    make_durable(unfinished, path)


def _add_general(writer: Any, model: Model, stack: StackShape, kind: Kind) -> None:
    """Add what the input's card says, the number of parameters, and the `kind` of most weights."""
    import gguf

    licence = card_metadata(model.checkpoint.folder).get("license")
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(model.checkpoint.folder.name)
    if isinstance(licence, str):
        writer.add_license(licence)
    writer.add_size_label(gguf.size_label(stack.stored_parameters(), 0, 0, 0))
    types = {
        "F32": gguf.LlamaFileType.ALL_F32,
        "F16": gguf.LlamaFileType.MOSTLY_F16,
        "BF16": gguf.LlamaFileType.MOSTLY_BF16,
        "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    }
    writer.add_file_type(types[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _keys(model: Model, stack: StackShape) -> dict[str, Any]:
    """Return the sizes and the rotary positions, as a file states them below its architecture."""
    config, shape = complete_config(model.checkpoint.config), model.shape
    by_layer = {
        "feed_forward_length": [layer.intermediate_size for layer in stack.layers],
        "attention.head_count": [layer.num_attention_heads for layer in stack.layers],
        KV_HEADS: [layer.num_key_value_heads for layer in stack.layers],
    }
    epsilon = scaled_epsilon(config["rms_norm_eps"], shape.hidden_size, stack.embedding_size)
    return {
        **{key: sizes[0] if _is_uniform(stack) else sizes for key, sizes in by_layer.items()},
        "block_count": len(stack.layers),
        "context_length": config["max_position_embeddings"],
        "embedding_length": stack.embedding_size,
        "vocab_size": stack.vocab_size,
        "attention.layer_norm_rms_epsilon": epsilon,
        **dict.fromkeys((*HEAD_SIZES, ROTARY_SIZE), shape.head_dim),
        # factors of type llama3 are a tensor
        **{f"rope.{key}": value for key, value in rotary_metadata(config["rope_parameters"]).items()},
    }


def rotated_heads(name: str, stack: StackShape) -> int | None:
    """Return the heads of queries or keys under a tensor's stored name; None for other tensors."""
    module = name.rpartition(".")[0]
    if not module.endswith(("q_proj", "k_proj")):
        return None
    layer = stack.layers[int(name.removeprefix("model.layers.").split(".")[0])]
    return layer.num_attention_heads if module.endswith("q_proj") else layer.num_key_value_heads


def verify_gguf(path: Path, stack: StackShape) -> int:
    """Check that a file has exactly the tensors of these sizes; return its parameters.

    Raises `OutputError` with the first tensor that does not fit.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    written = {
        tensor.name: tuple(int(size) for size in reversed(tensor.shape))
        for tensor in reader.tensors
        if tensor.name != FACTORS
    }
    expected = expected_tensors(stack)
    for name in sorted(expected.keys() | written.keys()):
        if expected.get(name) != written.get(name):
            raise OutputError(
                f"{name} was written as {written.get(name)} but the plan has {expected.get(name)}; please report this "
                "with the input's config.json."
            )
    return sum(math.prod(shape) for shape in written.values())


def expected_tensors(stack: StackShape) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a file and their shapes."""
    import gguf

    size, layers = stack.embedding_size, FAMILIES["qwen3"].stack  # Llama's, with norms if the sizes have them
    shapes = {NAMES.embedding: (stack.vocab_size, size), NAMES.norm: (size,)}
    if stack.head == "own":
        shapes[NAMES.head] = stack.vocab_size, size
    for number, layer in enumerate(stack.layers):
        shapes |= {layers.layer_prefix(number) + name: shape for name, shape in layers.tensors(layer).items()}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, len(stack.layers))
    return {str(names.get_name(name, try_suffixes=(".weight", ".bias"))): shape for name, shape in shapes.items()}
