"""Checks of a checkpoint's tensors against its config and the stock class, before any work."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from oneshot.architecture import Description, ModelShape, wrong_tensor
from oneshot.checkpoint.dtypes import WEIGHT_DTYPES
from oneshot.checkpoint.reader import Checkpoint
from oneshot.checkpoint.stock import complete_text_config, layer_kinds, sample_model, tied_names
from oneshot.errors import CheckpointError, cause
from oneshot.families import is_text

POOLER = "pooler."  # of a plain encoder; files of sentence encoders, which read no pooled output, may lack it


@dataclass(frozen=True)
class Outside:
    """Tensors outside the layers that the stock class has, with their shapes, and those that are others again.

    `tied`: see `stock.tied_names`.
    """

    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]

    def shared(self, checkpoint: Checkpoint, family: Description) -> set[str]:
        """Return the tied ones; transformers does not tie a head that has weights of its own."""
        return {name for name in self.tied if name != family.head or name not in checkpoint.shapes}


def stock_sample(checkpoint: Checkpoint, family: Description) -> Any:
    """Return a model of the stock class of the config, with the first layer of each stack.

    Raises `CheckpointError` if transformers cannot make that class.
    """
    try:
        return sample_model(checkpoint.config, family, torch.float32)
    except CheckpointError:
        raise  # which names a remedy of its own
    except Exception as error:  # transformers raises many unrelated types; the cause is named and chained
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'} does not describe a {family.model_type} model "
            f"({cause(error)}); give a complete, unmodified checkpoint."
        ) from error


def expected_outside(checkpoint: Checkpoint, family: Description) -> Outside:
    """Return the tensors outside the layers that the stock class of the config has. Raises as `stock_sample`."""
    model = stock_sample(checkpoint, family)
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if not family.is_in_layers(name) and is_text(family, name)
    }
    inputs, base = family.stack.token_inputs, f"{family.stack.base}."
    if inputs is not None:  # the sample has fewer layers than the model
        num_layers = complete_text_config(family, checkpoint.config)[family.sizes.num_hidden_layers]
        of_base = {name.removeprefix(base): size for name, size in shapes.items() if name.startswith(base)}
        shapes |= {base + name: size for name, size in inputs.of_layers(of_base, num_layers).items()}
    return Outside(shapes, tied_names(model))


def check_outside(checkpoint: Checkpoint, family: Description, shape: ModelShape, expected: Outside) -> None:
    """Check the tensors outside the layers against the stock class.

    Raises `CheckpointError` for the first tensor that does not fit.
    """
    tied = expected.shared(checkpoint, family) if family.classes or shape.tied else set()
    stored_text = {name for name in checkpoint.shapes if is_text(family, name)}
    names = without_lacking_pooler(expected.shapes, checkpoint.shapes)
    names |= {name for name in stored_text if not family.is_in_layers(name)}
    for name in sorted(names - tied):
        stored = checkpoint.shapes.get(name)
        if not name.endswith("rotary_emb.inv_freq") and stored != expected.shapes.get(name):
            raise wrong_tensor(name, stored, expected.shapes.get(name), family)


def lacks_pooler(stored: Collection[str]) -> bool:
    """Return whether a plain encoder is stored without its pooler; transformers then makes one of random weights."""
    return not any(name.startswith(POOLER) for name in stored)


def without_lacking_pooler(expected: Collection[str], stored: Collection[str]) -> set[str]:
    """Return the tensors that a class has, without a plain encoder's pooler if none of it is stored."""
    return {name for name in expected if not (name.startswith(POOLER) and lacks_pooler(stored))}


