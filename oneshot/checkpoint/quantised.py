"""Quantised checkpoints: some kinds are dequantised as they are read, tensor by tensor, and all others are refused."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oneshot.checkpoint.card import card_metadata
from oneshot.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]
OTHERWISE = "give the unquantised checkpoint"  # the remedy of weights that are not read


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight that files hold as several tensors.

    Attributes:
        parts: their names in the files by their roles; the weight's own numbers are the first.
        shape, dtype: of the weight that they stand for; `dtype` as safetensors names it.
        values: dequantises the parts, by their roles, into one new tensor.
    """

    parts: Mapping[str, str]
    shape: tuple[int, ...]
    dtype: str
    values: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]

    @property
    def first(self) -> str:
        """Return the name of the weight's own numbers."""
        return next(iter(self.parts.values()))


@dataclass(frozen=True)
class QuantisedWeights:
    """The quantised weights of a checkpoint.

    Attributes:
        weights: by the names that they have without quantisation.
        unused: endings of tensors that only quantised activations need.
        kind: its name, for messages that say what was rounded before; None if nothing has to be said.
    """

    weights: Mapping[str, QuantisedWeight]
    unused: tuple[str, ...] = ()
    kind: str | None = None


NOT_QUANTISED = QuantisedWeights({})


def stated_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype that a config states for the weights, as safetensors names it; bfloat16 without one."""
    text = config.get("text_config")
    of_text = text if isinstance(text, dict) else {}
    stated = next((one[key] for one in (config, of_text) for key in ("dtype", "torch_dtype") if one.get(key)), None)
    return {"float32": "F32", "float16": "F16"}.get(str(stated).removeprefix("torch."), "BF16")


def refuse_quantised(config: Mapping[str, Any], folder: Path) -> None:
    """Raise `CheckpointError` for a config that states quantised weights; it names the original if the card does."""
    stated = next((config[name] for name in ("quantization_config", "compression_config") if config.get(name)), None)
    if stated is None and config.get("quantization_config") is None and config.get("compression_config") is None:
        return
    method = stated.get("quant_method") if isinstance(stated, dict) else None
    origin = card_metadata(folder).get("base_model")
    name = origin[0] if isinstance(origin, list) else origin
    raise CheckpointError(
        f"The weights are quantised{f' ({str(method)[:100]})' if method else ''}; give the unquantised checkpoint"
        f"{f', {name} by the model card,' if name else ''} and quantise the result."
    )
