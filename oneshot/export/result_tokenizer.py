"""The tokenizer beside a result whose model type is another than the input's."""

import logging
from pathlib import Path
from typing import Any

from oneshot.errors import CalibrationError
from oneshot.text import holds_tokenizer, load_tokenizer, needs_conversion

logger = logging.getLogger(__name__)


def keep_tokenizer(source: Path, folder: Path) -> None:
    """Write the input's tokenizer as transformers reads it, if it reads another one beside another model type.

    It chooses the tokenizer's class by the type, and mends the pattern of old Mistral tokenizers
    (`fix_mistral_regex`) only beside types of Mistral.
    """
    if needs_conversion(source):
        load_tokenizer(source).save_pretrained(folder)
        return
    if not holds_tokenizer(source):
        return
    try:
        own = load_tokenizer(source)
    except CalibrationError:  # a run on tokens needs no tokenizer; its files are what they were
        return
    written = load_tokenizer(folder)
    if content_of(own) != content_of(written):
        own.save_pretrained(folder)
    if getattr(getattr(own, "backend_tokenizer", None), "fix_mistral_regex", None) is False:
        logger.warning(
            "transformers takes fix_mistral_regex for the tokenizer of %s but not for the result's, which has another "
            'model type; to have both mended, state "fix_mistral_regex": true in tokenizer_config.json of the input.',
            source,
        )


def content_of(tokenizer: Any) -> str | None:
    """Return all that decides how a tokenizer cuts texts; None for one that is written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else str(backend.to_str())
