"""The base of forms with a modelling file, which transformers runs to open a result."""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from oneshot.checkpoint import Journal, Model
from oneshot.config import SaveDtype
from oneshot.export.companions import finish_weights
from oneshot.planning import Plan
from oneshot.report.card import python_usage


class OwnCode:
    """A checkpoint of safetensors whose layers have sizes of their own, with the `modelling_files` in its folder."""

    title = "A checkpoint whose layers have their own sizes"
    opened_by = "transformers"
    is_safetensors = True
    modelling_files: ClassVar[tuple[Path, ...]]

    def usage(self, task: str) -> str:
        """Return code that opens the result."""
        return python_usage(task, runs_code=True)

    def write(
        self, model: Model, plan: Plan, journal: Journal, advance: Callable[[int], None], save_dtype: SaveDtype
    ) -> int:
        """Complete the weight files beside the modelling files, and return the parameters that they hold."""
        return finish_weights(journal, *self.modelling_files)
