"""The forms that a result can be written as, by name. To add one: a class with these methods, and its name in FORMS."""

from collections.abc import Callable
from typing import Any, Protocol

from oneshot.architecture import Description, StackShape
from oneshot.architecture.stated_shapes import nemotron_nas_shape, per_layer_shape, resized_shape
from oneshot.checkpoint import Journal, Model
from oneshot.checkpoint.gguf_stated import own_architecture
from oneshot.compression import StreamSubspaces
from oneshot.config import FormName, SaveDtype
from oneshot.export.encoder import EncoderForm, encoder_shape
from oneshot.export.gguf import GgufForm
from oneshot.export.gguf_stock import StockGgufForm
from oneshot.export.nemotron_nas import NemotronNasForm
from oneshot.export.outside import Part
from oneshot.export.per_layer import PerLayerForm
from oneshot.export.resized import ResizedForm
from oneshot.export.stock import StockForm
from oneshot.families import COMPRESSED_MODEL_TYPE, ENCODER_MODEL_TYPE, NAS_MODEL_TYPE, RESIZED_MODEL_TYPE
from oneshot.planning import Grid, Plan
from oneshot.tensors import Tensors


class Form(Protocol):
    """A way to write a result.

    `title` begins the model card. `opened_by`: the library or program that opens a result. `is_safetensors`: the
    journal writes the files of the result.
    """

    name: str
    title: str
    opened_by: str
    is_safetensors: bool

    def loading(self, config: dict[str, Any]) -> str:
        """Return sentences of the model card: how a result with this config.json is opened, and by what."""

    def usage(self, task: str) -> str:
        """Return a block of code for the model card that opens a result; `task`: `report.card.task_of` its config."""

    def grid(self, model: Model) -> Grid:
        """Return the sizes that the form can state for a model."""

    def config(self, model: Model, plan: Plan) -> dict[str, Any]:
        """Return the config.json of the result. Raises `PlanError` if it cannot state the plan."""

    def layer_prefix(self, model: Model, number: int) -> str:
        """Return what the stored names of the result's layer `number` begin with."""

    def layer(self, model: Model, number: int, tensors: Tensors) -> Tensors:
        """Return the tensors of the result's layer `number` under their stored names."""

    def original(self, model: Model, number: int, stored: Tensors) -> Tensors:
        """Return the inverse of `layer`."""

    def outside(
        self, model: Model, plan: Plan, subspaces: StreamSubspaces | None, embedding: Tensors | None
    ) -> list[Part]:
        """Return readers of the tensors outside the layers, one for each part of the journal."""

    def write(
        self, model: Model, plan: Plan, journal: Journal, advance: Callable[[int], None], save_dtype: SaveDtype
    ) -> int:
        """Complete the weight files when all parts are there, check them, and return the parameters that they hold.

        A form with a file of its own makes it of the journal's parts, which have the dtype `part_dtype(save_dtype)`;
        `advance` receives the bytes written. The config and the tokenizer are there already.
        """


FORMS: dict[FormName, Form] = {
    "stock": StockForm(),
    "per-layer": PerLayerForm(),
    "nemotron-nas": NemotronNasForm(),
    "gguf": GgufForm(),
}


STATED_SHAPES: dict[str, Callable[[dict[str, Any]], StackShape]] = {
    COMPRESSED_MODEL_TYPE: per_layer_shape,
    ENCODER_MODEL_TYPE: encoder_shape,
    NAS_MODEL_TYPE: nemotron_nas_shape,
    RESIZED_MODEL_TYPE: resized_shape,
}
"""The sizes that a config.json with layers of different sizes states, by its model type."""


def form_of(name: FormName, family: Description) -> Form:
    """Return the form of this name for a family.

    The per-layer form has three classes of checkpoints, and the form gguf has two layouts of its file.
    """
    if name == GgufForm.name and own_architecture(family.model_type) is not None:
        return StockGgufForm()
    if name != PerLayerForm.name:
        return FORMS[name]
    if family.stack.norms_after and not family.stack.causal:
        return EncoderForm()
    return FORMS[name] if family.like_llama and not family.windowed else ResizedForm()


def stated_shape(config: dict[str, Any]) -> StackShape | None:
    """Return the sizes that the config.json of a form with layers of different sizes states; None for stock configs."""
    stated = STATED_SHAPES.get(str(config.get("model_type")))
    return None if stated is None else stated(config)
