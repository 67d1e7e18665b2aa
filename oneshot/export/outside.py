"""The tensors outside the layers: embeddings, final norm and output head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from oneshot.checkpoint import Model
from oneshot.compression import StreamSubspaces
from oneshot.compression.embedding import MODULES
from oneshot.compression.fold import fold_embedding, fold_head
from oneshot.tensors import Tensors

Part = Callable[[], Tensors]  # reads and folds the tensors of one part of the journal


@dataclass(frozen=True)
class OutsideNames:
    """Names of the tensors outside the layers in a form. `encoder_norm`: None without an encoder before the decoder."""

    embedding: str
    norm: str
    head: str
    positions: str = "model.embed_positions.weight"
    head_bias: str = "lm_head.bias"
    head_map: str = "model.head_map.weight"
    encoder_norm: str | None = None


def unchanged_outside(model: Model) -> list[Part]:
    """Return readers of the tensors outside the layers as they are, one for each of `unchanged_parts`.

    A table of what every layer reads of its tokens is not copied from the mapped file.
    """
    readers: list[Part] = [partial(_unchanged, model, part) for part in unchanged_parts(model)]
    return readers if token_table(model) is None else [*readers, partial(_mapped, model)]


def unchanged_parts(model: Model) -> list[list[str]]:
    """Return the names of the tensors outside the layers, in the parts that are held at once.

    The output head is apart from the rest. A table of what every layer reads of its tokens (`token_table`) is missing.
    """
    prefixes = tuple(model.family.layer_prefix(layer) for layer in range(model.shape.num_hidden_layers))
    names = {name for name in model.checkpoint.tensor_names if not name.startswith(prefixes)} - {token_table(model)}
    head = {name for name in names if name == model.family.head}
    return [part for part in (sorted(names - head), sorted(head)) if part]


def with_ranges(parts: Sequence[Part], tables: Tensors) -> list[Part]:
    """Return readers of the same parts, in which the ranges of the vocabulary replace the tables that have some."""
    return [partial(_with_ranges, part, tables) for part in parts]


def _with_ranges(part: Part, tables: Tensors) -> Tensors:
    read = dict(part())
    for module in MODULES.values():
        ranges = {name: tensor for name, tensor in tables.items() if name.startswith(f"{module}.")}
        if ranges and read.pop(f"{module}.weight", None) is not None:
            read |= ranges
    return read


def token_table(model: Model) -> str | None:
    """Return the name of a table of what every layer reads of its tokens; None without one."""
    return next(iter(model.family.stack.token_tensors), None)


def _mapped(model: Model) -> Tensors:
    name = str(token_table(model))
    return as_in_input(model, {name: model.checkpoint.map_one(name)})


def _unchanged(model: Model, names: list[str]) -> Tensors:
    return as_in_input(model, model.checkpoint.read(names))


def as_named(model: Model, name: str) -> str:
    """Return the name of a tensor in the result: the input's name if the family's class has had other names."""
    keeps = model.family.text_module is not None or name in model.family.renamed.values()
    return model.checkpoint.stored(name) if keeps else name


def as_in_input(model: Model, tensors: Tensors) -> Tensors:
    """Return the tensors under the names that they have in the result."""
    return {as_named(model, name): tensor for name, tensor in tensors.items()}


def folded_outside(
    model: Model, names: OutsideNames, subspaces: StreamSubspaces | None, *, keep_tied: bool, centred: bool
) -> list[Part]:
    """Return readers of the embeddings and of the head, folded into subspaces.

    Args:
        keep_tied: whether the head stays the embedding. centred: whether rows of embeddings lose their mean.
    """
    first = None if subspaces is None else subspaces.basis(0)

    def embeddings() -> Tensors:
        folded = {names.embedding: fold_embedding(model.read_embedding(), first, centred=centred)}
        positions = model.read_positions()
        if positions is not None:
            folded[names.positions] = fold_embedding(positions, first, centred=centred)
        return folded

    def head() -> Tensors:
        bases = None
        if subspaces is not None and first is not None:
            last = subspaces.basis(model.family.last_stack.position(model.shape.num_hidden_layers))
            bases = first, last
        norm = model.read_final_norm()
        folded = fold_head(model.read_head(), norm, bases, keep_tied=keep_tied, scale=model.head_scale)
        tensors = {names.norm: folded.norm}
        if names.encoder_norm is not None:  # the decoder's keys and values took its weight in
            tensors[names.encoder_norm] = folded.norm.clone()
        for name, tensor in (
            (names.head, folded.weight),
            (names.head_bias, folded.bias),
            (names.head_map, folded.tied_map),
        ):
            if tensor is not None:
                tensors[name] = tensor
        return tensors

    return [embeddings, head]
