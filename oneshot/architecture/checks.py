"""Check the stored tensors of the layers against the sizes that a config.json states."""

from collections.abc import Mapping

from oneshot.architecture.description import Description
from oneshot.architecture.shapes import ModelShape
from oneshot.errors import CheckpointError


def check_layers(family: Description, shape: ModelShape, stored: Mapping[str, tuple[int, ...]]) -> None:
    """Check the layers' tensors, `name -> shape`, against the config's sizes before any work is done.

    `family`: numbered for the shape.

    Raises `CheckpointError` with the first tensor that is missing, unexpected, or of another size.
    """
    expected = {
        family.layer_prefix(layer) + name: size
        for layer in range(shape.num_hidden_layers)
        for name, size in family.stored_tensors(shape, layer).items()
    }
    in_layers = {name for name in stored if family.is_in_layers(name) and "rotary_emb" not in name}
    for name in sorted(expected.keys() | in_layers):
        if stored.get(name) != expected.get(name):
            raise CheckpointError(
                f"{name} has shape {stored.get(name)} where config.json of a {family.model_type} model asks for "
                f"{expected.get(name)}; give a complete, unmodified checkpoint."
            )
