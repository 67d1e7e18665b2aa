"""The hidden states after the last layer: what a run passed, and what the result that it wrote computes."""

from typing import Any

import pytest
import torch
from factories import calibration_tokens

from oneshot.compression import LayerCompressor
from oneshot.config import Config


def keep_last_states(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Let runs leave the compressed stream after a layer in the list that is returned, the newest alone."""
    last: list[torch.Tensor] = []

    def keep(self: Any, layer: int, tensors: Any) -> Any:
        done = passed(self, layer, tensors)
        if self._states is not None:  # of a run that reads text
            self._states.settle()
            last[:] = [torch.cat([x for x, _ in self._states.read()])]
        return done

    passed = LayerCompressor.compress_layer
    monkeypatch.setattr(LayerCompressor, "compress_layer", keep)
    return last


def assert_passes(result: Any, layers: str, config: Config, last: torch.Tensor) -> None:
    """Assert that a result has these states after the last of its `layers`, for the text of the run."""
    hidden: list[torch.Tensor] = []
    result.get_submodule(layers)[-1].register_forward_hook(
        lambda _, __, output: hidden.append(output[0] if isinstance(output, tuple) else output)
    )
    result(calibration_tokens(config))
    torch.testing.assert_close(hidden[0], last, rtol=1e-4, atol=1e-4)
