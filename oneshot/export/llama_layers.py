"""The bases of forms with a modelling file, and of forms whose layers have another family's names, mostly Llama's."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from oneshot.architecture import Description, StackShape
from oneshot.checkpoint import Journal, Model, complete_config
from oneshot.compression import StreamSubspaces
from oneshot.config import SaveDtype
from oneshot.errors import PlanError
from oneshot.export.companions import finish_weights
from oneshot.export.outside import OutsideNames, Part, folded_outside
from oneshot.families import LLAMA
from oneshot.planning import Grid, Plan
from oneshot.report.card import python_usage
from oneshot.tensors import Tensors


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


ADAPTERS = 'Adapters of peft need names: `LoraConfig(target_modules="all-linear")`.'
NAMES = OutsideNames(LLAMA.stack.embedding, "model.norm.weight", "lm_head.weight")


class RenamedLayers(ABC):
    """A form that names the tensors of every layer as another family does."""

    @abstractmethod
    def names_of(self, model: Model) -> Description:
        """Return the family whose names a model's layers are stored under."""

    def layer_prefix(self, model: Model, number: int) -> str:
        """Return what the stored names of a layer begin with."""
        return self.names_of(model).stack.layer_prefix(number)

    def layer(self, model: Model, number: int, tensors: Tensors) -> Tensors:
        """Return a layer's tensors under their stored names."""
        prefix, renamed = self.layer_prefix(model, number), model.family.rename(tensors, self.names_of(model))
        return {prefix + name: tensor for name, tensor in renamed.items()}

    def original(self, model: Model, number: int, stored: Tensors) -> Tensors:
        """Return the inverse of `layer`."""
        prefix = self.layer_prefix(model, number)
        tensors = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
        return self.names_of(model).rename(tensors, model.family)


class LlamaLayers(RenamedLayers):
    """A form that names the tensors of every layer, and those outside them, as Llama does."""

    def names_of(self, model: Model) -> Description:
        """Return Llama."""
        return LLAMA

    @abstractmethod
    def grid(self, model: Model) -> Grid:
        """Return the sizes that the form can state for a model."""

    def outside(
        self, model: Model, plan: Plan, subspaces: StreamSubspaces | None, embedding: Tensors | None
    ) -> list[Part]:
        """Return readers of the tensors outside the layers, one for each part of the journal."""
        grid = self.grid(model)
        head = grid.stack(plan).head
        return folded_outside(
            model,
            NAMES,
            subspaces,
            keep_tied=head != "own",
            centred=grid.folds_layer_norms and head == "own",
            embedding=embedding,
        )


def reason_against_llama(model: Model, form: str) -> str | None:
    """Return a sentence why no Llama holds the model's layers; None if one does. Norms of queries count as held."""
    shape, config = model.shape, complete_config(model.checkpoint.config)
    if shape.num_decoder_layers:
        return f"--form {form} has no decoder beside an encoder, unlike {model.family.model_type}; use --form stock."
    reason = model.family.reason_against("per-layer form")
    if shape.layer_norms or not shape.gated:
        return (
            f"--form {form} needs RMSNorms and FFNs with a gate, which {model.family.model_type} does not have; use "
            f"--form {'per-layer' if reason is None else 'stock'}."
        )
    if reason is not None:
        return reason
    if not model.family.like_llama:
        return (
            f"--form {form} holds Llama's layers, which {model.family.model_type} does not have; use --form per-layer."
        )
    if model.family.windowed:
        return (
            f"--form {form} has no sliding attention window, but the model has one of {config['sliding_window']} "
            "tokens; use --form per-layer."
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        return (
            f"--form {form} has FFNs with the activation silu, but the model's is {activation}; use --form per-layer."
        )
    return None


def refuse_different_heads(stack: StackShape, form: str) -> None:
    """Raise `PlanError` if layers with attention have different numbers of query heads."""
    heads = {layer.num_attention_heads for layer in stack.layers} - {0}
    if len(heads) > 1:
        raise PlanError(
            f"--form {form} has the same query heads in every layer, but the plan has from {min(heads)} to "
            f"{max(heads)}; add --form per-layer."
        )
