"""Model families. To add one: a file beside `llama.py`, and its record in `ARCHITECTURES`."""

from typing import Any

from oneshot.arch.base import Architecture
from oneshot.arch.llama import LLAMA
from oneshot.arch.mistral import MISTRAL
from oneshot.errors import CheckpointError

ARCHITECTURES = {architecture.model_type: architecture for architecture in (LLAMA, MISTRAL)}


def get_architecture(config: dict[str, Any]) -> Architecture:
    """The family that `config["model_type"]` names.

    Raises `CheckpointError`, with the reason, for quantised weights, mixtures of experts and unknown families.
    """
    model_type = config.get("model_type", "(none)")
    if config.get("quantization_config"):
        raise CheckpointError("The weights are quantised; give the unquantised checkpoint and quantise the result.")
    if "mixtral" in model_type or "moe" in model_type or config.get("num_local_experts") or config.get("num_experts"):
        raise CheckpointError(
            f"The model ({model_type}) is a mixture of experts, which is not supported; give a dense one."
        )
    if model_type not in ARCHITECTURES:
        raise CheckpointError(
            f"Model type {model_type!r} is not supported; the supported families are {', '.join(ARCHITECTURES)}."
        )
    return ARCHITECTURES[model_type]
