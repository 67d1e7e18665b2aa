"""`imatrix.gguf`: the file of `llama-imatrix`, by which llama-quantize weighs errors of weights.

It has `NAME.in_sum2`, sums of squares of a tensor's inputs, and `NAME.counts`, the tokens in them, both float32.
NAME is the tensor's in a model's GGUF file (llama.cpp's `tools/imatrix/imatrix.cpp`).
"""

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from oneshot.checkpoint import IMPORTANCE_NAME, Model
from oneshot.checkpoint.gguf_architectures import ARCHITECTURES, tensor_name_map
from oneshot.errors import CheckpointError
from oneshot.machine.durable import UNFINISHED, make_durable
from oneshot.stream import InputSquares
from oneshot.text import Text

logger = logging.getLogger(__name__)

# llama.cpp's architectures of families that it calls otherwise, as its `convert_hf_to_gguf.py` has them
OTHER_NAMES = {
    **dict.fromkeys(("mistral", "mixtral", "llava"), "llama"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "deepseek2"),
    **dict.fromkeys(("distilbert", "roberta", "xlm-roberta", "camembert"), "bert"),
    "ministral3": "mistral3",
    "glm": "chatglm",
    "glm4v": "glm4",
    "gpt_bigcode": "starcoder",
    "olmo3": "olmo2",
    "granitemoehybrid": "granitehybrid",
    "solar_open": "glm4moe",
    "modernbert": "modern-bert",
    "qwen2_5_vl": "qwen2vl",
}
ONE_FOR_GATE_AND_UP = ("gemma4",)  # architectures that store gates and ups of experts as one tensor
# linears that a converter takes apart, by the end of their names; {} stands for "" or "_shexp" beside experts
TAKEN_APART = {
    "shared_mlp.input_linear": ("ffn_gate{}", "ffn_up{}"),
    "shared_mlp.output_linear": ("ffn_down{}",),
    "linear_attn.in_proj_qkvz": ("attn_qkv", "attn_gate"),
}
SPLIT = "attn_kv_b"  # into two for absorbed attention, whose inputs the stock class never has
FALCON_FACTORS = {
    "attn_q": "attention_in_multiplier",
    "attn_k": "attention_in_multiplier",
    "attn_v": "attention_in_multiplier",
    "ssm_in": "ssm_in_multiplier",
}
TILED_HEADS = ("qwen35", "qwen35moe")  # architectures whose converter reorders heads of values, as `ssm_out` reads them


def architecture_of(model_type: str) -> str:
    """Return llama.cpp's name of a family. Raises `CheckpointError` if it has none."""
    import gguf

    known = set(gguf.MODEL_ARCH_NAMES.values())
    read = {each.model_type: name for name, each in ARCHITECTURES.items()}
    plain = model_type.removesuffix("_text")
    tried = (read.get(model_type), OTHER_NAMES.get(model_type), plain, plain.replace("_", ""), plain.replace("_", "-"))
    found = next((name for name in tried if name in known), None)
    if found is None:
        raise CheckpointError(
            f"llama.cpp has no architecture for {model_type}, so no GGUF file has its tensors; give a model of another "
            "family."
        )
    return found


def tensor_names(model: Model) -> "TensorNames":
    """Return the names of a model's tensors in GGUF files.

    Raises `CheckpointError` for a family without an architecture in llama.cpp, and for an encoder–decoder.
    """
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError("An importance matrix needs the package gguf; run pip install 'oneshot-llm[gguf]'.")
    if model.shape.num_decoder_layers:
        raise CheckpointError(
            f"llama.cpp has no importance matrix for a decoder beside an encoder ({model.family.model_type}); give a "
            "model of one stack of layers."
        )
    architecture = architecture_of(model.family.model_type)
    return TensorNames(architecture, model.shape.num_hidden_layers, has_experts=model.shape.experts is not None)