def check_carried(checkpoint: Checkpoint, family: Description, shape: ModelShape) -> None:
    """Check the tensors of carried mixers against the stock class, which alone knows them.

    Raises `CheckpointError` for the first tensor that does not fit.
    """
    firsts = [sizes.layers[0] for sizes in shape.carried]
    if not firsts:
        return
    layers = sample_model(checkpoint.config, family, torch.float32, firsts).get_submodule(family.stack.layers)
    for sizes, number, layer in zip(shape.carried, firsts, layers, strict=True):
        stored, of_ffn = dict(sizes.tensors), family.stack_of(number).ffn_prefixes
        own = {name: tuple(one.shape) for name, one in layer.state_dict().items() if not name.startswith(of_ffn)}
        for name in sorted(stored.keys() | own.keys()):
            if stored.get(name) != own.get(name):
                raise wrong_tensor(family.layer_prefix(number) + name, stored.get(name), own.get(name), family)


def without_zero_biases(checkpoint: Checkpoint, family: Description) -> Checkpoint:
    """Return the checkpoint without biases of zeros that no layer of its class has; transformers ignores them.

    Files of GPTQ hold them beside every quantised linear.
    """
    biases = [name for name in checkpoint.shapes if family.is_in_layers(name) and name.endswith(".bias")]
    if family.decoder is not None or not biases:
        return checkpoint
    prefix = f"{family.stack.layers}."
    num_layers = complete_text_config(family, checkpoint.config)[family.sizes.num_hidden_layers]
    _, model = _sample_of_kinds(checkpoint, family, num_layers)
    known = {name for layer in model.get_submodule(family.stack.layers) for name in layer.state_dict()}
    beside = [name for name in biases if name.removeprefix(prefix).partition(".")[2] not in known]
    unread = {name for name in beside if not checkpoint.read_one(name).any()}
    kept = {name: name for name in checkpoint.shapes if name not in unread}
    return checkpoint.renamed(kept) if unread else checkpoint


def check_biases(checkpoint: Checkpoint, family: Description, shape: ModelShape) -> None:
    """Check which biases are stored of layers against the stock class, one layer of every kind.

    transformers does not use those that the class lacks, and starts those with zeros that are not stored.

    Raises `CheckpointError` for the first one that does not fit.
    """
    kinds, model = _sample_of_kinds(checkpoint, family, shape.num_hidden_layers)
    for stack in family.stacks:
        for kind, layer in zip(kinds, model.get_submodule(stack.layers), strict=True):
            prefix = family.layer_prefix(max(stack.first_layer, kind))
            own = {prefix + name: tuple(one.shape) for name, one in layer.state_dict().items()}
            names = {name for name in (*own, *checkpoint.shapes) if name.startswith(prefix) and name.endswith(".bias")}
            for name in sorted(names):
                stored, expected = checkpoint.shapes.get(name), own.get(name)
                if (stored is None) != (expected is None):
                    raise wrong_tensor(name, stored, expected, family)


def _sample_of_kinds(checkpoint: Checkpoint, family: Description, num_layers: int) -> tuple[list[int], Any]:
    """Return the first layer of every kind, and a model of the stock class that has these layers."""
    kinds = sorted(set(layer_kinds(checkpoint.config, num_layers, family)))
    return kinds, sample_model(checkpoint.config, family, torch.float32, kinds)


def check_count(checkpoint: Checkpoint, family: Description, shape: ModelShape) -> None:
    """Check that plans count the parameters that are stored; else every target would be missed."""
    stored = sum(math.prod(size) for name, size in checkpoint.shapes.items() if not name.endswith("inv_freq"))
    counted = shape.stack().stored_parameters()
    if stored != counted:
        raise CheckpointError(
            f"The checkpoint stores {stored:,} parameters where {counted:,} are counted for a {family.model_type}; "
            "please report this with its config.json."
        )


def check_dtypes(checkpoint: Checkpoint) -> None:
    """Refuse quantised weights: weights are floating-point numbers of 16 bits or more."""
    for name, dtype in checkpoint.dtypes.items():
        if dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{name} is stored as {dtype}, so the weights are quantised; give the unquantised checkpoint and "
                "quantise the result."
            )
