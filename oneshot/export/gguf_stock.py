"""Form `gguf` of families whose layers are not Llama's: equal layers in the family's own architecture of llama.cpp.

The result is the stock checkpoint of the same sizes in one file, as llama.cpp's own converter lays it out. So any GGUF
file is read as this one is, and its config.json is the stock one.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from oneshot.checkpoint import GgufCheckpoint, Journal, Model, complete_config
from oneshot.checkpoint.gguf_architectures import ARCHITECTURES, tensor_name_map
from oneshot.checkpoint.gguf_stated import own_architecture, reason_against_stating, stated_keys
from oneshot.config import SaveDtype
from oneshot.errors import OutputError, PlanError
from oneshot.export.companions import empty_tensors
from oneshot.export.gguf import FILE_NAME, GgufFolder, reason_against_files, stored_tensor, vocabulary_of, write_file
from oneshot.export.gguf_tensors import as_float32
from oneshot.export.stock import StockForm
from oneshot.planning import Grid, Plan


class StockGgufForm(GgufFolder, StockForm):
    """The stock checkpoint in one file; all layers have equal sizes."""

    def grid(self, model: Model) -> Grid:
        """Return the sizes that the family's architecture of llama.cpp can state."""
        family, config = model.family, complete_config(model.checkpoint.config)
        name = own_architecture(family.model_type)
        assert name is not None, "this form is of families that have an architecture"
        refusal = reason_against_files(model)
        if family.head is None:
            refusal = "--form gguf holds models that write text, and this one has no output head; use --form stock."
        elif (reason := reason_against_stating(name, config)) is not None:
            other = self.remedy(model) or "--form stock"
            refusal = f"--form gguf cannot state a part of the model's config.json ({reason}); use {other}."
        return Grid(family, model.shape, remedy=self.remedy(model), refusal=refusal, writes_vocabulary=True)

    def config(self, model: Model, plan: Plan) -> dict[str, Any]:
        """Return the config.json of the result. Raises `PlanError` if llama.cpp cannot state the plan."""
        if not isinstance(model.checkpoint, GgufCheckpoint):  # of which a prediction reads no tokenizer
            vocabulary_of(model)
        config = super().config(model, plan)
        name = str(own_architecture(model.family.model_type))
        if (reason := reason_against_stating(name, config)) is not None:
            raise PlanError(f"llama.cpp cannot state these sizes ({reason}); use --form stock.")
        return config

    def write(
        self, model: Model, plan: Plan, journal: Journal, advance: Callable[[int], None], save_dtype: SaveDtype
    ) -> int:
        """Write the file from the journal's parts, and return the parameters that it holds."""
        name, config = str(own_architecture(model.family.model_type)), complete_config(self.config(model, plan))
        names = tensor_name_map(name, len(plan.kept_layers))
        offset = np.float32(ARCHITECTURES[name].norm_offset)

        def as_converted(norm: np.ndarray) -> np.ndarray:
            return np.asarray(as_float32(norm) + offset)

        tensors = [
            stored_tensor(
                names,
                place,
                as_converted if place.name.endswith("norm.weight") else None,
                quantised=save_dtype == "q8_0",
            )
            for place in journal.stored()
        ]
        path, stack = journal.partial / FILE_NAME, self.grid(model).stack(plan)
        write_file(path, model, stack, name, stated_keys(name, config), tensors, advance)
        return verify_stock_gguf(path, config)


def verify_stock_gguf(path: Path, config: dict[str, Any]) -> int:
    """Check that a file has exactly the tensors of the class of a config.json; return its parameters.

    Raises `OutputError` with the first tensor that does not fit, and `CheckpointError` for one that is missing.
    """
    written = GgufCheckpoint(path).shapes
    expected = {name: tuple(tensor.shape) for name, tensor in empty_tensors(config).items()}
    for name, shape in sorted(written.items()):
        if expected.get(name) != shape:
            raise OutputError(
                f"{name} was written as {shape} but the plan has {expected.get(name)}; please report this with the "
                "input's config.json."
            )
    return sum(math.prod(shape) for shape in written.values())
