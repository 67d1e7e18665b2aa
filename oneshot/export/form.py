"""The base of the forms that a result can be written as."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from oneshot.checkpoint import Journal, Model
from oneshot.compression import StreamSubspaces
from oneshot.config import SaveDtype
from oneshot.export.companions import finish_weights
from oneshot.export.outside import Part
from oneshot.planning import Grid, Plan
from oneshot.report.card import python_usage
from oneshot.tensors import Tensors


class Form(ABC):
    """A way to write a result: a checkpoint of safetensors, if a form does not say otherwise.

    Attributes:
        title: the beginning of the model card.
        opened_by: the library or program that opens a result.
        is_safetensors: whether the journal writes the files of the result.
        modelling_files: what lies beside the weights, and transformers runs to open a result.
    """

    name: str
    title = "A checkpoint whose layers have their own sizes"
    opened_by = "transformers"
    is_safetensors = True
    modelling_files: ClassVar[tuple[Path, ...]] = ()

    @abstractmethod
    def loading(self, config: dict[str, Any]) -> str:
        """Return sentences of the model card: how a result with this config.json is opened, and by what."""

    def usage(self, task: str) -> str:
        """Return a block of code for the model card that opens a result; `task`: `report.card.task_of` its config."""
        return python_usage(task, runs_code=bool(self.modelling_files))

    def vocabulary_bytes(self, model: Model) -> int:
        """Return the bytes that the tokenizer takes in the weight file; 0 where it has files of its own."""
        return 0

    @abstractmethod
    def grid(self, model: Model) -> Grid:
        """Return the sizes that the form can state for a model."""

    @abstractmethod
    def config(self, model: Model, plan: Plan) -> dict[str, Any]:
        """Return the config.json of the result. Raises `PlanError` if it cannot state the plan."""

    @abstractmethod
    def layer_prefix(self, model: Model, number: int) -> str:
        """Return what the stored names of the result's layer `number` begin with."""

    @abstractmethod
    def layer(self, model: Model, number: int, tensors: Tensors) -> Tensors:
        """Return the tensors of the result's layer `number` under their stored names."""

    @abstractmethod
    def original(self, model: Model, number: int, stored: Tensors) -> Tensors:
        """Return the inverse of `layer`."""

    @abstractmethod
    def outside(self, model: Model, plan: Plan, subspaces: StreamSubspaces | None) -> list[Part]:
        """Return readers of the tensors outside the layers, one for each part of the journal.

        Tables of the vocabulary are whole there (`outside.with_ranges`).
        """

    def write(
        self, model: Model, plan: Plan, journal: Journal, advance: Callable[[int], None], save_dtype: SaveDtype
    ) -> int:
        """Complete the weight files when all parts are there, check them, and return the parameters that they hold.

        A form with a file of its own makes it of the journal's parts, which have the dtype `part_dtype(save_dtype)`;
        `advance` receives the bytes written. The config and the tokenizer are there already.
        """
        return finish_weights(journal, *self.modelling_files)
