"""Model families. To add one: a file beside `llama.py`, and its record in `ARCHITECTURES`."""

from typing import Any

from oneshot.arch.base import PER_LAYER_MODEL_TYPE, Architecture
from oneshot.arch.llama import LLAMA
from oneshot.arch.mistral import MISTRAL
from oneshot.arch.opt import OPT
from oneshot.arch.qwen2 import QWEN2
from oneshot.arch.qwen3 import QWEN3
from oneshot.errors import CheckpointError

ARCHITECTURES = {architecture.model_type: architecture for architecture in (LLAMA, MISTRAL, QWEN2, QWEN3, OPT)}


def get_architecture(config: dict[str, Any]) -> Architecture:
    """The family that `config["model_type"]` names.

    Raises `CheckpointError`, with the reason, for quantised weights, mixtures of experts, layers that are not
    alike, and unknown families.
    """
    model_type = config.get("model_type", "(none)")
    if not isinstance(model_type, str):
        raise CheckpointError(f"config.json states model_type {repr(model_type)[:100]}, which is no name; mend it.")
    if any(config.get(name) is not None for name in ("quantization_config", "compression_config")):
        raise CheckpointError("The weights are quantised; give the unquantised checkpoint and quantise the result.")
    if "mixtral" in model_type or "moe" in model_type or config.get("num_local_experts") or config.get("num_experts"):
        raise CheckpointError(
            f"The model ({model_type}) is a mixture of experts, which is not supported; give a dense one."
        )
    if model_type == PER_LAYER_MODEL_TYPE:
        raise CheckpointError("The checkpoint is a compressed one in the per-layer form; give the model it came from.")
    if model_type not in ARCHITECTURES:
        raise CheckpointError(
            f"Model type {model_type!r} is not supported; the supported families are {', '.join(ARCHITECTURES)}."
        )
    if config.get("use_sliding_window"):
        raise CheckpointError(
            "Some layers of the model see all tokens and some a window (use_sliding_window), which is not supported; "
            "give a model whose layers are alike."
        )
    architecture = ARCHITECTURES[model_type]
    architecture.check_config(config)
    return architecture
