"""The forms that a result can be written as, by name. To add one: a class with these methods, and its name in FORMS."""

from pathlib import Path
from typing import Any, Protocol

import torch

from oneshot.checkpoint import Model
from oneshot.compression import StreamSubspaces
from oneshot.config import FormName
from oneshot.export.nemotron_nas import NemotronNasForm
from oneshot.export.outside import Part
from oneshot.export.per_layer import PerLayerForm
from oneshot.export.stock import StockForm
from oneshot.planning import Grid, Plan

Tensors = dict[str, torch.Tensor]


class Form(Protocol):
    """What a result is written as. `title` begins the model card."""

    name: str
    title: str

    def loading(self, config: dict[str, Any]) -> str:
        """Return sentences of the model card: how a result with this config.json is opened, and by what."""

    def grid(self, model: Model) -> Grid:
        """Return the sizes that the form can state for a model."""

    def config(self, model: Model, plan: Plan) -> dict[str, Any]:
        """Return the config.json of the result. Raises `PlanError` if it cannot state the plan."""

    def layer(self, model: Model, number: int, tensors: Tensors) -> Tensors:
        """Return the tensors of the result's layer `number` under their stored names."""

    def original(self, model: Model, number: int, stored: Tensors) -> Tensors:
        """Return the inverse of `layer`."""

    def outside(
        self, model: Model, plan: Plan, subspaces: StreamSubspaces | None, embedding: Tensors | None
    ) -> list[Part]:
        """Return readers of the tensors outside the layers, one for each part of the journal."""

    def finish(self, folder: Path) -> None:
        """Write further files that the form needs."""


FORMS: dict[FormName, Form] = {
    "stock": StockForm(),
    "per-layer": PerLayerForm(),
    "nemotron-nas": NemotronNasForm(),
}
