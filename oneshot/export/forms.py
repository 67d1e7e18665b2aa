"""The forms that a result can be written as, by name. To add one: a subclass of `Form`, and its name in FORMS."""

from collections.abc import Callable
from typing import Any

from oneshot.architecture import Description, StackShape
from oneshot.architecture.stated_shapes import nemotron_nas_shape, per_layer_shape, resized_shape
from oneshot.checkpoint.gguf_stated import own_architecture
from oneshot.config import FormName
from oneshot.export.encoder import EncoderForm, encoder_shape
from oneshot.export.form import Form
from oneshot.export.gguf import GgufForm
from oneshot.export.gguf_stock import StockGgufForm
from oneshot.export.nemotron_nas import NemotronNasForm
from oneshot.export.per_layer import PerLayerForm
from oneshot.export.resized import ResizedForm
from oneshot.export.stock import StockForm
from oneshot.families import COMPRESSED_MODEL_TYPE, ENCODER_MODEL_TYPE, NAS_MODEL_TYPE, RESIZED_MODEL_TYPE

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
