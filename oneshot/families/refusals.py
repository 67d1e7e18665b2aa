"""Sentences about model types that are not supported."""

import difflib
from collections.abc import Collection

from oneshot.errors import CheckpointError


class UnknownFamilyError(CheckpointError):
    """A model type is not known; `nearest` is the family whose config is most like the model's.

    Attributes:
        model_type: as config.json states it.
    """

    def __init__(self, model_type: str, known: Collection[str], nearest: str | None = None) -> None:
        similar = difflib.get_close_matches(model_type, known, n=3)
        names = " and ".join(similar) if similar else f"{len(known)} families"
        like = "" if nearest is None else f", and its config has most in common with that of {nearest}"
        super().__init__(
            f"Model type {model_type[:100]!r} is not supported ({names} are){like}; the page Supported models of the "
            "documents (docs/supported-models.md) lists all families."
        )
        self.model_type = model_type


# model types whose layers have no FFN and no attention
WITHOUT_FFN = ("falcon_mamba", "mamba", "mamba2")
# beginnings of model types whose layers, or some of them, have a recurrent state in the place of attention
RECURRENT = ("bamba", "jamba", "kimi_linear", "olmo_hybrid", "recurrent_gemma", "rwkv", "xlstm", "zamba")

COMPRESSED_MODEL_TYPE = "oneshot"  # of a checkpoint in the per-layer form
ENCODER_MODEL_TYPE = "oneshot-encoder"  # of an encoder in the per-layer form
NAS_MODEL_TYPE = "nemotron-nas"
RESIZED_MODEL_TYPE = "oneshot-resized"  # of one in its family's class with other linears
COMPRESSED = (COMPRESSED_MODEL_TYPE, RESIZED_MODEL_TYPE, ENCODER_MODEL_TYPE, NAS_MODEL_TYPE)
"""Model types whose layers have sizes of their own."""


def refuse_recurrent(model_type: str) -> None:
    """Raise `CheckpointError` for a model type with recurrent states that is not described."""
    if model_type in WITHOUT_FFN:
        raise CheckpointError(
            f"Model type {model_type[:100]!r} has layers of a recurrent state alone, without an FFN or attention, so "
            "there is nothing in them to remove; give a model with FFNs, such as one of docs/supported-models.md."
        )
    if model_type.startswith("nemotron_h"):
        raise CheckpointError(
            f"Model type {model_type[:100]!r} has layers of one mixer each (FFN, attention or state-space model); "
            "only layers with an FFN behind another mixer are supported; give a model of docs/supported-models.md."
        )
    if model_type.startswith(RECURRENT):
        raise CheckpointError(
            f"Model type {model_type[:100]!r} has layers with a recurrent state (state-space, linear attention, or "
            "convolution) in a family that is not described; give one that is, such as one of "
            "docs/supported-models.md."
        )
