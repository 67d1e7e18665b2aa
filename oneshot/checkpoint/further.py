"""The layers of a checkpoint that predict tokens after the next one, which go with the model into a result."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from oneshot.architecture import FurtherNames
from oneshot.checkpoint.model import MOST_FURTHER_LAYERS, Model, identify
from oneshot.checkpoint.stock import with_kept_layers
from oneshot.errors import CheckpointError


@dataclass(frozen=True)
class FurtherLayer:
    """One such layer.

    Attributes:
        names: in the files of the model. model: its block as the only layer of the same model, whose final norm is the
            layer's own.
    """

    names: FurtherNames
    model: Model


@dataclass(frozen=True)
class FurtherLayers:
    """All of them. `stated`: what the model's config states of them."""

    layers: tuple[FurtherLayer, ...]
    stated: Mapping[str, Any]


def further_layers(model: Model) -> FurtherLayers | str | None:
    """Return the layers of a model that predict tokens after the next one, checked against the stock class.

    None if its files have none. If they are incomplete, or are not understood, the reason as a clause.
    """
    names, beside = model.family.further, model.checkpoint.beside
    if beside is None:
        return None
    if names is None:
        return f"oneshot does not know how a {model.family.model_type} reads them"
    own, layers = model.shape.num_hidden_layers, model.family.stack.layers
    counts = {key: model.stated_further[key] for key in names.counts if key in model.stated_further}
    if len(set(counts.values())) > 1:
        return (
            f"config.json states several numbers of them ({', '.join(f'{key} {one}' for key, one in counts.items())})"
        )
    count = next(iter(counts.values()), _stored(model, names, set(beside.shapes)))
    found = [names.of(layers, own, index) for index in range(min(count, MOST_FURTHER_LAYERS))]
    known = {f"{module}.weight": module for one in found for module in one.modules}
    width = model.shape.hidden_size
    for name, module in known.items():
        expected = (width, 2 * width) if any(module == one.projection for one in found) else (width,)
        if name not in beside.shapes:
            return f"{name} is missing, of shape {expected}"
        if beside.shapes[name] != expected:
            return f"{name} has shape {beside.shapes[name]} where such a layer has {expected}"
    blocks = tuple(one.block for one in found)
    for name in sorted(beside.shapes):
        if name not in known and not name.startswith(blocks):
            return f"{name} belongs to none of the {len(found)} layers that config.json states"
    alike = _alike(model)
    if alike is None:
        return "the model has no layer of the same kind"
    made = []
    for one in found:
        try:
            made.append(FurtherLayer(one, _alone(model, one, alike)))
        except CheckpointError as error:
            told = str(error).partition(";")[0].replace(f"{layers}.0.", one.block)
            return f"they are not those of a {model.family.model_type} ({told})"
    return FurtherLayers(tuple(made), dict(model.stated_further))


def _stored(model: Model, names: FurtherNames, stored: Iterable[str]) -> int:
    """Return how many layers are stored."""
    own, layers, index = model.shape.num_hidden_layers, model.family.stack.layers, 0
    while any(name.startswith(names.of(layers, own, index).block) for name in stored):
        index += 1
    return index


def _alike(model: Model) -> int | None:
    """Return the last layer of the model that is as a block of such layers: with full attention, and with experts."""
    family = model.family
    attending = filter(family.attends, range(model.shape.num_hidden_layers))
    return max((layer for layer in attending if layer not in family.dense_layers), default=None)


def _alone(model: Model, names: FurtherNames, alike: int) -> Model:
    """Return the model whose only layer is the block of such a layer. Raises `CheckpointError` as `identify`."""
    checkpoint, family, beside = model.checkpoint, model.family, model.checkpoint.beside
    assert beside is not None
    norm = family.stack.final_norm
    assert norm is not None
    outside = {name: name for name in checkpoint.shapes if not family.is_in_layers(name)}
    first = f"{family.stack.layers}.0."
    not_in_block = {f"{module}.weight" for module in names.modules} | {*names.copies}
    block = {
        first + name.removeprefix(names.block): name
        for name in beside.shapes
        if name.startswith(names.block) and name not in not_in_block
    }
    view = checkpoint.joined(outside | {f"{norm.name}.weight": f"{names.output_norm}.weight"} | block)
    view.config = with_kept_layers(checkpoint.config, [alike], family)
    alone = identify(view)
    if alone.shape.mlp_bias != model.shape.mlp_bias:
        alone = alone.with_ffn_biases()
    return alone