class TensorNames:
    """The names that an architecture's GGUF files have for what a module of the stock class holds."""

    def __init__(self, architecture: str, num_layers: int, *, has_experts: bool) -> None:
        self.architecture, self._has_experts = architecture, has_experts
        self._map = tensor_name_map(architecture, num_layers)

    def of(self, module: str) -> tuple[str, ...]:
        """Return the tensors of a module, or of a parameter of experts; none if the architecture has no such tensor."""
        layer = next((part for part in module.split(".") if part.isdigit()), None)
        apart = next((names for end, names in TAKEN_APART.items() if module.endswith(end)), None)
        if module.endswith((".gate_up_proj", ".down_proj")) and ".experts." in module:
            parts = ("down",) if module.endswith(".down_proj") else ("gate", "up")
            if len(parts) > 1 and self.architecture in ONE_FOR_GATE_AND_UP:
                parts = ("gate_up",)
            return tuple(f"blk.{layer}.ffn_{part}_exps.weight" for part in parts)
        if apart is not None:
            return tuple(f"blk.{layer}.{name.format('_shexp' * self._has_experts)}.weight" for name in apart)
        tried = (module, module.replace("language_model.", ""), module.partition(".")[2], f"{module}.layer")
        found = next((name for name in map(self._map.get_name, tried) if name is not None), None)
        return () if found is None or found.endswith(SPLIT) else (f"{found}.weight",)


def write_imatrix(path: Path, squares: InputSquares, names: TensorNames, text: Text, config: Mapping[str, Any]) -> None:
    """Write the file, and warn of what has no sums in it.

    Args:
        squares: by the modules of the stock class, of this text. config: config.json of the language model.

    Raises `OSError` if it cannot be written.
    """
    import gguf

    by_tensor = {name: module for module in squares.sums for name in names.of(module)}
    lacking = sorted(module for module in squares.sums if not names.of(module))
    if lacking:
        logger.warning(
            "%s and %d others have no tensor of their own in GGUF files (%s), so %s has nothing for what becomes of "
            "them.",
            lacking[0],
            len(lacking) - 1,
            names.architecture,
            IMPORTANCE_NAME,
        )
    unfinished = path.with_name(path.name + UNFINISHED)
    writer = gguf.GGUFWriter(unfinished, names.architecture)
    writer.add_type(gguf.GGUFType.IMATRIX)
    writer.add_array(gguf.Keys.IMatrix.DATASETS, [text.source])
    tokens = max(int(counts.max()) for counts in squares.counts.values())
    writer.add_uint32(gguf.Keys.IMatrix.CHUNK_COUNT, tokens // text.longest)
    writer.add_uint32(gguf.Keys.IMatrix.CHUNK_SIZE, text.longest)
    for name, module in sorted(by_tensor.items()):
        sums, counts = squares.sums[module], squares.counts[module]
        sums = as_converted(names.architecture, name, sums, config)
        without = torch.nonzero(counts == 0).flatten().tolist()
        if without:
            logger.warning(
                "%d of %d experts in %s got no token of the text (%s): llama-quantize weighs their inputs alike; give "
                "more text.",
                len(without),
                len(counts),
                name,
                ", ".join(map(str, without)),
            )
        writer.add_tensor(f"{name}.in_sum2", sums.float().numpy())
        writer.add_tensor(f"{name}.counts", (counts[:, None] if len(counts) > 1 else counts).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    make_durable(unfinished, path)


def as_converted(architecture: str, tensor: str, sums: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Return the sums of what a tensor reads after the changes of llama.cpp's converter; most read the same.

    Qwen 3.5: the first head of values of every head of keys comes first, then the second ones. Falcon H1: factors of
    inputs are in the weights.
    """
    part = tensor.split(".")[-2]
    if architecture in TILED_HEADS and part == "ssm_out":
        keys, size = config["linear_num_key_heads"], config["linear_value_head_dim"]
        return sums.unflatten(0, (keys, -1, size)).transpose(0, 1).flatten()
    if architecture == "falcon-h1" and part in FALCON_FACTORS:
        return sums / (config.get(FALCON_FACTORS[part]) or 1) ** 2
    return sums
