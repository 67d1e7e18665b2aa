"""Tensors that are one by the config and stored twice, as embedding and output head may be: they are taken as one.

A checkpoint may store an equal head beside the embedding, although its config says that they are one. A quantised file
may store two copies of one table, which then differ by the rounding of both.
"""

import itertools
from collections.abc import Iterator, Mapping

import torch

from oneshot.architecture import Description
from oneshot.checkpoint.reader import Checkpoint
from oneshot.errors import CheckpointError, PlanError

# Relative difference of two copies of a table that are quantised apart. Two tables of their own differ by more than 1.
NOISE = 0.1
PANEL_ROWS = 1024
SAMPLED_ROWS, SAMPLES = 64, 16


def without_equal_head(checkpoint: Checkpoint, family: Description, *, is_tied: bool) -> Checkpoint:
    """Return the checkpoint without its output head if the config ties it and it equals the embedding.

    `is_tied`: whether the config ties them. A head that differs stays, as in transformers.
    """
    names = _pair(checkpoint, family)
    if not is_tied or names is None or not _are_equal(checkpoint, names):
        return checkpoint
    return checkpoint.renamed({name: name for name in checkpoint.shapes if name != names[1]})


def check_copies(checkpoint: Checkpoint, family: Description, ties: Mapping[str, str]) -> None:
    """Check that stored copies of tensors equal them. A decoder's head may differ, see `without_equal_head`.

    Args:
        ties: see `stock.tied_names`.

    Raises `CheckpointError` for the first copy that differs; transformers computes with it.
    """
    for copied, name in ties.items():
        own, shape = checkpoint.shapes.get(copied), checkpoint.shapes.get(name)
        if copied == family.head or own is None or not shape:
            continue
        if own != shape or not _are_equal(checkpoint, (name, copied)):
            untied = f", or state tie_word_embeddings false and store {' and '.join(ties)}"
            raise CheckpointError(
                f"{checkpoint.stored(copied)} is stored with other values than {checkpoint.stored(name)}, although "
                f"config.json ties them; remove it from the file{untied if family.masked_head else ''}."
            )


def sampled_difference(checkpoint: Checkpoint, family: Description) -> float | None:
    """Return the relative difference of some rows of the embedding and a head of its own; None without such a head."""
    names = _pair(checkpoint, family)
    if names is None or family.decoder is not None or not checkpoint.weights_at_hand:
        return None
    rows = checkpoint.shapes[names[0]][0]
    return _difference(checkpoint, names, range(0, rows, max(SAMPLED_ROWS, rows // SAMPLES)), SAMPLED_ROWS)


def tied(checkpoint: Checkpoint, family: Description) -> Checkpoint:
    """Return the checkpoint whose embedding is also its output head: the stored head, which files quantise less.

    Raises `PlanError` if there is no head of its own, or if it is another table than the embedding.
    """
    names = _pair(checkpoint, family)
    if names is None or family.decoder is not None:
        raise PlanError("--tie needs an output head that is stored beside the embedding; leave it out.")
    rows = checkpoint.shapes[names[0]][0]
    difference = _difference(checkpoint, names, range(0, rows, PANEL_ROWS), PANEL_ROWS)
    if difference > NOISE:
        raise PlanError(
            f"--tie needs two copies of one table, but head and embedding differ by {difference:.0%}; leave it out."
        )
    embedding, head = names
    places = {name: name for name in checkpoint.shapes if name != head}
    view = checkpoint.renamed(places | {embedding: head})
    view.config = checkpoint.config | {"tie_word_embeddings": True}
    return view


def _pair(checkpoint: Checkpoint, family: Description) -> tuple[str, str] | None:
    """Return the names of the embedding and of a head of the same shape; None without such a head."""
    embedding, head = family.stack.embedding, family.head
    if head is None:
        return None
    if checkpoint.shapes.get(head, ()) != checkpoint.shapes.get(embedding):
        return None
    return embedding, head


def _are_equal(checkpoint: Checkpoint, names: tuple[str, str]) -> bool:
    """Return whether two tensors of one shape have the same values; it is taken for granted where none can be read."""
    if not checkpoint.weights_at_hand:
        return True
    starts = range(0, checkpoint.shapes[names[0]][0], PANEL_ROWS)
    return all(itertools.starmap(torch.equal, _panels(checkpoint, names, starts, PANEL_ROWS)))


def _difference(checkpoint: Checkpoint, names: tuple[str, str], starts: range, rows: int) -> float:
    """Return the Frobenius norm of the difference of two tables in panels of rows, divided by the first one's.

    It is 0 where no weights can be read, as they are taken for equal: a run will see.
    """
    if not checkpoint.weights_at_hand:
        return 0.0
    apart = whole = 0.0
    for first, second in _panels(checkpoint, names, starts, rows):
        first = first.double()
        apart += float((first - second.double()).square().sum())
        whole += float(first.square().sum())
    return (apart / whole) ** 0.5 if whole else 0.0


def _panels(
    checkpoint: Checkpoint, names: tuple[str, str], starts: range, rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield so many rows from every start, of two tables at the same time."""
    panels = [slice(start, start + rows) for start in starts]
    first, second = (checkpoint.read_panels(name, panels) for name in names)
    return zip(first, second, strict=True)
