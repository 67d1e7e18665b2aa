"""The layers of a result that predict tokens after the next one.

They read the final states and the embedding, which keep their width. So they stay as they are, unless the config of the
result states other sizes than the input's: a block is made by the same config as the layers of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from oneshot.architecture import FurtherNames
from oneshot.checkpoint import Checkpoint, FurtherLayers, Model
from oneshot.export.companions import empty_tensors
from oneshot.export.form import Form
from oneshot.export.outside import Part, as_named
from oneshot.export.planned import typed
from oneshot.export.stock import StockForm
from oneshot.planning import Plan
from oneshot.tensors import Tensors


@dataclass(frozen=True)
class FurtherResult:
    """Such layers of a model as a form writes them for a plan."""

    form: StockForm
    model: Model
    layers: FurtherLayers
    plan: Plan

    @cached_property
    def plan_alone(self) -> Plan:
        """Return the plan of a model whose only layer is a block: the sizes of the last layer that stays."""
        return Plan((self.plan.layers[self.plan.kept_layers[-1]],), self.plan.head_unit)

    @cached_property
    def is_whole(self) -> bool:
        """Return whether the blocks keep their sizes."""
        alone = self.layers.layers[0].model
        return self.form.further_in_class or self.form.grid(alone).stack(self.plan_alone) == alone.shape.stack()

    @property
    def num_blocks(self) -> int:
        """Return how many blocks have to be compressed."""
        return 0 if self.is_whole else len(self.layers.layers)

    def parameters(self, checkpoint: Checkpoint) -> int:
        """Return the stored parameters of all such layers in the result; `checkpoint`: the model's, without values."""
        parts = [*self.blocks(), *(read() for read in self.outside(checkpoint))]
        return sum(tensor.numel() for part in parts for tensor in part.values())

    def blocks(self) -> list[Tensors]:
        """Return the compressed blocks without values, under the names of the result."""
        made = []
        for index in range(self.num_blocks):
            alone = self.layers.layers[index].model
            config, prefix = self.form.config(alone, self.plan_alone), self.form.layer_prefix(alone, 0)
            tensors = empty_tensors(config, alone.family.stack.experts)
            stored = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            made.append(self._named(index, typed(self.form, alone.without_values(), 0, 0, stored)))
        return made

    def layer(self, index: int, tensors: Tensors) -> Tensors:
        """Return the tensors of a block under the names of the result."""
        return self._named(index, self.form.layer(self.layers.layers[index].model, 0, tensors))

    def original(self, index: int, stored: Tensors) -> Tensors:
        """Return the inverse of `layer`."""
        alone, block = self.layers.layers[index].model, self._names(index).block
        first = alone.family.layer_prefix(0)
        named = {as_named(alone, first + name.removeprefix(block)): one for name, one in stored.items()}
        return self.form.original(alone, 0, named)

    def outside(self, checkpoint: Checkpoint) -> list[Part]:
        """Return readers of what stays as it is, one for each part of the journal.

        `checkpoint`: the model's, with values or without.
        """
        beside = checkpoint.beside
        assert beside is not None
        parts: list[Part] = []
        read: set[str] = set()
        for index, layer in enumerate(self.layers.layers):
            before, after = layer.names, self._names(index)
            names = {f"{one}.weight": f"{new}.weight" for one, new in zip(before.modules, after.modules, strict=True)}
            if self.is_whole and not self.form.further_in_class:
                block = (one for one in beside.shapes if one.startswith(before.block) and one not in before.copies)
                names = {one: after.block + one.removeprefix(before.block) for one in block} | names
            copies = [{one: new} for one, new in zip(before.copies, after.copies, strict=True) if one in beside.shapes]
            for group in (names, *copies):
                new = {one: name for one, name in sorted(group.items()) if one not in read}
                read |= new.keys()
                if new:
                    parts.append(partial(_read, beside, new))
            if self.form.further_in_class:  # in the tensors of its class
                parts.append(partial(self._whole, index, has_values=checkpoint.has_values))
        return parts

    def _whole(self, index: int, *, has_values: bool) -> Tensors:
        alone = self.layers.layers[index].model
        return self.layer(index, (alone if has_values else alone.without_values()).read_layer(0))

    def _names(self, index: int) -> FurtherNames:
        """Return the names of a layer in the result."""
        names, family = self.model.family.further, self.model.family
        assert names is not None
        return names.of(family.stack.layers, len(self.plan.kept_layers), index)

    def _named(self, index: int, tensors: Tensors) -> Tensors:
        """Return a block's tensors, called as the first layer of their model or as in the input, as in the result."""
        layer, block = self.layers.layers[index], self._names(index).block
        before = layer.model.family.layer_prefix(0), layer.names.block
        return {block + _without(name, before): tensor for name, tensor in tensors.items()}


def further_result(form: Form, model: Model, layers: FurtherLayers | str, plan: Plan) -> FurtherResult | str:
    """Return such layers of the result of a plan; the reason as a clause if it has none.

    `layers`: of the input, or the reason why they are not understood.
    """
    if isinstance(layers, str):
        return layers
    if not isinstance(form, StockForm):
        return f"the form {form.name} has no place for them"
    reason = form.reason_against_further(model, plan)
    return FurtherResult(form, model, layers, plan) if reason is None else reason


def _without(name: str, prefixes: Sequence[str]) -> str:
    return name.removeprefix(next(one for one in prefixes if name.startswith(one)))


def _read(beside: Checkpoint, names: dict[str, str]) -> Tensors:
    tensors = beside.read(names)
    return {names[name]: tensor for name, tensor in tensors.items()}
