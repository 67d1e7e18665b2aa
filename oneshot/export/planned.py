"""The planned parts of the journal, without values: everything that a run is going to write."""

from collections.abc import Sequence

import torch

from oneshot.checkpoint import Model
from oneshot.checkpoint.quantisation import Quantisation
from oneshot.compression import StreamSubspaces
from oneshot.config import SaveDtype
from oneshot.export.companions import empty_tensors
from oneshot.export.form import Form
from oneshot.export.outside import Part, with_ranges
from oneshot.export.quantised import empty_scales, quantised_layer
from oneshot.export.saving import cast
from oneshot.planning import Plan
from oneshot.tensors import Tensors

META = torch.device("meta")


def planned_parts(
    form: Form,
    model: Model,
    plan: Plan,
    subspaces: StreamSubspaces | None,
    tables: Tensors,
    save_dtype: SaveDtype,
    *,
    quantisation: Quantisation | None = None,
    blocks: Sequence[Tensors] = (),
    beside: Sequence[Part] = (),
) -> list[Tensors]:
    """Return the tensors of the layers and of the parts outside them, on torch's meta device: dtypes and shapes.

    A layer has the names and shapes of the result's model class, and the input's dtypes. New tensors take the dtype of
    attention's output projection, or of the carried mixer. What is outside the layers is read and folded without
    values.

    Args:
        quantisation: of linears of the layers. subspaces: subspaces of a smaller hidden size; None at full size.
        tables: ranges of the vocabulary that replace tables, for a plan with ranks.
        blocks: of layers that predict tokens after the next one, which follow the layers. beside: readers of what
            follows the parts outside the layers.
    """
    empty = model.without_values()
    of_class = empty_tensors(form.config(model, plan), model.family.stack.experts)
    numbers = {layer: number for number, layer in enumerate(plan.kept_layers)}
    layers = []
    for layer in range(model.shape.num_hidden_layers):
        prefix = form.layer_prefix(model, numbers[layer]) if layer in numbers else None
        stored = {} if prefix is None else {name: of_class[name] for name in of_class if name.startswith(prefix)}
        made = typed(form, empty, layer, numbers[layer], stored) if stored else {}
        if made and quantisation is not None:
            tensors_of_layer = form.original(empty, numbers[layer], made)
            scales = empty_scales(quantisation, model.family.stack_of(layer), tensors_of_layer)
            place = form, empty, numbers[layer], tensors_of_layer, scales
            layers.append(quantised_layer(*place, quantisation, save_dtype))
        else:
            layers.append(cast(save_dtype, made))
    parts = list(blocks)
    bases = None if subspaces is None else subspaces.on(META)
    ranges = {name: tensor.to(META) for name, tensor in tables.items()}
    parts += [read() for read in (*with_ranges(form.outside(empty, plan, bases), ranges), *beside)]
    assert ranges.keys() <= {name for part in parts for name in part}, "ranges of a table that the form does not store"
    return layers + [cast(save_dtype, part) for part in parts]


def typed(form: Form, empty: Model, layer: int, number: int, stored: Tensors) -> Tensors:
    """Return the tensors of a layer, `number` in the result, in the dtypes of the input."""
    dense = empty.read_layer(layer)
    like = dense[f"{empty.family.stack_of(layer).token_mixer.out}.weight"]
    typed = {
        name: tensor.to(dense.get(name, like).dtype) if tensor.is_floating_point() else tensor
        for name, tensor in form.original(empty, number, stored).items()
    }
    return form.layer(empty, number, typed)
