"""The tokenizers of models that are compared: one text must be the same tokens to all."""

from collections.abc import Iterable, Sequence
from typing import Any

from oneshot.checkpoint import Checkpoint
from oneshot.errors import CalibrationError
from oneshot.text import holds_tokenizer, load_tokenizer


def refuse_other_tokenizers(
    names: Sequence[str], checkpoints: Sequence[Checkpoint], tokenizer: Any, tokens: Iterable[int]
) -> None:
    """Raise `CalibrationError` if a token id means different text in two of the models.

    Models that lie without a tokenizer are taken to have the first one's, which is `tokenizer`.
    """
    ids = sorted(set(tokens))
    for name, checkpoint in zip(names[1:], checkpoints[1:], strict=True):
        if not holds_tokenizer(checkpoint.folder):
            continue
        if load_tokenizer(checkpoint.folder).convert_ids_to_tokens(ids) != tokenizer.convert_ids_to_tokens(ids):
            raise CalibrationError(
                f"The tokenizers of {names[0]} and {name} differ, so the same numbers are "
                "other texts to the two models; compare models of one tokenizer, or evaluate each alone."
            )
