"""Kinds of models: what each is asked, and how it is loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch

from oneshot.architecture import predicts_tokens, stated_class
from oneshot.checkpoint import load_whole
from oneshot.config import Kind
from oneshot.errors import CheckpointError, cause
from oneshot.evaluation.answers import Answers
from oneshot.evaluation.classification import Classification
from oneshot.evaluation.examples import Examples
from oneshot.evaluation.generation import Generation
from oneshot.evaluation.masked_tokens import MaskedTokens
from oneshot.evaluation.retrieval import Retrieval
from oneshot.export import model_classes
from oneshot.families import FAMILIES
from oneshot.report.card import USES

UNUSED = {"embedding": "pooler"}  # a part of the class that a kind does not use, so it may be missing


EXAMPLES: dict[Kind, type[Examples]] = {
    "classification": Classification,
    "masked-lm": MaskedTokens,
    "embedding": Retrieval,
    "text-to-text": Generation,
    "question-answering": Answers,
}


def kind_of(config: Mapping[str, Any]) -> Kind:
    """Return the kind of the model that a config.json describes.

    Raises `CheckpointError` for a class that is not known.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    predicts = family is not None and not family.classes and predicts_tokens(dict(config))
    predicts = predicts or (family is not None and family.text_module is not None)
    if predicts:
        return "causal"
    stated = stated_class(dict(config)) or "(none)"
    kind = next((use.kind for ending, use in USES.items() if stated.endswith(ending)), None)
    if kind is not None:
        return kind
    raise CheckpointError(
        f"config.json states the class {stated[:100]}, whose kind is not known; give --kind, one of "
        f"{', '.join(get_args(Kind))}."
    )


def load_as(kind: Kind, folder: Path, config: Mapping[str, Any], device: torch.device, dtype: torch.dtype | str) -> Any:
    """Load the model of a local checkpoint for inference as one of a kind.

    transformers' own class is taken, or this package's for its own forms. No file of the checkpoint is run.

    Raises `CheckpointError` if the model cannot be loaded, or lacks weights that the kind needs.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        if config.get("model_type") in CONFIG_MAPPING:
            model_class: Any = getattr(transformers, next(use.auto_class for use in USES.values() if use.kind == kind))
        else:
            _, model_class = model_classes(dict(config))
        model, loading = load_whole(model_class, folder, dtype=dtype, output_loading_info=True)
    except Exception as error:  # transformers raises many unrelated types; the cause is named and chained
        raise CheckpointError(
            f"{folder} cannot be loaded for {kind} ({cause(error)}); choose another --kind, or give a complete "
            "checkpoint."
        ) from error
    unused = UNUSED.get(kind)
    missing = sorted(name for name in loading["missing_keys"] if unused is None or unused not in name)
    if missing:
        raise CheckpointError(f"{folder} lacks {missing[0]}, which {kind} needs; choose another --kind.")
    return model.to(device).eval()
