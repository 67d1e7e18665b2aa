"""A GGUF file of our own form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import MakeCheckpoint, MakeConfig

from oneshot.pipeline import compress


@pytest.fixture
def as_gguf(make_checkpoint: MakeCheckpoint, make_config: MakeConfig, tmp_path: Path) -> Callable[..., Path]:
    """`as_gguf(**options of make_checkpoint)` -> the GGUF file of a model from which nothing was removed."""

    def make(save_dtype: str = "keep", **options: Any) -> Path:
        options = {"layers": 1} | options
        output = str(tmp_path / "written")
        compress(make_config(make_checkpoint(**options), form="gguf", sparsity=0, output=output, save_dtype=save_dtype))
        return Path(output) / "model.gguf"

    return make
