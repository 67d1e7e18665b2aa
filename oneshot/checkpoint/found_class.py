"""The class of a checkpoint: the names that tensors have in it, and which one it is if config.json states none."""

from oneshot.architecture import Description, as_stored, stated_class
from oneshot.checkpoint.checks import expected_outside, stock_sample, without_lacking_pooler
from oneshot.checkpoint.class_names import names_in_class
from oneshot.checkpoint.reader import Checkpoint
from oneshot.families import FAMILIES, find_family, is_text


def named_by(checkpoint: Checkpoint, family: Description) -> Checkpoint:
    """Return the checkpoint under the names of the class of its config; what is beside a language model keeps its own.

    Raises `CheckpointError` as `stock_sample` and `names_in_class`.
    """
    names = names_in_class(stock_sample(checkpoint, family), checkpoint.shapes)
    if family.text_module is not None:
        names = {name if is_text(family, name) else stored: stored for name, stored in names.items()}
    is_same = all(name == stored for name, stored in names.items())
    return checkpoint if is_same else checkpoint.renamed(names)


def stating_class(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint of an encoder or a T5 whose config states a class; another checkpoint as it is.

    If the config states none, it is the class that uses most of the stored tensors, of the classes whose tensors
    are all stored. The plain one is taken where several classes use as many.

    Raises `CheckpointError` as `named_by`, and for a variant of the family that is not supported.
    """
    config = checkpoint.config
    known = FAMILIES.get(str(config.get("model_type")))
    if known is None or not known.classes or known.text_module is not None or stated_class(config) is not None:
        return checkpoint
    family = find_family(config)
    used = {name: _num_used(checkpoint.stating(architectures=[name]), family) for name in family.classes}
    best = [name for name, number in used.items() if number == max(used.values())]
    return checkpoint.stating(architectures=best if len(best) == 1 else [family.classes[0]])


def _num_used(checkpoint: Checkpoint, family: Description) -> int:
    """Return how many tensors outside the layers the stated class has; 0 if they are not all stored."""
    named = named_by(checkpoint, family)
    expected = expected_outside(named, as_stored(family, named.config, named.tensor_names))
    own = without_lacking_pooler(expected.shapes, named.shapes) - expected.tied.keys()
    return len(own) if all(named.shapes.get(name) == expected.shapes[name] for name in own) else 0
